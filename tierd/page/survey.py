"""Maps of the tiers by age and heat, and the reuse of blocks by their depth in a prompt.

A walk looks at every readable page of every tier, up to 4,096 at a time. After each step it sleeps
99 times as long as the step took, so it takes at most 1 % of the event loop. It runs only while a
page is open. Each figure was true when its step ran.
"""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
from numpy.typing import NDArray

from tierd.cache.cache import Cache
from tierd.core.formats.block import size_class
from tierd.core.plan import PagesHeld

SHARE = 0.01
"""Of the event loop."""
PAUSE_S = 4.0
"""Between two walks, at least."""
CELLS = 1920
"""Of all maps together."""
TIER_CELLS = 960
DEPTHS = tuple(512 << power for power in range(12))
"""Limits between the depths, tokens: below 512, below 1,024, ..., 1,048,576 and more."""

Sums = NDArray[np.float64]


class Map:
    """One tier in cells of equal bytes: sums over the readable pages that begin in each."""

    def __init__(self, cells: int) -> None:
        self.pages, self.bytes, self.hits, self.log_age = (np.zeros(cells) for _ in range(4))

    def add(self, cells: NDArray[np.int64], *, sizes: Sums, hits: Sums, ages: Sums) -> None:
        """Adds pages; sizes in bytes, ages in seconds."""
        count = len(self.pages)
        self.pages += np.bincount(cells, minlength=count)
        self.bytes += np.bincount(cells, sizes, minlength=count)
        self.hits += np.bincount(cells, hits, minlength=count)
        self.log_age += np.bincount(cells, np.log1p(ages), minlength=count)

    def plain(self) -> dict[str, list[int] | list[float]]:
        """Per cell: pages, bytes, hits of a page on average, seconds since its use (geometric mean)."""
        pages = np.maximum(self.pages, 1)
        return {
            "pages": self.pages.astype(int).tolist(),
            "bytes": self.bytes.astype(int).tolist(),
            "hits": np.round(self.hits / pages, 1).tolist(),
            "age_s": np.round(np.expm1(self.log_age / pages)).astype(int).tolist(),
        }


class Survey:
    """The walks over one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.cells = [min(TIER_CELLS, CELLS // len(cache.tiers)) for _ in cache.tiers]
        self.number = 0
        """Of finished walks."""
        self.found = b"null"
        """The last walk as JSON."""
        self.longest_step_s = 0.0
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Somebody looks: another walk follows."""
        self._wanted.set()

    async def run(self) -> None:
        """Walks whenever a walk is wanted, until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.walk()
            await asyncio.sleep(PAUSE_S)

    async def walk(self) -> None:
        """One walk over all tiers."""
        began = time.monotonic()
        self._block_tokens = self._tokens_of_blocks()
        self._depth_blocks, self._depth_hits = np.zeros(len(DEPTHS) + 1), np.zeros(len(DEPTHS) + 1)
        maps = [await self._walk_tier(tier) for tier in range(len(self._cache.tiers))]
        bounds = zip((0, *DEPTHS), (*DEPTHS, 0), self._depth_blocks, self._depth_hits, strict=True)
        found = {
            "number": self.number + 1,
            "seconds": round(time.monotonic() - began, 1),
            "tiers": {tier.spec.name: each.plain() for tier, each in zip(self._cache.tiers, maps, strict=True)},
            "depths": [[low, high, int(blocks), int(hits)] for low, high, blocks, hits in bounds],
        }
        self.found = json.dumps(found, separators=(",", ":")).encode()
        self.number += 1

    async def _walk_tier(self, tier: int) -> Map:
        made, after, capacity = Map(self.cells[tier]), -1, self._cache.tiers[tier].spec.capacity_bytes
        while True:
            began = time.perf_counter()
            held = self._cache.core.pages_held(tier, after=after, limit_bytes=capacity)
            if not len(held.extents):
                return made
            after = int(held.extents["page"][-1])
            self._add(made, tier, held)
            took = time.perf_counter() - began
            self.longest_step_s = max(self.longest_step_s, took)
            await asyncio.sleep(took * (1 / SHARE - 1))

    def _add(self, made: Map, tier: int, held: PagesHeld) -> None:
        core, spec, blocks = self._cache.core, self._cache.tiers[tier].spec, held.blocks
        begins = held.places * spec.segment_bytes + held.extents["offset"].astype(np.int64)
        cells = np.minimum(begins * len(made.pages) // spec.capacity_bytes, len(made.pages) - 1)
        hits = core.column("hits", blocks).astype(np.float64)
        ages = np.maximum(0.0, self._cache.clock.now() - core.column("last_used", blocks))
        lengths, which = np.unique(held.extents["length"], return_inverse=True)
        sizes = np.array([size_class(int(length)) + spec.slot_overhead_bytes for length in lengths], np.float64)
        made.add(cells, sizes=sizes[which], hits=hits, ages=ages)
        bits = core.tier_bits(blocks)
        nearest = (bits & (~bits + np.uint64(1))) == np.uint64(1 << tier)  # count a block once
        spaces = np.minimum(core.column("namespace", blocks[nearest]), len(self._block_tokens) - 1)
        starts = core.column("position", blocks[nearest]).astype(np.int64) * self._block_tokens[spaces]
        depths = np.searchsorted(DEPTHS, starts, side="right")
        self._depth_blocks += np.bincount(depths, minlength=len(DEPTHS) + 1)
        self._depth_hits += np.bincount(depths, hits[nearest], minlength=len(DEPTHS) + 1)

    def _tokens_of_blocks(self) -> NDArray[np.int64]:
        """Tokens of a block, by namespace id; 0 for an unknown namespace."""
        spaces = self._cache.registry.all()
        tokens = np.zeros(max((space.ids[-1] for space in spaces), default=0) + 2, np.int64)
        for space in spaces:
            tokens[space.id : space.id + len(space.ids)] = space.spec.tokens_per_block
        return tokens
