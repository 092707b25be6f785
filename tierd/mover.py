"""The mover: runs transfers, and hashes.

It moves bytes from page to page in batches, verified on the way, bounded per link, demand before
prefetch before demotion. The GPU copies between device and mapped memory, and sums on the device;
so it does with direct reads from a store. The core decides the transfers; the cache handles
failures. A page is reported READY only if this copy was verified against the block's digest. The
event loop hashes and copies at most AT_ONCE_BYTES at a time. A batch has no deadline: a hung read
may still write into its target page, so the page stays reserved until the tier releases it. Waiting
calls have deadlines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, slice_sums, sums_of_views, table_digests
from tierd.core.arrays.sets import kinds
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import CODED, BlockStatus, Reason, StructArray
from tierd.encoded_copies import EncodedCopies, PrivatePages, apart, cuts_of, empty_pages, views_of
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.loads_by_layer import CopyByLayer, LoadByLayer
from tierd.store_codecs import StoreCodecs
from tierd.tiers import staged
from tierd.tiers.tier import (
    DeviceTier,
    MappedTier,
    SharedTier,
    SliceTable,
    StoredTier,
    Tier,
    is_device,
    is_mapped,
    is_stored,
)
from tierd.tracing import span

Second = TypeVar("Second")
Result = TypeVar("Result")

PRIORITY = {Reason.DEMAND: 0, Reason.DURABLE: 0, Reason.PREFETCH: 1, Reason.DEMOTION: 2}
LAST = 3
"""The priority of transfers that no call waits for."""
AT_ONCE_BYTES = 2 << 20
"""Up to this size the event loop hashes or copies itself: 0.1 ms, against 0.2 to wake a thread."""
BEGIN_S = 10.0
"""The threads that hash must start within this time."""
PIECE_BYTES = 1 << 20
"""Copied bytes are hashed piece by piece, while they are still in the processor's caches."""
HASH_SPLIT_BYTES = 4 << 20
"""Smaller batches are hashed in one thread: waking a second costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """digests: u1[n, 16]; slices: per block the xxh3-64 sums."""

    digests: NDArray[np.uint8]
    slices: list[NDArray[np.uint64]]


@dataclass
class Link:
    """One direction between two tiers: at most `limit` batches at once, in order of priority.
    Batches that no call waits for get at most half of them."""

    limit: int
    active: int = 0
    unawaited: int = 0
    """Active batches that no call waits for."""
    waiting: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)
    ticket: itertools.count[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Held while a batch is on the link."""
        if not self._has_room(priority) or (self.waiting and self.waiting[0][0] <= priority):
            await self._queue(priority)
        else:
            self._count(priority, 1)
        try:
            yield
        finally:
            self._pass_on(priority)

    async def _queue(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (priority, next(self.ticket), turn))
        try:
            with span("queue"):
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # a refusal gives no place
                self._pass_on(priority)
            raise

    def refuse(self, error: TierFailed) -> None:
        """Raises the error in all that wait for the link."""
        while self.waiting:
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():
                turn.set_exception(error)

    def _pass_on(self, priority: int) -> None:
        self._count(priority, -1)
        while self.waiting and self._has_room(self.waiting[0][0]):
            following, _, turn = heapq.heappop(self.waiting)
            if not turn.done():
                self._count(following, 1)
                turn.set_result(None)

    def _has_room(self, priority: int) -> bool:
        is_unawaited = priority >= PRIORITY[Reason.DEMOTION]
        return self.active < self.limit and not (is_unawaited and self.unawaited >= max(1, self.limit // 2))

    def _count(self, priority: int, change: int) -> None:
        self.active += change
        self.unawaited += change * (priority >= PRIORITY[Reason.DEMOTION])


class Mover:
    """Copies batches of blocks between tiers. link_limit: batches at once on each link."""

    def __init__(
        self, tiers: Sequence[Tier], *, hash_threads: int, link_limit: int, store_codecs: StoreCodecs | None = None
    ) -> None:
        """store_codecs: of blocks that stores keep encoded."""
        self._tiers = tiers
        self.encoded = EncodedCopies(store_codecs, self._in_threads)
        self._threads = ThreadPoolExecutor(hash_threads, thread_name_prefix="tierd-hash")
        self._have_begun = False
        self._hash_threads = hash_threads
        self._links: dict[tuple[int, int], Link] = {}
        self._link_limit = link_limit
        self.last_error = ""
        """Of a batch that failed as a whole, until it was reported."""

    def set_link_limit(self, limit: int) -> None:
        """Sets how many batches each link has at once. Those under way go on."""
        self._link_limit = limit
        for link in self._links.values():
            link.limit = limit

    async def copy(self, batch: StructArray, metas: StructArray) -> NDArray[np.uint16]:
        """Runs a batch of TRANSFER records of one link, with a META each. Gives BlockStatus u2[n].

        Faults are statuses: FAILED (by the tier), CORRUPT (the source's bytes are wrong) or NO_ROOM
        (the block's encoding does not fit). The metas of blocks that were encoded or decoded are
        those of the copies when it returns.
        """
        source, target = int(batch["source"]["tier"][0]), int(batch["target"]["tier"][0])
        link = self._links.setdefault((source, target), Link(self._link_limit))
        priority = min(PRIORITY.get(Reason(r), 2) for r in kinds(batch["reason"]))
        try:
            async with link.slot(priority):
                statuses = await self._copy(batch, metas, self._tiers[source], self._tiers[target])
                self.last_error = self.encoded.take_error() or self.last_error
                return statuses
        except (TierFailed, OSError) as error:
            self.last_error = str(error)
            return np.full(len(batch), BlockStatus.FAILED, dtype=np.uint16)

    @asynccontextmanager
    async def last_turn(self, source: int) -> AsyncIterator[None]:
        """A place on the busiest link out of a tier, after all waiting: for the daemon's reads."""
        links = [link for (origin, _), link in self._links.items() if origin == source]
        if not links:
            yield
            return
        async with max(links, key=lambda link: link.active + len(link.waiting)).slot(LAST):
            yield

    async def _copy(self, batch: StructArray, metas: StructArray, source: Tier, target: Tier) -> NDArray[np.uint16]:
        if is_mapped(source) and is_mapped(target):
            return await self._copy_mapped(batch, metas, source, target)
        if is_mapped(source) and is_stored(target):
            return await apart(batch["target"], batch, metas, self._store, self.encoded.store, source, target)
        if is_stored(source) and is_mapped(target):
            return await apart(batch["source"], batch, metas, self._load, self.encoded.load, source, target)
        if is_stored(source) and is_stored(target):
            return await self._between_stores(batch, metas, source, target)
        if is_stored(source) and is_device(target):
            return await self._load_direct(batch, metas, source, target)
        if is_mapped(source) and is_device(target):
            return await self._to_device(batch, metas, source, target)
        if is_device(source) and is_mapped(target):
            return await self._from_device(batch, metas, source, target)
        # The core plans device-to-store moves over a host tier, which both kinds require.
        raise AssertionError(f"no link from {source.spec.name} to {target.spec.name}")

    async def _copy_mapped(
        self, batch: StructArray, metas: StructArray, source: MappedTier, target: MappedTier
    ) -> NDArray[np.uint16]:
        failpoint("mover.copy.before_copy")
        views = views_of(source, batch["source"], metas)
        targets = views_of(target, batch["target"], metas)
        await self._in_threads(_copy_views, views, targets)
        # Only the copy is verified: a writer may still reach the source page.
        return self._publish(batch, metas, target, await self.hash(targets, metas))

    async def _store(
        self, batch: StructArray, metas: StructArray, source: MappedTier | PrivatePages, target: StoredTier
    ) -> NDArray[np.uint16]:
        pages, cuts, digests = source.views(batch["source"]), cuts_of(metas), metas["digest"]
        failpoint("mover.store.before_hash")

        def hash_rows(rows: Sequence[int]) -> list[SliceTable | None]:
            tables = sums_of_views([pages[row] for row in rows], [cuts[row] for row in rows])
            same = (table_digests(raw_tables(tables)) == digests[rows]).all(axis=1).tolist()
            return [table if is_its else None for table, is_its in zip(tables, same, strict=True)]

        known = _known(source.slices(batch["source"]), digests)
        return await target.write(batch["target"], metas, hash_rows, pages, known=known)

    async def _load(
        self, batch: StructArray, metas: StructArray, source: StoredTier, target: MappedTier | PrivatePages
    ) -> NDArray[np.uint16]:
        if not isinstance(target, PrivatePages) and LoadByLayer.is_of_use(batch, metas):
            load = LoadByLayer(batch, metas)
            return self._loaded(batch, metas, target, await load.run(source, target), load.slices)
        pages, cuts = target.views(batch["target"]), cuts_of(metas)
        slices: list[SliceTable] = [np.zeros(0, dtype=np.uint64)] * len(batch)

        def arrived(rows: Sequence[int]) -> Sequence[SliceTable]:
            tables = sums_of_views([pages[row] for row in rows], [cuts[row] for row in rows])
            for row, table in zip(rows, tables, strict=True):
                slices[row] = table
            return tables

        result = await source.read(batch["source"], pages, metas, arrived=arrived)
        return self._loaded(batch, metas, target, np.asarray(result.statuses, dtype=np.uint16).copy(), slices)

    def _loaded(
        self,
        batch: StructArray,
        metas: StructArray,
        target: MappedTier | PrivatePages,
        statuses: NDArray[np.uint16],
        slices: list[SliceTable],
    ) -> NDArray[np.uint16]:
        """The statuses after a load, and the blocks in the target's catalogue. slices: of all bytes."""
        failpoint("mover.load.before_verify")
        good = np.flatnonzero(statuses == BlockStatus.READY)
        if len(good):
            hashed = _hashed([slices[i] for i in good.tolist()])
            statuses[good] = self._publish(batch[good], metas[good], target, hashed)
        return statuses

    async def _between_stores(
        self, batch: StructArray, metas: StructArray, source: StoredTier, target: StoredTier
    ) -> NDArray[np.uint16]:
        pages, origins = PrivatePages(batch["target"], metas), metas["digest"].copy()
        statuses = await apart(batch["source"], batch, metas, self._load, self.encoded.load, source, pages)
        rows = np.flatnonzero(statuses == BlockStatus.READY)
        if len(rows):
            rest, some = batch[rows], metas[rows]
            rest["source"] = rest["target"]  # by which the pages are found
            is_coded = rest["target"]["flags"] & CODED > 0
            some["origin"][is_coded] = origins[rows][is_coded]
            statuses[rows] = await apart(rest["target"], rest, some, self._store, self.encoded.store, pages, target)
            metas[rows] = some
        return statuses

    async def _to_device(
        self, batch: StructArray, metas: StructArray, source: MappedTier, target: DeviceTier
    ) -> NDArray[np.uint16]:
        failpoint("mover.device.before_load")
        if CopyByLayer.is_of_use(batch, metas):
            copy = CopyByLayer(batch, metas)
            await copy.run(source, target)
            return self._publish(batch, metas, target, _hashed(copy.slices))
        slices = await target.load(batch["target"], metas, source=source, sources=batch["source"])
        return self._publish(batch, metas, target, _hashed(slices))  # of the device's copy

    async def _load_direct(
        self, batch: StructArray, metas: StructArray, source: StoredTier, target: DeviceTier
    ) -> NDArray[np.uint16]:
        failpoint("mover.direct.before_read")
        heads, came = await _both(
            source.check(batch["source"], metas),
            target.read(batch["target"], metas, source=source, sources=batch["source"]),
        )
        statuses, rows = heads.copy(), np.flatnonzero(heads == BlockStatus.READY)
        if len(rows):  # blocks that did not arrive have no sums, and so a wrong digest
            hashed = _hashed([came.slices[row] for row in rows.tolist()])
            statuses[rows] = self._publish(batch[rows], metas[rows], target, hashed)
        for row in rows[statuses[rows] != BlockStatus.READY].tolist():
            statuses[row] = await self._ask_store(batch[row : row + 1], metas[row : row + 1], source)
            if statuses[row] == BlockStatus.READY:
                # The stored block is right, the direct read is wrong: stop trusting direct reads.
                statuses[row] = BlockStatus.FAILED
                target.distrust(source.position, came.faults.get(row, "a direct read returned wrong bytes"))
        return statuses

    async def _ask_store(self, transfer: StructArray, metas: StructArray, source: StoredTier) -> int:
        """The store's status of one block, read into memory of this process."""
        length = int(metas["stored_length"][0])
        view = empty_pages(length)
        status = int((await source.read(transfer["source"], [view], metas)).statuses[0])
        if status == BlockStatus.READY:
            status = int(_judge(await self.hash([view[:length]], metas), metas)[0])
        return status

    async def _from_device(
        self, batch: StructArray, metas: StructArray, source: DeviceTier, target: MappedTier
    ) -> NDArray[np.uint16]:
        failpoint("mover.device.before_store")
        await source.store(batch["source"], metas, target=target, targets=batch["target"])
        return self._publish(batch, metas, target, await self.hash(views_of(target, batch["target"], metas), metas))

    @staticmethod
    def _publish(
        batch: StructArray, metas: StructArray, target: SharedTier | PrivatePages, hashed: Hashed
    ) -> NDArray[np.uint16]:
        statuses = _judge(hashed, metas)
        good = np.flatnonzero(statuses == BlockStatus.READY)
        if len(good):
            failpoint("mover.publish.before_catalogue")
            target.publish(batch["target"][good], metas[good], [hashed.slices[i] for i in good])
        return statuses

    async def hash(self, views: Sequence[memoryview], metas: StructArray) -> Hashed:
        """Slice sums and digests of blocks, in threads. metas: META per view, for the slices."""
        cuts = [slice_lengths(len(v), int(layers)) for v, layers in zip(views, metas["layers"], strict=True)]
        return _hashed(await self._in_threads(slice_sums, views, cuts))

    async def hash_pages(self, extents: StructArray, metas: StructArray) -> Hashed:
        """As `hash`, in place: threads hash mapped memory, a GPU its own. Raises TierFailed."""
        slices: list[SliceTable] = [np.zeros(0, dtype=np.uint64)] * len(extents)
        for position in np.unique(extents["tier"]).tolist():
            rows = np.flatnonzero(extents["tier"] == position)
            found = await self._slices(self._tiers[position], extents[rows], metas[rows])
            for row, table in zip(rows.tolist(), found, strict=True):
                slices[row] = table
        return _hashed(slices)

    async def seal(self, sources: StructArray, extents: StructArray, metas: StructArray) -> Hashed:
        """Copies staging pages into pages that no client can write, and hashes those. Raises
        TierFailed if a writer has truncated its memory."""
        tiers = [tier for tier in map(self._tiers.__getitem__, extents["tier"].tolist()) if is_mapped(tier)]
        lengths = metas["stored_length"].tolist()
        views = [tier.view(row)[:length] for tier, row, length in zip(tiers, extents, lengths, strict=True)]
        staging = list(zip(tiers, sources, cuts_of(metas), strict=True))
        return _hashed(await self._in_threads(_copy_and_sum, views, staging, passes=2))

    async def check(self, extents: StructArray, metas: StructArray) -> NDArray[np.bool_]:
        """Which pages of shared tiers hold exactly the blocks of metas. Raises TierFailed."""
        hashed = await self.hash_pages(extents, metas)
        return np.asarray((hashed.digests == metas["digest"]).all(axis=1))

    async def _slices(self, tier: Tier, extents: StructArray, metas: StructArray) -> list[SliceTable]:
        if is_device(tier):
            return await tier.sums(extents, metas)
        assert is_mapped(tier), f"{tier.spec.name}: its pages are read, not hashed where they lie"
        return (await self.hash(views_of(tier, extents, metas), metas)).slices

    async def _in_threads(
        self,
        work: Callable[[memoryview, Second], Result],
        first: Sequence[memoryview],
        second: Sequence[Second],
        *,
        passes: int = 1,
    ) -> list[Result]:
        """[work(a, b) for a, b in zip(first, second)], inline, in one thread or several, by size.

        passes: over the bytes of `first`. Ends when the last thread has released the pages, also
        after a failure. Raises TierFailed if no thread can be started.
        """
        size = sum(map(len, first)) * passes
        if size <= AT_ONCE_BYTES:
            return _each(work, first, second)
        parts = self._hash_threads if size > HASH_SPLIT_BYTES else 1
        step = -(-len(first) // parts) or 1
        jobs = [
            self._in_thread(_each, work, first[i : i + step], second[i : i + step]) for i in range(0, len(first), step)
        ]
        if jobs:
            await asyncio.wait(jobs)
        return [result for job in jobs for result in job.result()]

    def _in_thread(self, work: Callable[..., Result], *given: Any) -> asyncio.Future[Result]:
        """Work in one of the threads that hash. Raises TierFailed if they cannot be started."""
        if not self._have_begun:
            _begin(self._threads, self._hash_threads)
            self._have_begun = True
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def refuse(self, tier: int) -> None:
        """Fails all that wait for a link of this tier: it is out of service. Active ones go on."""
        for (source, target), link in self._links.items():
            if tier in (source, target):
                link.refuse(TierFailed(f"{self._tiers[tier].spec.name}: out of service; see `tierctl tiers`"))

    def queued(self) -> int:
        """Batches that wait for a link."""
        return sum(len(link.waiting) for link in self._links.values())

    def close(self) -> None:
        """Lets running work finish and ends the threads."""
        self._threads.shutdown(wait=True)


async def _both(first: Awaitable[Result], second: Awaitable[Second]) -> tuple[Result, Second]:
    """Both results, when both have ended. Raises the error of one of them."""
    done = await asyncio.gather(first, second, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return cast("tuple[Result, Second]", tuple(done))


def _begin(threads: ThreadPoolExecutor, count: int) -> None:
    """Starts all threads now, else raises TierFailed. A pool that fails to start a thread has
    already queued the work, which would then run late."""
    all_here = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(all_here.wait)
        all_here.wait(BEGIN_S)
    except RuntimeError as error:  # a barrier that is late raises one too
        all_here.abort()
        raise TierFailed(
            f"mover.hash_threads: {count} cannot be started ({error}); raise the limit of tasks"
        ) from error


def _each(
    work: Callable[[memoryview, Second], Result], first: Sequence[memoryview], second: Sequence[Second]
) -> list[Result]:
    return [work(a, b) for a, b in zip(first, second, strict=True)]


def _copy_views(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))  # releases the GIL


def _copy_and_sum(target: memoryview, staging: tuple[MappedTier, np.void, list[int]]) -> SliceTable:
    """Sums of the target's bytes: the source may change at any time."""
    tier, source, cuts = staging
    tables, piece, begun, end = list[SliceTable](), list[int](), 0, 0
    for length in cuts:
        piece.append(length)
        end += length
        if end - begun >= PIECE_BYTES or end == len(target):
            staged.read(tier, source, target[begun:end], at=begun)
            tables.append(slice_sums(target[begun:end], piece))
            piece, begun = [], end
    return np.concatenate(tables)


def _known(tables: Sequence[SliceTable | None], digests: NDArray[np.uint8]) -> list[SliceTable | None]:
    """The tables that match the blocks' digests, else None. digests: u1[n, 16]."""
    found = table_digests(raw_tables([np.zeros(0, np.uint64) if table is None else table for table in tables]))
    good = (found == digests).all(axis=1).tolist()
    return [table if is_good else None for table, is_good in zip(tables, good, strict=True)]


def _hashed(slices: list[SliceTable]) -> Hashed:
    return Hashed(table_digests(raw_tables(slices)), slices)


def _judge(hashed: Hashed, metas: StructArray) -> NDArray[np.uint16]:
    same = (hashed.digests == metas["digest"]).all(axis=1)
    return np.where(same, BlockStatus.READY, BlockStatus.CORRUPT).astype(np.uint16)


def link_of(transfers: StructArray) -> NDArray[np.int64]:
    """A number per transfer that is equal for transfers on the same link."""
    source, target = transfers["source"]["tier"], transfers["target"]["tier"]
    return np.asarray(source.astype(np.int64) << 16 | target.astype(np.int64))
