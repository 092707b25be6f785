"""The operators' verbs on a cache: find blocks by name, evict, pin, flush, bump an epoch, drain.

They serve the Admin service, which handles the messages. A hash is given in hexadecimal digits, as
copied from a listing. An unambiguous prefix suffices.

Verbs over all blocks work in pieces, and other calls run in between. Otherwise millions of blocks
would stop the loop for seconds. So their result was true of each block at a different moment. After
an await, an id may stand for another block.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.cache.cache import Cache
from tierd.cache.events import EventKind
from tierd.core.formats.block import Namespace
from tierd.core.formats.model import HASH_BYTES, Reason, StructArray
from tierd.core.plan import Ids
from tierd.errors import InvalidArgument, NotFound, Unavailable
from tierd.failpoint import failpoint

FLUSH_BATCH_BLOCKS = 256
FLUSHED_AT_ONCE = 2
"""Parts of a flush at a time: while one syncs, the next one writes."""
POLL_S = 0.02
SORT_COLUMNS = {"recent": "last_used", "hits": "hits", "position": "position", "bytes": "length"}


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Selects blocks for a listing. Empty fields do not restrict. sort: a key of SORT_COLUMNS; a
    leading - reverses."""

    tier: str = ""
    namespace: int | None = None
    pinned: bool = False
    hash_prefix: str = ""
    sort: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a listing: BLOCK_INFO [n], and how many blocks match in all."""

    rows: StructArray
    total: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """blocks, bytes: evicted. pinned: blocks that stayed because a lease or an operator holds them."""

    blocks: int
    bytes: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """blocks, bytes: newly on NVMe. left: blocks that no store confirmed in time."""

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

    async def blocks(self, wanted: BlockFilter, *, offset: int, limit: int) -> Page:
        """Matching blocks, sorted: `limit` rows from `offset` on. Raises NotFound, InvalidArgument.
        A block freed meanwhile is counted but not shown."""
        key = wanted.sort.removeprefix("-") or "recent"
        if key not in SORT_COLUMNS:
            raise InvalidArgument(f"sort: {key!r} is unknown; use one of {', '.join(SORT_COLUMNS)}, with - to reverse")
        matches = self._filter(wanted)
        found = [np.zeros(0, np.int64)]
        keys = [self._core.column(SORT_COLUMNS[key], found[0])]
        for ids in self._core.pieces():
            found.append(matches(ids))
            keys.append(self._core.column(SORT_COLUMNS[key], found[-1]))
            await asyncio.sleep(0)
        descending = (key != "position" and not wanted.sort.startswith("-")) or wanted.sort == "-position"
        # In a thread: sorting ten million takes a second, and numpy releases the interpreter lock.
        ids = await asyncio.to_thread(_sorted, found, keys, descending=descending)
        return Page(self._core.describe(matches(ids[offset : offset + limit])), len(ids))

    async def counts(self) -> Counter[int]:
        """Blocks by namespace id."""
        counts: Counter[int] = Counter()
        for ids in self._core.pieces():
            counts.update(self._core.column("namespace", self._core.blocks(of=ids)).tolist())
            await asyncio.sleep(0)
        return counts

    async def find(self, prefix: str) -> int:
        """The one block with this hash prefix when the call ends. Raises NotFound, InvalidArgument."""
        ids = await self._by_prefix(prefix)
        if not len(ids):
            raise NotFound(f"block {prefix}: no tier holds a block with this hash; list blocks with `tierctl blocks`")
        if len(ids) > 1:
            raise InvalidArgument(f"block {prefix}: {len(ids)} hashes begin with it; give more digits")
        return int(ids[0])

    async def evict(self, prefixes: Sequence[str], tier: str) -> Evicted:
        """Evicts blocks from a tier or from all. Without prefixes, evicts all blocks, perhaps also
        some that arrive meanwhile.

        Evictions made before a cancellation stand. Raises NotFound, InvalidArgument, Unavailable
        while such a tier is loading."""
        self._cache.process_notices(None)  # process pending releases first
        position = self.tier_position(tier)
        self._check_whole(position)
        if prefixes:
            return self._drop(await self._named(prefixes), position)
        gone = Evicted(0, 0, 0)
        for ids in self._core.pieces():
            more = self._drop(self._core.blocks(tier=position, of=ids), position)
            gone = Evicted(gone.blocks + more.blocks, gone.bytes + more.bytes, gone.pinned + more.pinned)
            await asyncio.sleep(0)
        return gone

    async def pin(self, prefixes: Sequence[str]) -> int:
        """Keeps blocks from eviction and demotion until unpinned."""
        return self._core.pin_blocks(await self._named(prefixes))

    async def unpin(self, prefixes: Sequence[str]) -> int:
        """The inverse of pin."""
        return self._core.unpin_blocks(await self._named(prefixes))

    async def flush(self, *, timeout_s: float) -> Flushed:
        """Writes all blocks to NVMe and syncs. Raises InvalidArgument without an NVMe tier."""
        if not any(t.spec.is_durable for t in self._cache.tiers):
            raise InvalidArgument(
                "flush: this daemon has no nvme tier to write to, of level 1 or more; add an [[nvme]] table"
            )
        loop = asyncio.get_running_loop()
        deadline, blocks, size = loop.time() + timeout_s, 0, 0
        losses = self._cache.persistence.losses()
        ids, written_before = await self._unwritten()
        parts = (ids[i : i + FLUSH_BATCH_BLOCKS] for i in range(0, len(ids), FLUSH_BATCH_BLOCKS))

        async def keep_parts() -> None:
            nonlocal blocks, size
            for part in parts:
                lengths = self._core.column("length", part)
                stored = await self._cache.persistence.persist(part, timeout_s=deadline - loop.time())
                blocks += int(stored.sum())
                size += int(lengths[stored].sum())
                if loop.time() >= deadline:
                    break

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(FLUSHED_AT_ONCE):
                    group.create_task(keep_parts())
        except ExceptionGroup as errors:  # the caller gets the error itself, as from any other verb
            raise errors.exceptions[0] from errors
        # Blocks that demotion wrote before. If a store loses blocks meanwhile, none of its blocks
        # count.
        synced = await self._cache.persistence.sync(timeout_s=deadline - loop.time(), losses=losses)
        unsynced = sum(count for tiers, count in written_before.items() if not tiers & synced)
        return Flushed(blocks, size, len(ids) - blocks + unsynced)

    async def bump_epoch(
        self, *, model: str, namespace_id: int, keep: Callable[..., Awaitable[None]]
    ) -> tuple[list[Namespace], int]:
        """Begins a new epoch of one namespace or of all of a model. Returns the new ones and the
        number of blocks dropped.

        All old blocks become unreachable at once, before the first await. keep: records the new
        namespaces for the next daemon. Pages are freed after that, in pieces, even if the caller is
        cancelled. Raises NotFound, Overloaded, and what keep raises.
        """
        registry = self._cache.registry
        old = [registry.get(namespace_id)] if namespace_id else registry.current(model=model)
        old = [n for n in old if registry.is_current(n)]
        if not old:
            raise NotFound(
                f"epoch bump: no current namespace matches {model or namespace_id}; list them with `tierctl namespaces`"
            )
        ids = [rank_id for n in old for rank_id in n.ids]
        registry.check_bumps(old)  # all epochs end, or none
        failpoint("operator.epoch.before_bump")
        for namespace in old:
            self._cache.directories.end(namespace)
        fresh = [registry.bump(n) for n in old]
        for namespace in old:
            self._cache.events.add(
                EventKind.ENDED, tier=0, namespace=namespace.id, hashes=b"", reason=Reason.EPOCH_BUMPED.name.lower()
            )
        failpoint("operator.epoch.before_forgetting")
        forgotten = self._core.forget_namespaces(ids, now=self._cache.clock.now())
        self._cache.flights.start(forgotten.plan)
        await self._cache.background.end_epochs(ids, lambda: keep(*fresh))
        return fresh, forgotten.blocks

    async def drain(self, *, timeout_s: float) -> int:
        """Refuses new sessions and reservations, and waits for leases to end, or until the drain is
        undone. Returns how many are left at the deadline."""
        self._cache.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := self._core.stats().leases) and self._cache.is_draining and loop.time() < deadline:  # noqa: ASYNC110  # has no event
            await asyncio.sleep(POLL_S)
        return left

    def undo_drain(self) -> int:
        """Takes new work again. Returns how many leases there are."""
        self._cache.is_draining = False
        return self._core.stats().leases

    def _check_whole(self, position: int | None) -> None:
        """Raises Unavailable while a store is loading: its blocks would return after their eviction
        was confirmed."""
        health = self._cache.health
        for withheld in health.withheld():
            if position in (None, withheld):
                name = self._cache.tiers[withheld].spec.name
                raise Unavailable(
                    f"{name}: {health.trouble(withheld)}; evict once it is loaded, or only from a memory tier"
                )

    async def _unwritten(self) -> tuple[Ids, Counter[int]]:
        """Blocks that no store holds. Also the number of the other blocks by their tier bits."""
        unwritten, written = [np.zeros(0, np.int64)], Counter[int]()
        for ids in self._core.pieces():
            blocks = self._core.blocks(of=ids)
            tiers = self._core.tier_bits(blocks)
            is_there = (tiers & self._nvme_bits()) != 0
            unwritten.append(blocks[~is_there])
            written.update(tiers[is_there].tolist())
            await asyncio.sleep(0)
        return np.concatenate(unwritten), written

    def _drop(self, ids: Ids, position: int | None) -> Evicted:
        lengths = self._core.column("length", ids)
        self._cache.flights.start(self._core.evict(ids, tier=position, now=self._cache.clock.now()))
        kept = np.isin(ids, self._core.blocks(tier=position, of=ids))
        return Evicted(int((~kept).sum()), int(lengths[~kept].sum()), int(kept.sum()))

    def _filter(self, wanted: BlockFilter) -> Callable[[Ids], Ids]:
        """A filter of ids that keeps their order. Raises NotFound, InvalidArgument."""
        tier, digits = self.tier_position(wanted.tier), _digits(wanted.hash_prefix) if wanted.hash_prefix else ""

        def matches(ids: Ids) -> Ids:
            ids = self._core.find_by_prefix(digits, of=ids) if digits else ids
            return self._core.blocks(tier=tier, namespace=wanted.namespace, pinned=wanted.pinned, of=ids)

        return matches

    async def _named(self, prefixes: Sequence[str]) -> Ids:
        """The blocks of these prefixes, without those freed during the search. Raises NotFound,
        InvalidArgument."""
        ids, names = np.zeros(len(prefixes), np.int64), list[StructArray]()
        for row, prefix in enumerate(prefixes):
            ids[row] = await self.find(prefix)
            names.append(self._core.names(ids[row : row + 1]))
        return ids[self._core.names(ids) == np.concatenate(names)] if names else ids

    async def _by_prefix(self, prefix: str) -> Ids:
        digits = _digits(prefix)
        if len(digits) == 2 * HASH_BYTES:  # only its namespace is unknown
            await asyncio.sleep(0)
            namespaces = np.array([i for namespace in self._cache.registry.current() for i in namespace.ids], np.int64)
            name = np.frombuffer(bytes.fromhex(digits), np.uint8)
            ids = self._core.find_blocks(namespaces, np.broadcast_to(name, (len(namespaces), HASH_BYTES)))
            return ids[ids >= 0]
        found = [np.zeros(0, np.int64)]
        for ids in self._core.pieces():
            found.append(self._core.find_by_prefix(digits, of=ids))
            await asyncio.sleep(0)
        return self._core.find_by_prefix(digits, of=np.concatenate(found))

    def _nvme_bits(self) -> np.uint64:
        return np.uint64(sum(1 << t.position for t in self._cache.tiers if t.spec.is_durable))


def _digits(prefix: str) -> str:
    text = prefix.lower()
    if not text or len(text) > 2 * HASH_BYTES or set(text) - set("0123456789abcdef"):
        raise InvalidArgument(f"hash {prefix!r}: not 1 to 64 hexadecimal digits; copy it from `tierctl blocks`")
    return text


def _sorted(found: Sequence[Ids], keys: Sequence[NDArray[Any]], *, descending: bool) -> Ids:
    """The ids in the order of their keys."""
    order = np.concatenate(keys).argsort(kind="stable")
    ids: Ids = np.concatenate(found)[order[::-1] if descending else order]
    return ids
