"""A mapped tier in plain memory: what `Arena` is to its callers, with every rule of the protocol checked.

Purpose: `Memory`, which outlives a daemon as the arena's files do, and `SimArena`, one daemon's view of it. The catalogues are the real ones
(`tierd.tiers.catalogue`), over memory. Non-purpose: files, where arenas lie, spare files. Invariants: a caller that breaks the protocol is
told to the `Watch`, with the page's name; pages that nobody released keep their bytes whatever the daemon does.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.core.layout import GENERATION
from tierd.core.model import SegmentAssignment, StructArray, TierSpec
from tierd.core.plan import Plan
from tierd.errors import NotFound, TierFailed
from tierd.tiers.arena_recovery import FoundSegment, joined
from tierd.tiers.catalogue import Catalogue, CatalogueHead
from tierd.tiers.tier import Descriptor, Recovered, SliceTable

STORE = b"simulated arena."


@dataclass
class Watch:
    """Who hears of broken rules, and what the tiers must know of each other. fail: a rule was broken. seen: every plan, once.

    flying: generations of pages that a transfer reads or fills, with how many. is_short: whether memory cannot be had now.
    """

    fail: Callable[[str], None]
    seen: Callable[[Plan], None]
    is_short: Callable[[], bool]
    flying: Counter[int] = field(default_factory=Counter)


@dataclass
class Segment:
    """The two files of a segment. table: of the catalogue. data: None until there. maps: sessions that map it, and whether to write."""

    head: CatalogueHead
    table: memoryview
    data: memoryview | None
    maps: dict[int, bool] = field(default_factory=dict)


@dataclass
class Memory:
    """What of an arena outlives its daemon. used: every generation that was ever stamped, for the check alone.

    gone: sessions whose processes have ended, which map nothing any more.
    """

    segments: dict[int, Segment] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    next_segment: int = 1
    next_generation: int = 1
    used: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def photograph(self) -> Callable[[], None]:
        """The state of this moment; the result puts it back. Pages' bytes are their writers' and are left alone."""
        tables = [(s, bytes(s.table), s.data, dict(s.maps)) for s in self.segments.values()]
        segments, names, used = dict(self.segments), list(self.names), set(self.used)
        marks = self.next_segment, self.next_generation

        def put_back() -> None:
            self.segments, self.names, self.used = segments, names, used
            self.next_segment, self.next_generation = marks
            for segment, table, data, maps in tables:
                segment.table[:], segment.data = table, data
                segment.maps = {session: may for session, may in maps.items() if session not in self.gone}

        return put_back

    def forget(self, session: int) -> None:
        """The session's process is gone, and its mappings with it; it receives no descriptor any more."""
        self.gone.add(session)
        for segment in self.segments.values():
            segment.maps.pop(session, None)


@dataclass
class _Living:
    """A segment in this daemon's hands."""

    assignment: SegmentAssignment
    files: Segment
    catalogue: Catalogue
    found: bool = False

    @property
    def words(self) -> NDArray[np.uint64]:
        return self.catalogue._generations

    def extent_is_live(self, row: np.void) -> bool:
        return int(self.words[int(row["slot"])] & GENERATION) == int(row["generation"])


class SimArena:
    """One daemon's mapped tier over a Memory."""

    def __init__(self, spec: TierSpec, *, position: int, memory: Memory, watch: Watch) -> None:
        self.spec, self.position = spec, position
        self.mode, self.place, self.tables = "simulated", "memory", Path()
        self.notices: list[str] = []
        self._memory, self._watch = memory, watch
        self._born = memory.next_generation
        self._living: dict[int, _Living] = {}

    # -- life

    async def open(self) -> Recovered:
        """What survived: segments whose memory was there."""
        await asyncio.to_thread(lambda: None)
        found: list[FoundSegment] = []
        for number, files in sorted(self._memory.segments.items()):
            if files.data is None:
                del self._memory.segments[number]
                continue
            catalogue = Catalogue(files.table, head=files.head)
            catalogue.is_allocated = True
            self._living[number] = _Living(files.head.assignment, files, catalogue, found=True)
            found.append(FoundSegment(catalogue, files.data, catalogue.survivors()))
        extents, metas = joined(found)
        return Recovered(
            segments=[f.assignment for f in found],
            extents=extents,
            metas=metas,
            next_segment=self._memory.next_segment,
            next_generation=self._memory.next_generation,
            namespaces=list(self._memory.names),
        )

    async def sync(self) -> None:
        """Nothing: memory."""

    async def close(self, *, release: bool) -> None:
        """With release everything is gone."""
        if release:
            self._living.clear()
            self._memory.segments.clear()

    async def keep_namespace(self, record: bytes) -> None:
        """Kept at once."""
        if record not in self._memory.names:
            self._memory.names.append(record)

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """Retire, retract, begin, stamp; each page's and segment's past is checked."""
        self._watch.seen(plan)
        for living, rows in self._by_segment(plan.retired):
            self._check_retired(living, rows)
            living.catalogue.retire(rows["slot"], rows["generation"])
        for living, rows in self._by_segment(plan.freed["extent"]):
            self._check_freed(living, rows)
            living.catalogue.retract(rows["slot"])
        for assignment in plan.segments:
            if assignment.tier == self.position:
                self._begin(assignment)
        for living, rows in self._by_segment(plan.reserved):
            self._check_stamped(living, rows)
            self._memory.next_generation = max(self._memory.next_generation, int(rows["generation"].max()) + 1)
            living.catalogue.stamp(rows["slot"], rows["generation"])

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Memory for what has none yet. Raises TierFailed when memory is short."""
        await asyncio.to_thread(lambda: None)
        for assignment in segments:
            living = self._living.get(assignment.segment)
            if living is not None and assignment.tier == self.position:
                self._allocate(living)

    def _allocate(self, living: _Living) -> None:
        if living.files.data is None:
            if self._watch.is_short():
                raise TierFailed(f"{self.spec.name}: no memory for segment {living.assignment.segment} (simulated)")
            living.files.data = memoryview(mmap.mmap(-1, self.spec.segment_bytes))
        living.catalogue.is_allocated = True

    def _begin(self, assignment: SegmentAssignment) -> None:
        number = assignment.segment
        if number < self._memory.next_segment:
            self._watch.fail(f"{self.spec.name}: segment {number} begins a second life")
        self._memory.next_segment = max(self._memory.next_segment, number + 1)
        old = self._living.pop(assignment.replaces, None) if assignment.replaces is not None else None
        head = CatalogueHead(
            store=STORE, segment_bytes=self.spec.segment_bytes, assignment=replace(assignment, replaces=None)
        )
        files = Segment(head, memoryview(bytearray(head.layout.total_bytes)), None)
        if old is not None:
            self._end(old, assignment, files)
        catalogue = Catalogue(files.table, head=head)
        catalogue.write_head(head)
        self._living[number] = _Living(assignment, files, catalogue)
        self._memory.segments[number] = files

    def _end(self, old: _Living, new: SegmentAssignment, files: Segment) -> None:
        """The old life is over; the new one inherits its memory if nobody is left who could disturb it."""
        words = old.words[(old.words & GENERATION) >= np.uint64(self._born)]
        if np.any(words):
            self._watch.fail(
                f"{self.spec.name}: segment {old.assignment.segment} ends with live pages {words.tolist()}"
            )
        old.catalogue.retract_all()
        self._memory.segments.pop(old.assignment.segment, None)
        if old.files.data is None or new.fresh or old.found:
            return
        for session, may_write in old.files.maps.items():
            if session != new.writer and (may_write or old.assignment.domain != new.domain):
                self._watch.fail(
                    f"{self.spec.name}: segment {new.segment} takes memory that session {session} still maps"
                )
        files.data, files.maps = old.files.data, old.files.maps

    def _check_retired(self, living: _Living, rows: StructArray) -> None:
        for row in rows:
            if int(living.words[int(row["slot"])]) not in (int(row["generation"]), 0):
                self._watch.fail(f"{self._name(row)}: retired, and another's or retired before")

    def _check_freed(self, living: _Living, rows: StructArray) -> None:
        for row in rows:
            generation = int(row["generation"])
            if generation >= self._born and not living.extent_is_live(row):
                self._watch.fail(f"{self._name(row)}: freed, and is not in use")
            if generation in self._watch.flying:
                self._watch.fail(f"{self._name(row)}: freed while a transfer uses it")

    def _check_stamped(self, living: _Living, rows: StructArray) -> None:
        for row in rows:
            generation, word = int(row["generation"]), int(living.words[int(row["slot"])] & GENERATION)
            if word >= self._born:
                self._watch.fail(f"{self._name(row)}: reserved while generation {word} uses the page")
            if generation in self._memory.used or generation <= word:
                self._watch.fail(f"{self._name(row)}: its generation was used before")
            self._memory.used.add(generation)

    # -- pages

    def view(self, extent: np.void) -> memoryview:
        """The page. One that is free, or another's by now, is a broken rule."""
        living = self._living[int(extent["segment"])]
        if living.files.data is None:
            raise TierFailed(f"{self.spec.name}: segment {living.assignment.segment} has no memory yet")
        if not living.extent_is_live(extent):
            self._watch.fail(f"{self._name(extent)}: viewed, and is not in use")
        offset = int(extent["offset"])
        return living.files.data[offset : offset + living.assignment.class_bytes]

    def views(self, extents: StructArray) -> list[memoryview]:
        """`view` of each."""
        return [self.view(row) for row in extents]

    def note_writer(self, pid: int) -> None:
        """Nothing: no process stands beside a simulated daemon."""

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Enters blocks into the real catalogue."""
        records = metas.copy()
        records["generation"] = extents["generation"]
        for living, where in self._rows(extents):
            for row in extents[where]:
                if not living.extent_is_live(row) or living.files.data is None:
                    self._watch.fail(f"{self._name(row)}: published, and is not in use")
            living.catalogue.publish(
                extents["slot"][where], metas=records[where], slices=[slices[i] for i in where.tolist()]
            )

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """As the catalogue has them."""
        tables: list[SliceTable | None] = [None] * len(extents)
        for living, where in self._rows(extents):
            found = living.catalogue.find_tables(extents["slot"][where], extents["generation"][where])
            for i, table in zip(where.tolist(), found, strict=True):
                tables[i] = table
        return tables

    def map(self, segment: int, *, session: int) -> Segment:
        """A client maps a segment. Raises NotFound, TierFailed before it is prepared."""
        living = self._living.get(segment)
        if living is None:
            raise NotFound(f"segment {segment}: gone")
        if living.files.data is None:
            raise TierFailed(f"{self.spec.name}: segment {segment} is not prepared")
        held = living.files.maps
        if session not in self._memory.gone:
            held[session] = held.get(session, False) or living.assignment.writer == session
        return living.files

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """There are no files here: clients use `map`."""
        raise TierFailed(f"{self.spec.name}: simulated memory has no descriptors")

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """There are no files here: clients use `map`."""
        raise TierFailed(f"{self.spec.name}: simulated memory has no descriptors")

    # -- inner

    def _rows(self, extents: StructArray) -> Iterator[tuple[_Living, NDArray[np.intp]]]:
        mine = extents["tier"] == self.position
        for number in np.unique(extents["segment"][mine]).tolist() if len(extents) else ():
            living = self._living.get(number)
            if living is not None:
                yield living, np.flatnonzero(mine & (extents["segment"] == number))

    def _by_segment(self, extents: StructArray) -> Iterator[tuple[_Living, StructArray]]:
        return ((living, extents[where]) for living, where in self._rows(extents))

    def _name(self, row: np.void) -> str:
        return f"{self.spec.name}: page {row['slot']} of segment {row['segment']}, generation {row['generation']}"
