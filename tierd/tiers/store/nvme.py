"""The NVMe tier: a store of blocks in preallocated files of one directory.

Purpose: `NvmeStore`, a stored tier: slots, journal and snapshot brought together. Non-purpose: deciding, verifying payload (mover), deadlines (those who
wait for the mover). Layout on disk: `FORMAT-NVME.md`.

Why a crash never shows a wrong byte. A block is in the journal only after its slot was synced, so what the journal tells is on the disk. A
slot may be reused before the removal of its old block is durable; then the journal may name a block whose slot holds another, or parts of two.
The header inside the slot decides: it names block, place, generation and store, and the digest of the slice table, which names the payload. So the old block
is served if every byte of it is still there, the new one if its record is durable, and everything else is a miss.

Invariants:
- `apply` touches memory alone. Once a sync has failed, writes are FAILED and `sync` raises until `probe` has put new files in the place of those that failed; what is durable is served. A block that was not durable then is no longer held, and neither is one that was being written to a file that gave way, or that could not be
  read from it. Who asks for it is told FAILED, and `take_lost` tells of each once.
- A call that hangs keeps its lane; who waits while as many hang as there may be, or every lane, is FAILED.
- `read` and `write` end only when no thread touches their buffers any more, also when they are cancelled. Nothing is written with a generation that the durable marks do not cover.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import kinds, true_rows
from tierd.core.formats.meta import META
from tierd.core.formats.model import EXTENT, BlockStatus, SegmentAssignment, StructArray, TierSpec
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.io.calls import KINDS, Calls, Kind
from tierd.tiers.io.files import OS, Files, remedy_of
from tierd.tiers.io.lanes import Lanes
from tierd.tiers.io.turns import Turns
from tierd.tiers.store.buffered import BufferedIO
from tierd.tiers.store.journal import REMOVED, BlocksRemoved, BlocksStored, NamespaceKept, SegmentBegun
from tierd.tiers.store.ledger import Ledger
from tierd.tiers.store.moves import Batch, GoneError, HeadRun, Means, ReadRun, WriteRun, no_hash
from tierd.tiers.store.slots import HEADER_BYTES, DirectIO, HeaderPool, SlotFile, slot_bytes, whole_pages
from tierd.tiers.store.store_files import Direct, OpenStore, open_store, try_disk
from tierd.tiers.store.stored_index import StoredIndex, Stretch, assignment_of, extents_of, unsifted
from tierd.tiers.store.zeroing import Zeroing
from tierd.tiers.tier import FoundBlocks, HashRows, Health, Payloads, ReadResult, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan

FOLD_SHARE = 0.5
"""Of the time for `close` that a snapshot may take."""
STUCK_CLOSE_S = 1.0
"""For so long does `close` wait for a disk that hangs already."""
HEADERS_KEPT = 1024
"""4 MiB of memory for headers."""
HASHED_AHEAD = 8
"""More lanes for writes than calls at the disk: theirs are ready, or hash, and wait for a turn, since a disk that serves its calls side by side ends many of them at one time. For reads there are twice as many lanes as calls: those that have come wait to be hashed."""


@dataclass(slots=True)
class _Segment:
    """A segment in use. generations: u64 [pages], of the block stored in each slot; 0: none."""

    begun: SegmentBegun
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Patience:
    """hang_s: a call that takes longer hangs. close_s: for so long `close` waits for what is under way."""

    hang_s: float = 5.0
    close_s: float = 30.0


class NvmeStore:
    """One store. path: its directory. direct: O_DIRECT "auto" (where the file system takes it), "on" (or ConfigError) or "off".

    queue_depth: reads in flight at one time, and as many writes, or half as many beside reads. disk: what its files lie on; a simulated one takes its place before `open`,
    and so may another patience.
    """

    disk: Files = OS
    patience: Patience = Patience()
    has_failed = False  # the daemon does not start: `close` gives back what `open` has set aside
    zero_ahead = False
    """Whether space that was never written is written over once, in the background; set before `open`."""

    def __init__(
        self,
        spec: TierSpec,
        *,
        position: int,
        path: str | Path,
        direct: Direct = "auto",
        queue_depth: int = 16,
    ) -> None:
        self.spec, self.position = spec, position
        self.mode, self.place = "", str(path)
        self.notices: list[str] = []
        self._direct: Direct = direct
        self._calls = Calls()
        name, calls, more = f"tierd-{spec.name}", self._calls, queue_depth + HASHED_AHEAD
        self._lanes: dict[Kind, Lanes] = {
            "read": Lanes(2 * queue_depth, name=f"{name}-read", calls=calls),
            "write": Lanes(more, name=f"{name}-write", calls=calls, gives_way=True),
        }
        self._queue_depth, self._turns = queue_depth, Turns(queue_depth)
        # One lane each way hashes at a time, a run of slots to its end: more take the interpreter's lock from each other, slice by slice, and pay for that with wake-ups.
        self._hashing = {kind: threading.Lock() for kind in KINDS}
        self._headers = HeaderPool(HEADERS_KEPT)
        self._segments: dict[int, _Segment] = {}
        self._lost: list[StructArray] = []
        self._segment_at: dict[int, int] = {}  # place to segment
        self.written_bytes = 0
        """Into slot files."""
        self.is_stuck = False
        """Whether `close` gave up waiting: threads still hang."""
        self._is_open = False
        self._opened: OpenStore
        self._ledger: Ledger
        self._zeroing: Zeroing

    # -- life

    async def open(self) -> Recovered:
        """Takes the directory, sets its space aside, reads the index. Raises as `Tier.open` says."""
        buffered = BufferedIO(len(KINDS) * self._queue_depth, asyncio.get_running_loop())
        how: dict[str, Any] = {
            "directory": Path(self.place),
            "direct": self._direct,
            "buffered": buffered,
            "disk": self.disk,
        }
        self._opened = await asyncio.to_thread(partial(open_store, self.spec, **how))
        self._ledger = Ledger(self._opened, self, self._calls)
        self.mode, self.notices = self._opened.io.mode, self._opened.notices
        self._is_open = True
        index, self._opened.index = self._opened.index, StoredIndex()  # the core keeps it from here on
        found = self._adopt(index)
        self._ledger.is_loading = found.more_at_most > 0
        self._zeroing = Zeroing(
            self._opened, self._calls, is_free=lambda place: place not in self._segment_at, wrote=self._count_written
        )
        if self.zero_ahead and self.mode == DirectIO.mode:
            self._zeroing.start()
        return found

    async def close(self, *, release: bool) -> None:
        """Ends what is under way, syncs, lets go. With release every file of the store is removed.

        Gives up when the disk takes too long: `is_stuck` then, and the process must not wait for its threads.
        """
        if not self._is_open:
            return
        self._is_open = False
        limit_s = STUCK_CLOSE_S if self._calls.age_s() > STUCK_CLOSE_S else self.patience.close_s
        fold_until = asyncio.get_running_loop().time() + FOLD_SHARE * limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._end(release=release, fold_until=fold_until)
        except TimeoutError:
            self.is_stuck = True

    async def _end(self, *, release: bool, fold_until: float) -> None:
        await self._zeroing.stop()
        for lanes in self._lanes.values():
            await lanes.idle()
        failpoint("nvme.close.before_sync")
        await self._ledger.close(fold_until=fold_until)
        await asyncio.to_thread(self._opened.close, release=release, undo=self.has_failed)
        for lanes in self._lanes.values():
            lanes.close()

    # -- trouble

    def health(self) -> Health:
        """As `StoredTier.health`."""
        return self._calls.health(fault=self._ledger.failure)

    def heed(self, stir: Callable[[], None]) -> None:
        """As `WatchedTier.heed`: whatever fails or hangs began as a call."""
        self._calls.stir = stir

    async def probe(self) -> None:
        """Mends what failed, then writes, syncs and reads: a file of its own, the journal, the first slot. Raises TierFailed."""
        await self._ledger.mend()
        try:
            await asyncio.get_running_loop().run_in_executor(self._lanes["write"].threads, try_disk, self._opened)
        except (OSError, RuntimeError) as error:
            raise TierFailed(f"{self.spec.name}: {self.place}: {error}; check disk and limit of threads") from error
        self._ledger.add(self._ledger.marks)
        await self._ledger.sync()
        self._calls.unread = 0
        if not self._calls.age_s():
            self._opened.close_retired()

    def holds(self, extents: StructArray) -> NDArray[np.bool_]:
        """As `StoredTier.holds`: False too for what was lost with a sync that failed."""
        held = np.zeros(len(extents), dtype=np.bool_)
        for number in np.unique(extents["segment"]).tolist():
            segment = self._segments.get(number)
            if segment is not None:
                rows = np.flatnonzero((extents["segment"] == number) & (extents["slot"] < segment.begun.pages))
                held[rows] = segment.generations[extents["slot"][rows]] == extents["generation"][rows]
        return held

    def lose(self, stored: StructArray) -> None:
        """As `Keeper.lose`."""
        for number in kinds(stored["segment"]):
            if segment := self._segments.get(number):
                rows = stored[stored["segment"] == number]
                slots = (rows["offset"] // segment.begun.class_bytes).astype(np.int64)
                lost = extents_of(rows, slots, tier=self.position)
                lost = lost[self.holds(lost)]  # not what was freed meanwhile
                segment.generations[lost["slot"]] = 0
                self._lost.append(lost)

    def leave_behind(self, place: int, offsets: Sequence[int]) -> None:
        """As `Keeper.leave_behind`."""
        segment = self._segments[self._segment_at[place]]
        lost = np.zeros(len(offsets), EXTENT)
        lost["tier"], lost["segment"] = self.position, segment.begun.segment
        lost["slot"] = np.array(offsets, dtype=np.int64) // segment.begun.class_bytes
        lost["generation"] = segment.generations[lost["slot"]]
        self._lost.append(lost := lost[lost["generation"] > 0])
        self._remove(lost)  # what is durable tells of them

    async def inspect(self) -> None:
        """Whether its files are still there: without them it is out of service, and its health says so."""
        await self._ledger.inspect()

    def take_lost(self) -> StructArray:
        """As `StoredTier.take_lost`."""
        lost, self._lost = self._lost, []
        return np.concatenate(lost) if lost else np.zeros(0, EXTENT)

    def durable_spans(self, place: int) -> list[tuple[int, int]]:
        """As `Keeper.durable_spans`: the slots that hold a block."""
        segment = self._segments.get(self._segment_at.get(place, -1))
        if segment is None:
            return []
        size = segment.begun.class_bytes
        return [(slot * size, size) for slot in np.flatnonzero(segment.generations).tolist()]

    def _adopt(self, index: StoredIndex) -> Recovered:
        for begun in index.segments.values():
            self._segments[begun.segment] = _Segment(begun, np.zeros(begun.pages, dtype=np.uint64))
            self._segment_at[begun.place] = begun.segment
        return Recovered(
            segments=[assignment_of(s, tier=self.position) for s in index.segments.values()],
            extents=np.zeros(0, EXTENT),
            metas=np.zeros(0, META),
            next_segment=index.next_segment,
            next_generation=index.next_generation,
            namespaces=index.namespaces,
            more=self._found(index),
            more_at_most=len(index.metas) + (index.filed.count if index.filed else 0),
        )

    def _found(self, index: StoredIndex) -> Iterator[Callable[[], FoundBlocks]]:
        """What the index tells, some blocks at a time."""
        try:
            for sift in unsifted(index):
                failpoint("nvme.load.before_piece")
                yield partial(self._note, sift)
            self._ledger.is_loading = False
        except OSError as error:
            raise TierFailed(
                f"{self.spec.name}: {self.place}: {error.strerror or error}; {remedy_of(error)}"
            ) from error

    def _note(self, sift: Callable[[], Stretch]) -> FoundBlocks:
        metas, slots = sift()
        for number in kinds(metas["segment"]):
            rows = metas["segment"] == number
            self._segments[number].generations[slots[rows]] = metas["generation"][rows]
        return FoundBlocks(extents_of(metas, slots, tier=self.position), metas)

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
        segments, offsets = list[int](), list[int]()  # no pairs: a million of them set the garbage collector off
        for segment, slot, generation in zip(
            own["segment"].tolist(), own["slot"].tolist(), own["generation"].tolist(), strict=True
        ):
            held = self._segments.get(segment)
            if held is not None and slot < held.begun.pages and held.generations[slot] == generation:
                held.generations[slot] = 0
                segments.append(segment)
                offsets.append(slot * held.begun.class_bytes)
        if segments:
            removed = np.zeros(len(segments), dtype=REMOVED)
            removed["segment"], removed["offset"] = segments, offsets
            self._ledger.add(BlocksRemoved(removed))

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

    async def read(
        self, extents: StructArray, targets: Sequence[memoryview], metas: StructArray, *, arrived: HashRows = no_hash
    ) -> ReadResult:
        """As `StoredTier.read`. A slot whose header is another's, torn or stale is CORRUPT; what cannot be read, or is not held when it has come, is FAILED."""
        with self._headers.borrow(len(extents)) as headers:
            pages = whole_pages(targets, extents["length"])
            batch = Batch(self._means("read"), self._located(extents), metas, pages, headers, arrived)
            await self._carry(batch, self._usable(batch.extents), ReadRun)
            batch.judge(self.holds(batch.extents))
        return ReadResult(batch.statuses, batch.tables)

    async def check(self, extents: StructArray, metas: StructArray) -> NDArray[np.uint16]:
        """As `StoredTier.check`."""
        with self._headers.borrow(len(extents)) as headers:
            batch = Batch(self._means("read"), self._located(extents), metas, (), headers, no_hash)
            await self._carry(batch, self._usable(batch.extents), HeadRun)
            batch.judge(self.holds(batch.extents))
        return batch.statuses

    def payloads(self, extents: StructArray) -> Payloads:
        """As `StoredTier.payloads`."""
        located, files = self._located(extents), list[SlotFile | None]([None] * len(extents))
        for row in self._usable(located).tolist():
            files[row] = self._opened.files[self._segments[int(extents["segment"][row])].begun.place]
        offsets = located["offset"].tolist()
        return Payloads(files, [at + HEADER_BYTES if file else 0 for at, file in zip(offsets, files, strict=True)])

    def has_file(self, file: SlotFile) -> bool:
        """As `StoredTier.has_file`."""
        return self._is_open and any(own is file for own in self._opened.files.values())

    async def write(
        self,
        extents: StructArray,
        metas: StructArray,
        hash_rows: HashRows,
        sources: Sequence[memoryview],
        *,
        known: Sequence[SliceTable | None] = (),
    ) -> NDArray[np.uint16]:
        """As `StoredTier.write`. What does not fit its slot, or has more than 480 slices, is FAILED."""
        with self._headers.borrow(len(extents)) as headers:
            pages = whole_pages(sources, extents["length"])
            batch = Batch(self._means("write"), self._located(extents), metas.copy(), pages, headers, hash_rows, known)
            rows = self._usable(batch.extents)
            if not len(rows) or self._ledger.failure:
                return batch.statuses
            try:
                await self._ledger.cover(generation=int(extents["generation"][rows].max()))
            except TierFailed:
                return batch.statuses
            begun = [self._segments[s].begun for s in kinds(extents["segment"][rows]) if s in self._segments]
            for place in {each.place for each in begun}:
                await self._zeroing.leave(place)
            await self._carry(batch, self._usable(batch.extents), WriteRun)  # those that are still there
        self._count_written(slot_bytes(batch.metas["stored_length"][batch.went]))
        failpoint("nvme.write.before_note")
        self._note_stored(batch)
        return batch.statuses

    def _means(self, kind: Kind) -> Means:
        return Means(
            kind,
            io=self._opened.io,
            turns=self._turns,
            hashing=self._hashing[kind],
            hang_s=self.patience.hang_s,
            begin_call=self._lanes[kind].begin_call,
            pool=self._headers,
            find_file=self._find_file,
            store=self._opened.store,
        )

    def _located(self, extents: StructArray) -> StructArray:
        """The extents with the offsets of their slots, whatever the offset says; all ones in a segment that is not here."""
        located = extents.copy()
        for segment in kinds(extents["segment"]):
            rows = extents["segment"] == segment
            held = self._segments.get(segment)
            slots = extents["slot"][rows].astype(np.uint64)
            located["offset"][rows] = slots * np.uint64(held.begun.class_bytes) if held else np.uint64(2**64 - 1)
        return located

    def _usable(self, extents: StructArray) -> NDArray[np.int64]:
        """The rows whose slot is here and has room for the block."""
        usable = np.zeros(len(extents), dtype=np.bool_)
        for segment in kinds(extents["segment"]) if self._is_open else ():
            held = self._segments.get(segment)
            if held is not None and held.begun.place in self._opened.files:
                fits = extents["length"].astype(np.int64) + HEADER_BYTES <= held.begun.class_bytes
                usable |= (extents["segment"] == segment) & fits & (extents["slot"] < held.begun.pages)
        return np.flatnonzero(usable)

    async def _carry(self, batch: Batch, rows: NDArray[np.int64], job: type[ReadRun | HeadRun | WriteRun]) -> None:
        """Its jobs, over the lanes."""
        classes = [self._segments[s].begun.class_bytes for s in batch.extents["segment"][rows].tolist()]
        jobs = batch.jobs(job, rows, classes, depth=self._queue_depth)
        try:
            await self._lanes[job.kind].carry(jobs, hang_s=self.patience.hang_s)
        finally:
            batch.conclude()
            for is_done in batch.outcomes:
                if not is_done:
                    self._calls.fail(job.kind, batch.fault)
                elif job.kind == "read":
                    self._calls.unread = 0

    def _find_file(self, segment: int, kind: Kind) -> SlotFile:
        """For a lane. Raises GoneError if the segment has gone meanwhile, or nothing may be written."""
        held = self._segments.get(segment)
        if held is None or not self._is_open:
            raise GoneError(errno.ESTALE, "the segment is gone")
        if kind == "write" and self._ledger.failure:
            raise GoneError(errno.ESTALE, "the file may have failed")
        return self._opened.files[held.begun.place]

    def _count_written(self, size: int) -> None:
        self.written_bytes += size

    def _note_stored(self, batch: Batch) -> None:
        """Tells the ledger what was written, place by place, unless segment or file has given way meanwhile: that is FAILED."""
        segments, is_written = batch.extents["segment"], batch.statuses == BlockStatus.READY
        for segment in kinds(segments):
            rows = true_rows((segments == segment) & is_written)
            held = self._segments.get(segment)
            taken = [held is not None and self._takes(held.begun.place, batch.files[i]) for i in rows.tolist()]
            kept = rows[np.array(taken, dtype=np.bool_)]
            if len(kept) < len(rows):
                batch.statuses[rows] = BlockStatus.FAILED
                batch.statuses[kept] = BlockStatus.READY
            if held is not None and len(kept):
                held.generations[batch.extents["slot"][kept]] = batch.extents["generation"][kept]
                self._ledger.add(BlocksStored(batch.metas[kept]), place=held.begun.place)

    def _takes(self, place: int, file: SlotFile) -> bool:
        """Whether what was written to the file can become durable there."""
        return place not in self._ledger.abandoned and self._opened.files.get(place) is file
