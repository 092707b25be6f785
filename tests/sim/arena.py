"""A mapped tier in plain memory: the production books of segments, with the protocol checked.

Purpose: `Memory`, which outlives a daemon as files do, and `SimArena`, one daemon's view of it,
over `tierd.tiers.arena.segments`. Non-purpose: files, the arenas' folders, spare files. Invariants:
`Watch.fail` gets each breach of the protocol with the page's name. A page that nobody released
keeps its bytes, whatever the daemon does.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.layout import GENERATION, NO_GENERATION
from tierd.core.formats.model import SegmentAssignment, StructArray, TierSpec
from tierd.core.plan import Plan
from tierd.errors import NotFound, TierFailed
from tierd.tiers.arena import segments
from tierd.tiers.arena.arena_recovery import FoundSegment, joined
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead, read_head
from tierd.tiers.arena.marks import ARENA_HEADER, Marks
from tierd.tiers.tier import Descriptor, Recovered, SliceTable

STORE = b"simulated arena."


@dataclass
class Watch:
    """Receives broken rules and the state that tiers share.
    fail: a rule is broken. seen: each plan, once.
    flying: uses of each generation by transfers in flight. is_short: no memory can be had now."""

    fail: Callable[[str], None]
    seen: Callable[[Plan], None]
    is_short: Callable[[], bool]
    flying: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Segment:
    """A segment as a client maps it. table: its catalogue. data: its pages."""

    table: memoryview
    data: memoryview


@dataclass
class DataFile:
    """The memory of a segment. maps: sessions that map it, and whether they may write."""

    data: memoryview
    maps: dict[int, bool] = field(default_factory=dict)


class SimMarks(Marks):
    """The production marks, over memory and with a fixed id."""

    def __init__(self) -> None:
        self._words = np.zeros(ARENA_HEADER.itemsize // 8, np.uint64)
        self.store = STORE


@dataclass
class Memory:
    """The parts of an arena that outlive its daemon. tables, data: by segment.
    begun, used: all segments and generations ever given, for the checks alone.
    gone: sessions whose processes have ended; they map nothing any more."""

    tables: dict[int, memoryview] = field(default_factory=dict)
    data: dict[int, DataFile] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    marks: SimMarks = field(default_factory=SimMarks)
    begun: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def photograph(self) -> Callable[[], None]:
        """Saves the present state; the result restores it. Pages keep their writers' bytes."""
        tables = [(number, table, bytes(table)) for number, table in self.tables.items()]
        data = [(number, file, dict(file.maps)) for number, file in self.data.items()]
        names, begun, used, words = [*self.names], {*self.begun}, {*self.used}, self.marks._words.copy()

        def put_back() -> None:
            self.names, self.begun, self.used, self.marks._words[:] = names, begun, used, words
            self.tables = {number: table for number, table, _ in tables}
            self.data = {number: file for number, file, _ in data}
            for _, table, content in tables:
                table[:] = content
            for _, file, maps in data:
                file.maps = {session: may for session, may in maps.items() if session not in self.gone}

        return put_back

    def forget(self, session: int) -> None:
        """Unmaps everything of a session whose process has ended. It gets no more descriptors."""
        self.gone.add(session)
        for file in self.data.values():
            file.maps.pop(session, None)


class _Supply:
    """Memory for segments: ready at once for every other segment, unless memory is short."""

    def __init__(self, arena: SimArena) -> None:
        self._arena, self._memory, self._watch = arena, arena.memory, arena.watch

    def find_ready(self, segment: int) -> DataFile | None:
        return None if segment % 2 or self._watch.is_short() else self._make(segment)

    def take(self, segment: int) -> DataFile:
        if not self._watch.is_short():
            return self._make(segment)
        if segment % 4 == 1:
            raise OSError(errno.ENOSPC, "no memory (simulated)")
        raise TierFailed(f"segment {segment}: no memory for another reason (simulated)")

    def rename(self, old: int, new: int) -> None:
        self._memory.data[new] = self._memory.data.pop(old)

    def discard(self, segment: int) -> None:
        self._memory.data.pop(segment, None)

    def _make(self, segment: int) -> DataFile:
        spec = self._arena.spec
        if len(self._memory.data) >= self._arena.places:
            self._watch.fail(f"{spec.name}: segment {segment} is given memory beyond the tier's capacity")
        made = self._memory.data[segment] = DataFile(memoryview(mmap.mmap(-1, spec.segment_bytes)))
        return made


class SimArena(segments.SegmentBooks[DataFile]):
    """One daemon's mapped tier over a Memory."""

    def __init__(self, spec: TierSpec, *, position: int, memory: Memory, watch: Watch) -> None:
        super().__init__(spec, position=position, instance="simulated")
        self.mode, self.place = "simulated", "memory"
        self.memory, self.watch = memory, watch
        self.born = memory.marks.next_generation
        """Pages of lower generations belong to former lives."""
        self._marks = memory.marks
        self._data = _Supply(self)
        self.places = spec.capacity_bytes // spec.segment_bytes

    # -- life

    async def open(self) -> Recovered:
        """Recovers the segments that have both their files."""
        await asyncio.to_thread(lambda: None)
        memory, found = self.memory, list[FoundSegment]()
        for lonely in memory.tables.keys() ^ memory.data.keys():
            memory.tables.pop(lonely, None)
            memory.data.pop(lonely, None)
        for number, table in sorted(memory.tables.items()):
            head, file = read_head(bytes(table), name=f"segment {number}"), memory.data[number]
            catalogue = _Catalogue(table, head=head, arena=self)
            catalogue.is_allocated = True
            found.append(FoundSegment(catalogue, file.data, catalogue.survivors()))
            self._segments[number] = segments.ArenaSegment(found[-1].assignment, catalogue, file, found=True)
        extents, metas = joined(found)
        return Recovered(
            segments=[f.assignment for f in found],
            extents=extents,
            metas=metas,
            next_segment=memory.marks.next_segment,
            next_generation=memory.marks.next_generation,
            namespaces=list(memory.names),
        )

    async def close(self, *, release: bool) -> None:
        """Drops everything if release is set."""
        if release:
            self._segments.clear()
            self.memory.tables.clear()
            self.memory.data.clear()

    async def keep_namespace(self, record: bytes) -> None:
        """Keeps the record at once."""
        if record not in self.memory.names:
            self.memory.names.append(record)

    def check_growth(self, spec: TierSpec) -> None:
        """Does nothing: there is memory enough."""

    def grow(self, places: int) -> None:
        """Allows so many more segments."""
        self.places += places

    async def shrink(self, places: int, segments: Sequence[int]) -> None:
        """Drops the segments, as the arena does, and allows fewer."""
        self._close(segments)
        await asyncio.sleep(0)
        self.places -= places
        if len(self.memory.data) > self.places:
            self.watch.fail(f"{self.spec.name}: {len(self.memory.data)} segments have memory, {self.places} may")

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """Applies the plan and checks each freed page's past."""
        self.watch.seen(plan)
        freed = plan.freed["extent"]
        for segment, rows in self._rows(freed):
            for row in freed[rows]:
                if row["generation"] >= self.born and not _is_live(segment, row):
                    self._fail(row, "freed, and is not in use")
                if int(row["generation"]) in self.watch.flying:
                    self._fail(row, "freed while a transfer uses it")
        super().apply(plan)

    def _begin(self, assignment: SegmentAssignment) -> None:
        if assignment.segment in self.memory.begun:
            self.watch.fail(f"{self.spec.name}: segment {assignment.segment} begins a second life")
        self.memory.begun.add(assignment.segment)
        super()._begin(assignment)

    def _succeed(
        self, old: segments.ArenaSegment[DataFile], new: segments.ArenaSegment[DataFile], *, fresh: bool
    ) -> None:
        """Lets the new life inherit memory; checks that no session is left to disturb it."""
        assert old.catalogue is not None, "a simulated catalogue can always be made"
        words = old.catalogue._generations & GENERATION
        live = words[words >= np.uint64(self.born)]
        if len(live):
            self.watch.fail(f"{self.spec.name}: segment {old.assignment.segment} ends with live pages {live.tolist()}")
        super()._succeed(old, new, fresh=fresh)
        then, now = old.assignment, new.assignment
        for session, may_write in new.memory.maps.items() if new.memory is not None else ():
            if session != now.writer and (may_write or then.domain != now.domain):
                self.watch.fail(
                    f"{self.spec.name}: segment {now.segment} takes memory that session {session} still maps"
                )

    def _new_catalogue(self, assignment: SegmentAssignment) -> Catalogue:
        head = self._head(assignment)
        table = self.memory.tables[assignment.segment] = memoryview(bytearray(head.layout.total_bytes))
        catalogue = _Catalogue(table, head=head, arena=self)
        catalogue.write_head(head)
        return catalogue

    def _remove_catalogue(self, segment: int) -> None:
        self.memory.tables.pop(segment, None)

    # -- pages

    def view(self, extent: np.void) -> memoryview:
        """The page's bytes. A page that is free or reused breaks a rule."""
        segment = self._segments[int(extent["segment"])]
        if segment.memory is None:
            raise TierFailed(f"{self.spec.name}: segment {segment.assignment.segment} has no memory yet")
        if not _is_live(segment, extent):
            self._fail(extent, "viewed, and is not in use")
        offset = int(extent["offset"])
        return segment.memory.data[offset : offset + segment.assignment.class_bytes]

    def views(self, extents: StructArray) -> list[memoryview]:
        """`view` of each."""
        return [self.view(row) for row in extents]

    def note_writer(self, pid: int) -> None:
        """Does nothing: no process runs beside a simulated daemon."""

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Publishes the pages and checks that they are in use."""
        for segment, where in self._rows(extents):
            for row in extents[where]:
                if not segment.is_ready or not _is_live(segment, row):
                    self._fail(row, "published, and is not in use")
        super().publish(extents, metas, slices)

    def map(self, number: int, *, session: int) -> Segment:
        """Maps a segment for a client. Raises NotFound, and TierFailed until it is prepared."""
        if number not in self._segments:
            raise NotFound(f"segment {number}: gone")
        file, writer = self._ready(number), self._segments[number].assignment.writer
        if session not in self.memory.gone:
            file.maps[session] = file.maps.get(session, False) or writer == session
        return Segment(self.memory.tables[number], file.data)

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """Always raises: there are no files here; clients use `map`."""
        raise TierFailed(f"{self.spec.name}: simulated memory has no descriptors")

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """Always raises: there are no files here; clients use `map`."""
        raise TierFailed(f"{self.spec.name}: simulated memory has no descriptors")

    def _fail(self, row: np.void, what: str) -> None:
        """Reports a broken rule about a page, an EXTENT row."""
        where = f"page {row['slot']} of segment {row['segment']}, generation {row['generation']}"
        self.watch.fail(f"{self.spec.name}: {where}: {what}")


class _Catalogue(Catalogue):
    """The production catalogue, over memory. Checks pages that `apply` retires or stamps, in
    order."""

    def __init__(self, table: memoryview, *, head: CatalogueHead, arena: SimArena) -> None:
        super().__init__(table, head=head)
        self._arena = arena

    def allocate(self, path: Path) -> None:
        if self.head.assignment.segment not in self._arena.memory.tables:
            raise FileNotFoundError(errno.ENOENT, "the segment has ended (simulated)", str(path))
        self.is_allocated = True

    def retire(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> None:
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            if int(self._generations[slot]) not in (generation, NO_GENERATION):
                self._fail(slot, generation, "retired, and another's or retired before")
        super().retire(slots, generations)

    def stamp(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> None:
        used = self._arena.memory.used
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            word = int(self._generations[slot] & GENERATION)
            if word >= self._arena.born:
                self._fail(slot, generation, f"reserved while generation {word} uses the page")
            if generation in used or generation <= word:
                self._fail(slot, generation, "its generation was used before")
            used.add(generation)
        super().stamp(slots, generations)

    def _fail(self, slot: int, generation: int, what: str) -> None:
        where = f"page {slot} of segment {self.head.assignment.segment}, generation {generation}"
        self._arena.watch.fail(f"{self._arena.spec.name}: {where}: {what}")


def _is_live(segment: segments.ArenaSegment[DataFile], row: np.void) -> bool:
    """Whether an EXTENT row is the present use of its page."""
    assert segment.catalogue is not None, "a simulated catalogue can always be made"
    return int(segment.catalogue._generations[int(row["slot"])] & GENERATION) == int(row["generation"])
