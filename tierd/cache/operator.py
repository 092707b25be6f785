"""What operators do to a cache: find blocks by their names, evict, pin, flush, bump an epoch, drain.

Purpose: the verbs behind the Admin service. Non-purpose: messages. A hash is given as hexadecimal digits, as people copy them from a
listing; a prefix is enough where it is unambiguous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierd.cache.cache import Cache
from tierd.cache.events import EventKind
from tierd.core.block import Namespace
from tierd.core.model import Reason, StructArray, TierKind
from tierd.core.plan import Ids
from tierd.errors import InvalidArgument, NotFound, Unavailable
from tierd.failpoint import failpoint

FLUSH_BATCH_BLOCKS = 256
FLUSHED_AT_ONCE = 2
"""Parts of a flush: while one syncs, the next one writes."""
POLL_S = 0.02
SORT_COLUMNS = {"recent": "last_used", "hits": "hits", "position": "position", "bytes": "length"}


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Which blocks a listing wants. sort: a key of SORT_COLUMNS, - before it reverses; empty fields do not restrict."""

    tier: str = ""
    namespace: int | None = None
    pinned: bool = False
    hash_prefix: str = ""
    sort: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """blocks and bytes that left; pinned: blocks that stayed because somebody holds them."""

    blocks: int
    bytes: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """blocks and bytes that are on NVMe now and were not before; left: blocks that no store could be made sure to hold, in the time there was."""

    blocks: int
    bytes: int
    left: int


class Operator:
    """The operators' verbs on one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._core = cache.core

    def tier_position(self, name: str) -> int | None:
        """Position of the tier with this name; None for the empty name. Raises NotFound."""
        if not name:
            return None
        names = [tier.spec.name for tier in self._cache.tiers]
        if name not in names:
            raise NotFound(f"tier {name}: unknown; this daemon has {', '.join(names)}")
        return names.index(name)

    def blocks(self, wanted: BlockFilter) -> StructArray:
        """BLOCK_INFO [n] of what matches, sorted."""
        ids = self._core.blocks(tier=self.tier_position(wanted.tier), namespace=wanted.namespace, pinned=wanted.pinned)
        if wanted.hash_prefix:
            ids = np.intersect1d(ids, self._by_prefix(wanted.hash_prefix))
        rows = self._core.describe(ids)
        key = wanted.sort.removeprefix("-") or "recent"
        if key not in SORT_COLUMNS:
            raise InvalidArgument(f"sort: {key!r} is unknown; use one of {', '.join(SORT_COLUMNS)}, with - to reverse")
        order = np.argsort(rows[SORT_COLUMNS[key]], kind="stable")
        descending = (key != "position" and not wanted.sort.startswith("-")) or wanted.sort == "-position"
        return rows[order[::-1]] if descending else rows[order]

    def find(self, prefix: str) -> int:
        """The one block whose hash begins so. Raises NotFound, InvalidArgument."""
        ids = self._by_prefix(prefix)
        if not len(ids):
            raise NotFound(f"block {prefix}: no tier holds a block of that hash; list them with `tierctl blocks`")
        if len(ids) > 1:
            raise InvalidArgument(f"block {prefix}: {len(ids)} blocks begin so; give more digits")
        return int(ids[0])

    def evict(self, prefixes: Sequence[str], tier: str) -> Evicted:
        """Drops blocks from a tier or from all; with no prefixes, every block there. Raises NotFound, InvalidArgument, Unavailable while such a tier is loading."""
        self._cache.releases.make()  # what was given back is nobody's any more
        position = self.tier_position(tier)
        self._check_whole(position)
        ids = self._named(prefixes) if prefixes else self._core.blocks(tier=position)
        before = self._core.describe(ids)
        self._cache.flights.start(self._core.evict(ids, tier=position, now=self._cache.clock.now()))
        kept = np.isin(ids, self._core.blocks(tier=position))
        return Evicted(int((~kept).sum()), int(before["length"][~kept].sum()), int(kept.sum()))

    def pin(self, prefixes: Sequence[str]) -> int:
        """Keeps blocks from eviction and demotion until unpinned."""
        return self._core.pin_blocks(self._named(prefixes))

    def unpin(self, prefixes: Sequence[str]) -> int:
        """The inverse of pin."""
        return self._core.unpin_blocks(self._named(prefixes))

    async def flush(self, *, timeout_s: float) -> Flushed:
        """Brings everything onto NVMe, synced. Raises InvalidArgument without an NVMe tier."""
        if not any(t.spec.kind is TierKind.NVME for t in self._cache.tiers):
            raise InvalidArgument("flush: this daemon has no nvme tier to write to; configure one")
        loop = asyncio.get_running_loop()
        deadline, blocks, size = loop.time() + timeout_s, 0, 0
        losses = self._cache.persistence.losses()
        rows = self._core.describe(self._core.blocks())
        is_there = (rows["tiers"] & self._nvme_bits()) != 0
        rows, written_before = rows[~is_there], rows["tiers"][is_there]
        parts = (rows[i : i + FLUSH_BATCH_BLOCKS] for i in range(0, len(rows), FLUSH_BATCH_BLOCKS))

        async def keep_parts() -> None:
            nonlocal blocks, size
            for part in parts:
                stored = await self._cache.persistence.persist(part["block"], timeout_s=deadline - loop.time())
                blocks += int(stored.sum())
                size += int(part["length"][stored].sum())
                if loop.time() >= deadline:
                    break

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(FLUSHED_AT_ONCE):
                    group.create_task(keep_parts())
        except ExceptionGroup as errors:  # who asked hears of the fault as of any other
            raise errors.exceptions[0] from errors
        # What demotion has written before. Which of it a sync that fails meanwhile has lost nobody asks: then nothing there is sure.
        synced = await self._cache.persistence.sync(timeout_s=deadline - loop.time(), losses=losses)
        return Flushed(blocks, size, len(rows) - blocks + int(((written_before & np.uint64(synced)) == 0).sum()))

    def bump_epoch(self, *, model: str, namespace_id: int) -> tuple[list[Namespace], int]:
        """Begins a new epoch of one namespace or of all of a model; the new ones, and how many blocks became unreachable."""
        registry = self._cache.registry
        old = [registry.get(namespace_id)] if namespace_id else registry.current(model=model)
        old = [n for n in old if registry.is_current(n)]
        if not old:
            raise NotFound(
                f"epoch bump: no current namespace of {model or namespace_id}; list them with `tierctl namespaces`"
            )
        ids = [rank_id for n in old for rank_id in n.ids]
        registry.check_room(len(ids))  # all epochs end, or none
        blocks = sum(len(self._core.blocks(namespace=i)) for i in ids)
        failpoint("operator.epoch.before_bump")
        fresh = [registry.bump(n) for n in old]
        for namespace in old:
            self._cache.events.add(
                EventKind.ENDED, tier=0, namespace=namespace.id, hashes=b"", reason=Reason.EPOCH_BUMPED.name.lower()
            )
        failpoint("operator.epoch.before_forgetting")
        self._cache.flights.start(self._core.forget_namespaces(ids, now=self._cache.clock.now()))
        return fresh, blocks

    async def drain(self, *, timeout_s: float) -> int:
        """Refuses new sessions and reservations and waits for leases to end; how many are left at the deadline."""
        self._cache.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := self._core.stats().leases) and loop.time() < deadline:  # noqa: ASYNC110  # the end of leases rings no bell
            await asyncio.sleep(POLL_S)
        return left

    def _check_whole(self, position: int | None) -> None:
        """Blocks that are not in the books yet would come back after they were said to be gone. Raises Unavailable."""
        health = self._cache.health
        for withheld in health.withheld():
            if position in (None, withheld):
                name = self._cache.tiers[withheld].spec.name
                raise Unavailable(
                    f"{name}: {health.trouble(withheld)}; evict when it has, or from a tier of memory alone"
                )

    def _named(self, prefixes: Sequence[str]) -> Ids:
        return np.array([self.find(p) for p in prefixes], dtype=np.int64)

    def _by_prefix(self, prefix: str) -> Ids:
        text = prefix.lower()
        if not text or len(text) > 64 or set(text) - set("0123456789abcdef"):
            raise InvalidArgument(f"hash {prefix!r}: not 1 to 64 hexadecimal digits; copy it from `tierctl blocks`")
        return self._core.find_by_prefix(text)

    def _nvme_bits(self) -> np.uint64:
        return np.uint64(sum(1 << t.position for t in self._cache.tiers if t.spec.kind is TierKind.NVME))
