"""The NVMe tier: a store of blocks in preallocated files of one directory.

Purpose: `NvmeStore`, a stored tier: slots, journal and snapshot brought together. Non-purpose: deciding, verifying payload (mover), deadlines (those who
wait for the mover). Layout on disk: `FORMAT-NVME.md`.

Why a crash never shows a wrong byte. A block is in the journal only after its slot was synced, so what the journal tells is on the disk. A
slot may be reused before the removal of its old block is durable; then the journal may name a block whose slot holds another, or parts of two.
The header inside the slot decides: it names block, place, generation and store, and the digest of the slice table, which names the payload. So the old block
is served if every byte of it is still there, the new one if its record is durable, and everything else is a miss.

Invariants:
- `apply` touches memory alone.
- Once a sync has failed, writes are FAILED and `sync` raises until `probe` has put new files in the place of those that failed; what is durable is
  served. A block that was not durable then is no longer held, and neither is one that was being written to a file that gave way.
- A call that hangs keeps its thread; who waits for a thread meanwhile is FAILED.
- `read` and `write` end only when no thread touches their buffers any more, also when they are cancelled.
- Nothing is written with a generation that the durable marks do not cover.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import EXTENT, UNVERIFIED, BlockStatus, SegmentAssignment, StructArray, TierSpec
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.calls import Calls, Kind, outlast
from tierd.tiers.files import OS, Files
from tierd.tiers.journal import REMOVED, BlocksRemoved, BlocksStored, NamespaceKept, SegmentBegun
from tierd.tiers.ledger import Ledger
from tierd.tiers.slots import (
    HEADER_BYTES,
    TABLE_SLICES,
    HeaderPool,
    Headers,
    Payload,
    Run,
    SlotFile,
    fill_headers,
    join_runs,
    matches,
    read_tables,
    slot_bytes,
    stamp,
    vector,
)
from tierd.tiers.store_files import Direct, OpenStore, open_store, try_disk
from tierd.tiers.stored_index import StoredIndex, slots_of
from tierd.tiers.tier import Health, ReadResult, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan

STUCK_CLOSE_S = 1.0
"""For so long does `close` wait for a disk that hangs already."""

_NO_TABLE: SliceTable = np.zeros(0, dtype=np.uint64)


@dataclass(slots=True)
class _Segment:
    """A segment in use. generations: u64 [pages], of the block stored in each slot; 0: none."""

    begun: SegmentBegun
    generations: NDArray[np.uint64]


@dataclass(slots=True)
class _Batch:
    """One read or write under way. extents: EXTENT [n] with slots' offsets; tables: those to write, or those read."""

    extents: StructArray
    metas: StructArray
    views: Sequence[memoryview]
    tables: list[SliceTable]
    statuses: NDArray[np.uint16] = field(init=False)
    files: dict[int, SlotFile] = field(default_factory=dict)
    """Rows to the files that they were written to."""

    def __post_init__(self) -> None:
        self.statuses = np.full(len(self.extents), BlockStatus.FAILED, dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Patience:
    """hang_s: a call that takes longer hangs. close_s: for so long `close` waits for what is under way."""

    hang_s: float = 5.0
    close_s: float = 30.0


class _GoneError(OSError):
    """No fault of the disk's: the segment has ended, or its file has given way."""


class NvmeStore:
    """One store. path: its directory. direct: O_DIRECT "auto" (where the file system takes it), "on" (or ConfigError) or "off".

    queue_depth: reads and writes in flight at one time. disk: what its files lie on; a simulated one takes its place before `open`,
    and so may another patience.
    """

    disk: Files = OS
    patience: Patience = Patience()

    def __init__(
        self,
        spec: TierSpec,
        *,
        position: int,
        path: str | Path,
        direct: Direct = "auto",
        queue_depth: int = 16,
    ) -> None:
        self.spec = spec
        self.position = position
        self.mode = ""
        self.place = str(path)
        self.notices: list[str] = []
        self._direct: Direct = direct
        self._threads = ThreadPoolExecutor(queue_depth, thread_name_prefix=f"tierd-{spec.name}")
        self._depth, self._queue_depth = asyncio.Semaphore(queue_depth), queue_depth
        self._headers = HeaderPool(queue_depth)
        self._segments: dict[int, _Segment] = {}
        self._segment_at: dict[int, int] = {}  # place to segment
        self._calls = Calls()
        self.written_bytes = 0
        self.is_stuck = False
        """Whether `close` gave up waiting: threads still hang."""
        self._is_open = False
        self._opened: OpenStore
        self._ledger: Ledger

    # -- life

    async def open(self) -> Recovered:
        """Takes the directory, sets its space aside, reads the index. Raises as `Tier.open` says."""
        self._opened = await asyncio.to_thread(self._open)
        self._ledger = Ledger(self._opened, self, self._calls)
        self.mode, self.notices = self._opened.io.mode, self._opened.notices
        self._is_open = True
        index, self._opened.index = self._opened.index, StoredIndex()  # the core keeps it from here on
        return self._adopt(index)

    def _open(self) -> OpenStore:
        directory = Path(self.place)
        return open_store(self.spec, directory=directory, direct=self._direct, threads=self._threads, disk=self.disk)

    async def close(self, *, release: bool) -> None:
        """Ends what is under way, syncs, lets go. With release every file of the store is removed.

        Gives up when the disk takes too long: `is_stuck` then, and the process must not wait for its threads.
        """
        if not self._is_open:
            return
        self._is_open = False
        limit_s = STUCK_CLOSE_S if self._calls.age_s() > STUCK_CLOSE_S else self.patience.close_s
        try:
            async with asyncio.timeout(limit_s):
                await self._end(release=release)
        except TimeoutError:
            self.is_stuck = True

    async def _end(self, *, release: bool) -> None:
        for _ in range(self._queue_depth):
            await self._depth.acquire()
        failpoint("nvme.close.before_sync")
        await self._ledger.close()
        await asyncio.to_thread(self._opened.close, release=release)
        self._threads.shutdown(wait=False)  # none works any more

    # -- trouble

    def health(self) -> Health:
        """As `StoredTier.health`."""
        calls = self._calls
        return Health(
            fault=self._ledger.failure,
            read_errors=calls.errors["read"],
            write_errors=calls.errors["write"],
            unread=calls.unread,
            read_age_s=calls.age_s("read"),
            write_age_s=calls.age_s("write"),
        )

    async def probe(self) -> None:
        """Mends what failed, then writes, syncs and reads: a file of its own, the journal, the first slot. Raises TierFailed."""
        await self._ledger.mend()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, try_disk, self._opened)
        except OSError as error:
            raise TierFailed(f"{self.spec.name}: {self.place}: {error.strerror or error}; check the disk") from error
        self._ledger.add(self._ledger.marks)
        await self._ledger.sync()
        self._calls.unread = 0
        if not self._calls.age_s():
            self._opened.close_retired()

    def holds(self, extents: StructArray) -> NDArray[np.bool_]:
        """As `StoredTier.holds`: False too for what was lost with a sync that failed."""
        held = np.zeros(len(extents), dtype=np.bool_)
        for i, row in enumerate(extents):
            segment = self._segments.get(int(row["segment"]))
            if segment is not None and row["slot"] < segment.begun.pages:
                held[i] = segment.generations[row["slot"]] == row["generation"]
        return held

    def lose(self, stored: StructArray) -> None:
        """As `Keeper.lose`."""
        for row in stored:
            segment = self._segments.get(int(row["segment"]))
            slot = int(row["offset"]) // segment.begun.class_bytes if segment else 0
            if segment is not None and segment.generations[slot] == row["generation"]:
                segment.generations[slot] = 0

    def durable_spans(self, place: int) -> list[tuple[int, int]]:
        """As `Keeper.durable_spans`: the slots that hold a block."""
        segment = self._segments.get(self._segment_at.get(place, -1))
        if segment is None:
            return []
        size = segment.begun.class_bytes
        return [(slot * size, size) for slot in np.flatnonzero(segment.generations).tolist()]

    def _adopt(self, index: StoredIndex) -> Recovered:
        slots = slots_of(index.metas, index.segments.values())
        order = np.argsort(index.metas["segment"], kind="stable")
        ids = index.metas["segment"][order]
        for begun in index.segments.values():
            rows = order[slice(*np.searchsorted(ids, [begun.segment, begun.segment + 1]))]
            segment = _Segment(begun, np.zeros(begun.pages, dtype=np.uint64))
            segment.generations[slots[rows]] = index.metas["generation"][rows]
            self._segments[begun.segment] = segment
            self._segment_at[begun.place] = begun.segment
        return Recovered(
            segments=[self._assignment(s) for s in index.segments.values()],
            extents=self._extents(index.metas, slots),
            metas=index.metas,
            next_segment=index.next_segment,
            next_generation=index.next_generation,
            namespaces=index.namespaces,
        )

    def _assignment(self, begun: SegmentBegun) -> SegmentAssignment:
        return SegmentAssignment(
            tier=self.position,
            slot=begun.place,
            segment=begun.segment,
            domain=begun.domain,
            class_bytes=begun.class_bytes,
            pages=begun.pages,
            writer=0,
            replaces=None,
            fresh=False,
        )

    def _extents(self, metas: StructArray, slots: NDArray[np.int64]) -> StructArray:
        extents = np.zeros(len(metas), dtype=EXTENT)
        extents["tier"], extents["page"], extents["slot"] = self.position, -1, slots
        extents["flags"] = UNVERIFIED  # a slot may have been written over before the removal of its block was durable
        extents["length"] = metas["stored_length"]
        for name in ("segment", "offset", "generation"):
            extents[name] = metas[name]
        return extents

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """Notes what a plan frees, begins and reserves here; memory alone."""
        self._remove(plan.freed["extent"])
        for assignment in plan.segments:
            self._ledger.note_used(segment=assignment.segment)
            if assignment.tier == self.position:
                self._begin(assignment)
        if len(plan.reserved):
            self._ledger.note_used(generation=int(plan.reserved["generation"].max()))

    def note_namespaces(self, records: Iterable[bytes]) -> None:
        """Keeps opaque records, durable no later than any block written after; `open` of the next life gives them."""
        for record in records:
            self._ledger.add(NamespaceKept(bytes(record)))

    async def keep_namespace(self, record: bytes) -> None:
        """`note_namespaces` of one."""
        self.note_namespaces([record])

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Space was set aside by `open`; this makes sure of marks that cover the segments. Raises TierFailed."""
        own = [s for s in segments if s.tier == self.position]
        for segment in own:
            if segment.slot not in self._opened.files:
                raise TierFailed(
                    f"{self.spec.name}: segment {segment.segment} is at place {segment.slot}, beyond the"
                    f" {len(self._opened.files)} that there are; raise its capacity"
                )
        if self._ledger.failure:
            raise TierFailed(self._ledger.failure)
        await self._ledger.cover(segment=max((s.segment for s in own), default=0))

    async def sync(self) -> None:
        """Everything written and noted so far is durable, but for what `holds` no longer. Raises TierFailed."""
        await self._ledger.sync()

    def _remove(self, extents: StructArray) -> None:
        own = extents[extents["tier"] == self.position] if len(extents) else extents
        rows = []
        for segment, slot, generation in zip(
            own["segment"].tolist(), own["slot"].tolist(), own["generation"].tolist(), strict=True
        ):
            held = self._segments.get(segment)
            if held is not None and slot < held.begun.pages and held.generations[slot] == generation:
                held.generations[slot] = 0
                rows.append((segment, 0, slot * held.begun.class_bytes))
        if rows:
            self._ledger.add(BlocksRemoved(np.array(rows, dtype=REMOVED)))

    def _begin(self, assignment: SegmentAssignment) -> None:
        before = self._segment_at.get(assignment.slot)
        if before is not None:
            del self._segments[before]
        begun = SegmentBegun(
            place=assignment.slot,
            segment=assignment.segment,
            domain=assignment.domain,
            class_bytes=assignment.class_bytes,
            pages=assignment.pages,
        )
        self._segments[begun.segment] = _Segment(begun, np.zeros(begun.pages, dtype=np.uint64))
        self._segment_at[begun.place] = begun.segment
        self._ledger.add(begun)

    # -- bytes

    async def read(self, extents: StructArray, targets: Sequence[memoryview], metas: StructArray) -> ReadResult:
        """As `StoredTier.read`. A slot whose header is another's, torn or stale is CORRUPT; what cannot be read is FAILED."""
        batch = _Batch(self._located(extents), metas, targets, [_NO_TABLE] * len(extents))
        await self._move(batch, self._usable(batch), self._read_run)
        return ReadResult(batch.statuses, batch.tables)

    async def write(
        self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable], sources: Sequence[memoryview]
    ) -> NDArray[np.uint16]:
        """As `StoredTier.write`. What does not fit its slot, or has more than 480 slices, is FAILED."""
        batch = _Batch(self._located(extents), metas.copy(), sources, list(slices))
        rows = self._usable(batch)
        if not len(rows) or self._ledger.failure:
            return batch.statuses
        try:
            await self._ledger.cover(generation=int(extents["generation"][rows].max()))
        except TierFailed:
            return batch.statuses
        batch.metas[rows] = stamp(
            metas[rows], batch.extents[rows], [batch.tables[i] for i in rows.tolist()], store=self._opened.store
        )
        await self._move(batch, rows, self._write_run)
        self.written_bytes += slot_bytes(batch.metas["stored_length"][batch.statuses == BlockStatus.READY])
        failpoint("nvme.write.before_note")
        self._note_stored(batch)
        return batch.statuses

    def _located(self, extents: StructArray) -> StructArray:
        """The extents with the offsets of their slots, whatever the offset says; all ones in a segment that is not here."""
        located = extents.copy()
        for segment in np.unique(extents["segment"]).tolist():
            rows = extents["segment"] == segment
            held = self._segments.get(segment)
            slots = extents["slot"][rows].astype(np.uint64)
            located["offset"][rows] = slots * np.uint64(held.begun.class_bytes) if held else np.uint64(2**64 - 1)
        return located

    def _usable(self, batch: _Batch) -> NDArray[np.int64]:
        """The rows whose slot is here and has room for the block."""
        usable = np.zeros(len(batch.extents), dtype=np.bool_)
        if not self._is_open:
            return np.flatnonzero(usable)
        for i, row in enumerate(batch.extents):
            held = self._segments.get(int(row["segment"]))
            if held is not None and held.begun.place in self._opened.files:
                fits = int(row["length"]) + HEADER_BYTES <= held.begun.class_bytes and row["slot"] < held.begun.pages
                usable[i] = fits and len(batch.tables[i]) <= TABLE_SLICES
        return np.flatnonzero(usable)

    async def _move(
        self, batch: _Batch, rows: NDArray[np.int64], move: Callable[[_Batch, Run, Headers], Awaitable[None]]
    ) -> None:
        classes = [self._segments[s].begun.class_bytes for s in batch.extents["segment"][rows].tolist()]
        runs = [
            replace(r, rows=tuple(rows[list(r.rows)].tolist()))
            for r in join_runs(batch.extents[rows], class_bytes=classes)
        ]
        if runs:
            await outlast([asyncio.ensure_future(self._move_run(batch, run, move)) for run in runs])

    async def _move_run(self, batch: _Batch, run: Run, move: Callable[[_Batch, Run, Headers], Awaitable[None]]) -> None:
        """One call for the run; where that fails, one for each of its slots, so that a bad sector costs one block."""
        kind: Kind = "read" if move == self._read_run else "write"
        try:
            async with self._turn():
                with self._headers.borrow(len(run.rows)) as headers, self._calls.one(kind):
                    await move(batch, run, headers)
        except OSError as error:
            if len(run.rows) == 1:
                if not isinstance(error, _GoneError):
                    self._calls.fail(kind)
                return
            for i, row in enumerate(run.rows):
                alone = Run(run.segment, run.class_bytes, run.offset + i * run.class_bytes, (row,))
                await self._move_run(batch, alone, move)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the threads. Raises OSError if none is free and one of them hangs."""
        while True:
            try:
                async with asyncio.timeout(self.patience.hang_s):
                    await self._depth.acquire()
                break
            except TimeoutError:
                if not self._is_open:
                    raise _GoneError(errno.ESTALE, "the store is closed") from None
                if self._calls.age_s() > self.patience.hang_s:
                    raise OSError(errno.ETIMEDOUT, "every thread waits for the disk") from None
        try:
            yield
        finally:
            self._depth.release()

    async def _read_run(self, batch: _Batch, run: Run, headers: Headers) -> None:
        payloads = self._payloads(batch, run)
        buffers = vector(headers, [p.buffer for p in payloads], class_bytes=run.class_bytes, filler=self._headers.waste)
        done = await self._opened.io.read(self._file(run), run.offset, buffers)
        rows = list(run.rows)
        self._calls.unread = 0
        found, tables = read_tables(headers)
        good = matches(found, batch.metas[rows], batch.extents[rows], store=self._opened.store)
        for i, (row, table, payload) in enumerate(zip(rows, tables, payloads, strict=True)):
            if done < i * run.class_bytes + HEADER_BYTES + len(payload.buffer):
                self._calls.fail("read")  # the file ends before it: FAILED
                continue
            if table is None or not good[i]:
                batch.statuses[row] = BlockStatus.CORRUPT
                continue
            payload.give()
            batch.tables[row] = table
            batch.statuses[row] = BlockStatus.READY

    async def _write_run(self, batch: _Batch, run: Run, headers: Headers) -> None:
        rows = list(run.rows)
        fill_headers(headers, batch.metas[rows], [batch.tables[i] for i in rows])
        payloads = [p.take() for p in self._payloads(batch, run)]
        buffers = vector(headers, payloads, class_bytes=run.class_bytes, filler=self._headers.zeros)
        if self._ledger.failure:
            raise _GoneError(errno.ESTALE, "the file may have failed")
        file = self._file(run)
        batch.files.update(dict.fromkeys(rows, file))
        await self._opened.io.write(file, run.offset, buffers)
        batch.statuses[rows] = BlockStatus.READY

    def _payloads(self, batch: _Batch, run: Run) -> list[Payload]:
        lengths = batch.extents["length"][list(run.rows)].tolist()
        align = self._opened.io.align_bytes
        return [Payload(batch.views[i], length=n, align_bytes=align) for i, n in zip(run.rows, lengths, strict=True)]

    def _file(self, run: Run) -> SlotFile:
        """Raises _GoneError if the segment has gone meanwhile."""
        held = self._segments.get(run.segment)
        if held is None or not self._is_open:
            raise _GoneError(errno.ESTALE, "the segment is gone")
        return self._opened.files[held.begun.place]

    def _note_stored(self, batch: _Batch) -> None:
        """Tells the ledger what was written, place by place, unless segment or file has given way meanwhile: that is FAILED."""
        for segment in np.unique(batch.extents["segment"]).tolist():
            rows = np.flatnonzero((batch.extents["segment"] == segment) & (batch.statuses == BlockStatus.READY))
            held = self._segments.get(segment)
            taken = [held is not None and self._takes(held.begun.place, batch.files[i]) for i in rows.tolist()]
            kept = rows[np.array(taken, dtype=np.bool_)]
            batch.statuses[np.setdiff1d(rows, kept)] = BlockStatus.FAILED
            if held is not None and len(kept):
                held.generations[batch.extents["slot"][kept]] = batch.extents["generation"][kept]
                self._ledger.add(BlocksStored(batch.metas[kept]), place=held.begun.place)

    def _takes(self, place: int, file: SlotFile) -> bool:
        """Whether what was written to the file can become durable there."""
        return place not in self._ledger.abandoned and self._opened.files.get(place) is file
