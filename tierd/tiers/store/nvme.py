"""The NVMe tier: a store of blocks in preallocated files of one directory.

`NvmeStore` combines slots, journal and snapshot. It does not decide or verify payloads (the mover
does), and callers of the mover set deadlines. `FORMAT-NVME.md` describes the files.

A crash never exposes a wrong byte. A block is in the journal only after its slot was synced. But a
slot may be reused before the removal of its old block is durable. The journal may then name a block
whose slot holds another, or parts of two. So the header inside the slot decides. It names block,
place, generation and store, and the digest of the slice table, which names the payload. The old
block is served if all its bytes are still there, the new one if its record is durable. Otherwise
the read is a miss.

- `apply` only changes memory. After a failed sync, writes are FAILED and `sync` raises until
  `probe` has replaced the failed files. Durable blocks are still served.
- Blocks that were not durable then are no longer held, nor are those unreadable in, or being
  written to, a replaced file. Reads of them are FAILED, and `take_lost` returns each once.
- A call that hangs keeps its lane. If the maximum of calls or every lane hangs, waiting rows are
  FAILED.
- `read` and `write` end only when no thread uses their buffers, even if cancelled. No write has a
  generation beyond the durable marks.
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
from tierd.tiers.io.lanes import Job, Lanes
from tierd.tiers.io.turns import Turns
from tierd.tiers.store.buffered import BufferedIO
from tierd.tiers.store.journal import REMOVED, BlocksRemoved, BlocksStored, NamespaceKept, SegmentBegun
from tierd.tiers.store.ledger import Ledger
from tierd.tiers.store.moves import Batch, GoneError, HeadRun, Means, ReadRun, WriteRun, no_hash
from tierd.tiers.store.parts import read_parts
from tierd.tiers.store.slots import HEADER_BYTES, DirectIO, HeaderPool, SlotFile, slot_bytes, whole_pages
from tierd.tiers.store.store_files import Direct, OpenStore, open_store, try_disk
from tierd.tiers.store.stored_index import StoredIndex, Stretch, assignment_of, extents_of, unsifted
from tierd.tiers.store.zeroing import Zeroing
from tierd.tiers.tier import FoundBlocks, HashRows, Health, Parts, Payloads, ReadResult, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan

FOLD_SHARE = 0.5
"""The share of the time for `close` that a snapshot may take."""
STUCK_CLOSE_S = 1.0
"""The time that `close` waits for a disk that already hangs."""
HEADERS_KEPT = 1024
"""4 MiB of memory for headers."""
HASHED_AHEAD = 8
"""Write lanes beyond the calls at the disk. They hash or wait for a turn, since a parallel disk
ends many calls at once. Read lanes are twice the calls, since finished reads wait to be hashed.
"""


@dataclass(slots=True)
class _Segment:
    """A segment in use. generations: u64 [pages], of the block stored in each slot; 0: none."""

    begun: SegmentBegun
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Patience:
    """hang_s: a call that takes longer hangs. close_s: limit of the wait in `close`."""

    hang_s: float = 5.0
    close_s: float = 30.0


class NvmeStore:
    """One store. path: its directory. direct: O_DIRECT "auto" (if supported), "on" (or ConfigError)
    or "off".
    queue_depth: reads in flight at one time, and as many writes, or half as many beside reads.
    disk: replaced by a simulated disk before `open`; patience may be replaced too."""

    disk: Files = OS
    patience: Patience = Patience()
    has_failed = False  # the daemon did not start: `close` frees the space that `open` reserved
    zero_ahead = False
    """Whether to write unwritten space once, in the background; set before `open`."""

    def __init__(
        self, spec: TierSpec, *, position: int, path: str | Path, direct: Direct = "auto", queue_depth: int = 16
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
        # One lane per direction hashes at a time, a whole run of slots. More would take the
        # interpreter's lock from each other, slice by slice, and pay with wake-ups.
        self._hashing = {kind: threading.Lock() for kind in KINDS}
        self._headers = HeaderPool(HEADERS_KEPT)
        self._segments: dict[int, _Segment] = {}
        self._lost: list[StructArray] = []
        self._segment_at: dict[int, int] = {}  # place to segment
        self.written_bytes = 0
        """Into slot files."""
        self.is_stuck = False
        """Whether `close` gave up waiting for threads that hang."""
        self._is_open = False
        self._opened: OpenStore
        self._ledger: Ledger
        self._zeroing: Zeroing

    # -- open and close

    async def open(self) -> Recovered:
        """Take the directory, reserve its space, read the index. Raises the errors of `Tier.open`."""
        buffered = BufferedIO(len(KINDS) * self._queue_depth, asyncio.get_running_loop())
        where, direct = Path(self.place), self._direct
        how: dict[str, Any] = {"directory": where, "direct": direct, "buffered": buffered, "disk": self.disk}
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
        """End calls, sync, close. With release, remove every file of the store.

        If the disk takes too long, sets `is_stuck`; then the process must not wait for its threads.
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
        """As `WatchedTier.heed`: every failure or hang begins as a call."""
        self._calls.stir = stir

    async def probe(self) -> None:
        """Mend, then test a temporary file, the journal and the first slot. Raises TierFailed."""
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
        """As `StoredTier.holds`; False also for blocks lost by a failed sync."""
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
                lost = lost[self.holds(lost)]  # not slots that were freed meanwhile
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
        self._remove(lost)  # durable records still name them

    async def inspect(self) -> None:
        """Check that its files are still there; if not, its health has a fault."""
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
        """Blocks of the index, some at a time."""
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
        """Record what a plan frees, begins and reserves here; in memory only."""
        self._remove(plan.freed["extent"])
        for assignment in plan.segments:
            self._ledger.note_used(segment=assignment.segment)
            if assignment.tier == self.position:
                self._begin(assignment)
        if len(plan.reserved):
            self._ledger.note_used(generation=int(plan.reserved["generation"].max()))

    def note_namespaces(self, records: Iterable[bytes]) -> None:
        """Keep opaque records, durable no later than any later block. The next `open` returns them."""
        for record in records:
            self._ledger.add(NamespaceKept(bytes(record)))

    async def keep_namespace(self, record: bytes) -> None:
        """`note_namespaces` of one."""
        self.note_namespaces([record])

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Make marks durable that cover the segments; space is reserved already. Raises TierFailed."""
        own = [s for s in segments if s.tier == self.position]
        for segment in own:
            if segment.slot not in self._opened.files:
                raise TierFailed(
                    f"{self.spec.name}: segment {segment.segment} is at place {segment.slot}, beyond its"
                    f" {len(self._opened.files)} slot files; raise the capacity"
                )
        if self._ledger.failure:
            raise TierFailed(self._ledger.failure)
        await self._ledger.cover(segment=max((s.segment for s in own), default=0))

    async def sync(self) -> None:
        """Make all writes and records durable, except those that `holds` denies. Raises TierFailed."""
        await self._ledger.sync()

    def _remove(self, extents: StructArray) -> None:
        own = extents[extents["tier"] == self.position] if len(extents) else extents
        segments, offsets = list[int](), list[int]()  # no pairs: a million of them trigger the garbage collector
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
        self,
        extents: StructArray,
        targets: Sequence[memoryview],
        metas: StructArray,
        *,
        arrived: HashRows = no_hash,
        parts: Parts | None = None,
    ) -> ReadResult:
        """As `StoredTier.read`. Slots with a foreign, torn or stale header are CORRUPT. Unreadable
        ones, and those no longer held at the end, are FAILED."""
        with self._headers.borrow(len(extents)) as headers:
            pages = whole_pages(targets, extents["length"])
            batch = Batch(self._means("read"), self._located(extents), metas, pages, headers, arrived)
            rows, holds = self._usable(batch.extents), partial(self.holds, batch.extents)
            if parts is not None:
                await read_parts(batch, rows, parts, carry=partial(self._run, batch, "read"), holds=holds)
            else:
                await self._carry(batch, rows, ReadRun)
                batch.judge(holds())
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
        """As `StoredTier.write`. Blocks that exceed their slot or 480 slices are FAILED."""
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
        """Copies of the extents with their slots' offsets; 2^64 - 1 in an unknown segment."""
        located = extents.copy()
        for segment in kinds(extents["segment"]):
            rows = extents["segment"] == segment
            held = self._segments.get(segment)
            slots = extents["slot"][rows].astype(np.uint64)
            located["offset"][rows] = slots * np.uint64(held.begun.class_bytes) if held else np.uint64(2**64 - 1)
        return located

    def _usable(self, extents: StructArray) -> NDArray[np.int64]:
        """The rows whose slot exists and has room for the block."""
        usable = np.zeros(len(extents), dtype=np.bool_)
        for segment in kinds(extents["segment"]) if self._is_open else ():
            held = self._segments.get(segment)
            if held is not None and held.begun.place in self._opened.files:
                fits = extents["length"].astype(np.int64) + HEADER_BYTES <= held.begun.class_bytes
                usable |= (extents["segment"] == segment) & fits & (extents["slot"] < held.begun.pages)
        return np.flatnonzero(usable)

    async def _carry(self, batch: Batch, rows: NDArray[np.int64], job: type[ReadRun | HeadRun | WriteRun]) -> None:
        """Run the batch's jobs on the lanes."""
        classes = [self._segments[s].begun.class_bytes for s in batch.extents["segment"][rows].tolist()]
        await self._run(batch, job.kind, batch.jobs(job, rows, classes, depth=self._queue_depth))

    async def _run(self, batch: Batch, kind: Kind, jobs: Sequence[Job]) -> None:
        try:
            await self._lanes[kind].carry(jobs, hang_s=self.patience.hang_s)
        finally:
            batch.conclude(self._calls)

    def _find_file(self, segment: int, kind: Kind) -> SlotFile:
        """A slot file, for a lane. Raises GoneError if the segment ended or writes are off."""
        held = self._segments.get(segment)
        if held is None or not self._is_open:
            raise GoneError(errno.ESTALE, "the segment is gone")
        if kind == "write" and self._ledger.failure:
            raise GoneError(errno.ESTALE, "the file may have failed")
        return self._opened.files[held.begun.place]

    def _count_written(self, size: int) -> None:
        self.written_bytes += size

    def _note_stored(self, batch: Batch) -> None:
        """Record written blocks, place by place; FAILED if segment or file was replaced meanwhile."""
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
        """Whether blocks written to the file can become durable there."""
        return place not in self._ledger.abandoned and self._opened.files.get(place) is file
