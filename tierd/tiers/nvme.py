"""The NVMe tier: a store of blocks in preallocated files of one directory.

Purpose: `NvmeStore`, a stored tier: slots, journal and snapshot brought together. Non-purpose: deciding, verifying payload (mover), deadlines (those who
wait for the mover). Layout on disk: `FORMAT-NVME.md`.

Why a crash never shows a wrong byte. A block is in the journal only after its slot was synced, so what the journal tells is on the disk. A
slot may be reused before the removal of its old block is durable; then the journal may name a block whose slot holds another, or parts of two.
The header inside the slot decides: it names block, place, generation and store, and the digest of the slice table, which names the payload. So the old block
is served if every byte of it is still there, the new one if its record is durable, and everything else is a miss.

Invariants:
- `apply` touches memory alone.
- Once a sync has failed, or UNWRITTEN_LIMIT writes in a row, the store has ended: `serving` is False, every later read and write is FAILED, `sync` raises.
- `read` and `write` end only when no thread touches their buffers any more, also when they are cancelled.
- Nothing is written with a generation that the durable marks do not cover.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import EXTENT, BlockStatus, SegmentAssignment, StructArray, TierSpec
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
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
    stamp,
    vector,
)
from tierd.tiers.store_files import Direct, OpenStore, open_store
from tierd.tiers.stored_index import StoredIndex, slots_of
from tierd.tiers.tier import ReadResult, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan

UNWRITTEN_LIMIT = 8
"""So many slots in a row that cannot be written end the store."""

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

    def __post_init__(self) -> None:
        self.statuses = np.full(len(self.extents), BlockStatus.FAILED, dtype=np.uint16)


class NvmeStore:
    """One store. path: its directory. direct: O_DIRECT "auto" (where the file system takes it), "on" (or ConfigError) or "off".

    queue_depth: reads and writes in flight at one time. disk: what its files lie on; a simulated one takes its place before `open`.
    """

    disk: Files = OS

    def __init__(
        self, spec: TierSpec, *, position: int, path: str | Path, direct: Direct = "auto", queue_depth: int = 16
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
        self._unwritten = 0  # slots that could not be written since one could
        self._is_open = False
        self._opened: OpenStore
        self._ledger: Ledger

    # -- life

    @property
    def serving(self) -> bool:
        """Whether it takes reads and writes: open, and not failed for good."""
        return self._is_open and not self._ledger.failure

    async def open(self) -> Recovered:
        """Takes the directory, sets its space aside, reads the index. Raises as `Tier.open` says."""
        self._opened = await asyncio.to_thread(self._open)
        self._ledger = Ledger(self._opened)
        self.mode, self.notices = self._opened.io.mode, self._opened.notices
        self._is_open = True
        index, self._opened.index = self._opened.index, StoredIndex()  # the core keeps it from here on
        return self._adopt(index)

    def _open(self) -> OpenStore:
        directory = Path(self.place)
        return open_store(self.spec, directory=directory, direct=self._direct, threads=self._threads, disk=self.disk)

    async def close(self, *, release: bool) -> None:
        """Ends what is under way, syncs, lets go. With release every file of the store is removed."""
        if not self._is_open:
            return
        self._is_open = False
        for _ in range(self._queue_depth):
            await self._depth.acquire()
        failpoint("nvme.close.before_sync")
        await self._ledger.close()
        self._threads.shutdown()
        self._opened.close(release=release)

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
        """Everything written and noted so far is durable. Raises TierFailed: for good, or while the disk is full."""
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
        if not len(rows):
            return batch.statuses
        try:
            await self._ledger.cover(generation=int(extents["generation"][rows].max()))
        except TierFailed:
            return batch.statuses
        batch.metas[rows] = stamp(
            metas[rows], batch.extents[rows], [batch.tables[i] for i in rows.tolist()], store=self._opened.store
        )
        await self._move(batch, rows, self._write_run)
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
        if not self.serving:
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
            await _outlast([asyncio.ensure_future(self._move_run(batch, run, move)) for run in runs])

    async def _move_run(self, batch: _Batch, run: Run, move: Callable[[_Batch, Run, Headers], Awaitable[None]]) -> None:
        """One call for the run; where that fails, one for each of its slots, so that a bad sector costs one block."""
        try:
            async with self._depth:
                with self._headers.borrow(len(run.rows)) as headers:
                    await move(batch, run, headers)
        except OSError:
            if len(run.rows) > 1:
                for i, row in enumerate(run.rows):
                    alone = Run(run.segment, run.class_bytes, run.offset + i * run.class_bytes, (row,))
                    await self._move_run(batch, alone, move)

    async def _read_run(self, batch: _Batch, run: Run, headers: Headers) -> None:
        payloads = self._payloads(batch, run)
        buffers = vector(headers, [p.buffer for p in payloads], class_bytes=run.class_bytes, filler=self._headers.waste)
        done = await self._opened.io.read(self._file(run), run.offset, buffers)
        rows = list(run.rows)
        found, tables = read_tables(headers)
        good = matches(found, batch.metas[rows], batch.extents[rows], store=self._opened.store)
        for i, (row, table, payload) in enumerate(zip(rows, tables, payloads, strict=True)):
            if done < i * run.class_bytes + HEADER_BYTES + len(payload.buffer):
                continue  # the file ends before it: FAILED
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
        file = self._file(run)
        try:
            await self._opened.io.write(file, run.offset, buffers)
        except OSError as error:
            if len(rows) == 1:  # of a longer run each slot is tried alone
                self._note_unwritten(file, error)
            raise
        self._unwritten = 0
        batch.statuses[rows] = BlockStatus.READY

    def _note_unwritten(self, file: SlotFile, error: OSError) -> None:
        """A bad sector costs a block; a disk that takes none at all is out of service. A full one may have room again."""
        self._unwritten += error.errno not in (errno.ENOSPC, errno.EDQUOT)
        if self._unwritten >= UNWRITTEN_LIMIT and not self._ledger.failure:
            self._ledger.fail(file.path, error)

    def _payloads(self, batch: _Batch, run: Run) -> list[Payload]:
        lengths = batch.extents["length"][list(run.rows)].tolist()
        align = self._opened.io.align_bytes
        return [Payload(batch.views[i], length=n, align_bytes=align) for i, n in zip(run.rows, lengths, strict=True)]

    def _file(self, run: Run) -> SlotFile:
        """Raises OSError if the segment has gone meanwhile."""
        held = self._segments.get(run.segment)
        if held is None or not self.serving:
            raise OSError(errno.ESTALE, "the segment is gone")
        return self._opened.files[held.begun.place]

    def _note_stored(self, batch: _Batch) -> None:
        dirty = set[int]()
        for i in np.flatnonzero(batch.statuses == BlockStatus.READY).tolist():
            held = self._segments.get(int(batch.extents["segment"][i]))
            if held is None:  # its segment has ended meanwhile
                batch.statuses[i] = BlockStatus.FAILED
                continue
            held.generations[batch.extents["slot"][i]] = batch.extents["generation"][i]
            dirty.add(held.begun.place)
        if dirty:
            self._ledger.add(BlocksStored(batch.metas[batch.statuses == BlockStatus.READY]), dirty=dirty)


async def _outlast(works: Sequence[asyncio.Future[None]]) -> None:
    """Awaits every one to its end, also when cancelled meanwhile: their threads have the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while not all(work.done() for work in works):
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError as error:
            cancelled = error
    for work in works:
        work.result()
    if cancelled is not None:
        raise cancelled
