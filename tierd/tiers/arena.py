"""The arena: a mapped tier in plain files. Host tiers, and device tiers of kind "cpu".

Purpose: pages that the daemon and its clients map, and a catalogue beside them that survives the daemon. Non-purpose: deciding,
hashing payload, the medium below (`arena_files.py` chooses it, `data_files.py` makes the files). Layout on disk: `FORMAT.md`.

Invariants:
- Retract, then begin, then stamp: within `apply` a page's old entry and generation are gone before its new generation is
  there, and all of that before anybody writes a byte, because handles leave later.
- A segment that was found again at start was mapped by processes that the core knows nothing of, to write or to read. When it has
  emptied, its file is unlinked whole, as with `fresh`: whoever still reads an old lease keeps its bytes.
- One thread at a time calls apply, publish, view, slices: that of the event loop. `open` and `prepare` use threads of their own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import NOBODY, SegmentAssignment, StructArray, TierSpec
from tierd.core.words import barrier
from tierd.errors import ConfigError, CorruptRecord, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers import arena_files, arena_recovery, marks
from tierd.tiers.catalogue import Catalogue, CatalogueHead
from tierd.tiers.data_files import DataFiles
from tierd.tiers.lock import OwnerLock, take_lock
from tierd.tiers.purge import remove_empty, remove_files
from tierd.tiers.tier import Descriptor, Recovered, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan


MARKS_NAME = "arena.tbl"


@dataclass(slots=True)
class _Segment:
    """A segment in use. memory, catalogue: None until there, or for good when fault says why. found: from a former daemon's life."""

    assignment: SegmentAssignment
    catalogue: Catalogue | None = None
    memory: memoryview | None = None
    fault: str = ""
    found: bool = False

    @property
    def is_ready(self) -> bool:
        return self.memory is not None and self.catalogue is not None and self.catalogue.is_allocated


class Arena:
    """One mapped tier. instance: name of the daemon's instance; arena_dir: base directory, empty to choose one.

    After `open`: place is the directory of data files, tables that of everything else, first_touch_bytes_per_s and
    huge_page_share what was measured (0 if it could not be).
    """

    def __init__(self, spec: TierSpec, *, position: int, instance: str, arena_dir: str = "") -> None:
        self.spec = spec
        self.position = position
        self.mode = ""
        self.place = ""
        self.notices: list[str] = []
        self.tables = Path()
        self.first_touch_bytes_per_s = 0.0
        self.huge_page_share = 0.0
        self._instance, self._arena_dir = instance, arena_dir
        self._segments: dict[int, _Segment] = {}
        self._names: set[bytes] = set()
        self._preparing = threading.Lock()
        self._lock: OwnerLock | None = None
        self._marks: marks.Marks
        self._data: DataFiles

    # -- life

    async def open(self) -> Recovered:
        """Take the directory, find what survived, begin to make spare files. Raises AlreadyOwned, ConfigError, VersionMismatch,
        TierFailed."""
        try:
            return await asyncio.to_thread(self._open)
        except BaseException as error:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            if isinstance(error, OSError):
                raise TierFailed(
                    f"{self.spec.name}: cannot open the arena in {self.place or 'its directory'}: {error}"
                ) from error
            raise

    def _open(self) -> Recovered:
        spec = self.spec
        if spec.capacity_bytes < spec.segment_bytes:
            raise ConfigError(
                f"{spec.name}.capacity: {spec.capacity_bytes} bytes hold no segment of {spec.segment_bytes}; raise it"
            )
        place = self.choose()
        self.mode, self.place, self.tables = place.mode, str(place.data), place.tables
        self._lock = take_lock(place.tables / arena_files.LOCK_NAME, what=f"{spec.name} of instance {self._instance}")
        self._marks = self._open_marks(place)
        self._data = DataFiles(
            place.data, segment_bytes=spec.segment_bytes, places=spec.capacity_bytes // spec.segment_bytes
        )
        arena_files.check_room(spec, place=place, held_bytes=self._data.held_bytes())
        failpoint("arena.open.before_recovery")
        recovered = self._recover()
        self._data.adopt_spares()
        self._measure(place)
        failpoint("arena.open.after_recovery")
        self._data.start()
        return recovered

    def _open_marks(self, place: arena_files.ArenaPlace) -> marks.Marks:
        """Those of the former life; without them nothing of it can be told apart, and all of it goes."""
        try:
            return marks.Marks(place.tables / MARKS_NAME)
        except CorruptRecord as error:
            self.notices.append(f"{self.spec.name}: {error}; the arena begins anew, without a block")
            arena_recovery.drop_everything(place.tables, place.data)
            return marks.begin_anew(place.tables / MARKS_NAME)

    def _recover(self) -> Recovered:
        found = arena_recovery.recover(
            self.tables, self._data, spec=self.spec, position=self.position, store=self._marks.store
        )
        for f in found.segments:
            self._segments[f.assignment.segment] = _Segment(f.assignment, f.catalogue, f.memory, found=True)
        self._marks.use_segment(found.highest_segment)
        self._marks.use_generation(found.highest_generation)
        extents, metas = arena_recovery.joined(found.segments)
        if found.segments:
            self.notices.append(
                f"{self.spec.name}: {len(extents)} blocks in {len(found.segments)} segments found again"
            )
        if found.dropped:
            self.notices.append(f"{self.spec.name}: {len(found.dropped)} segments dropped; first: {found.dropped[0]}")
        names = marks.read_records(self._names_path)
        self._names = set(names)
        return Recovered(
            segments=[f.assignment for f in found.segments],
            extents=extents,
            metas=metas,
            next_segment=self._marks.next_segment,
            next_generation=self._marks.next_generation,
            namespaces=names,
        )

    def _measure(self, place: arena_files.ArenaPlace) -> None:
        touch = arena_files.measure_touch(place.data)
        if touch is not None:
            self.first_touch_bytes_per_s, self.huge_page_share = touch.bytes_per_s, touch.huge_share
        self.notices.append(arena_files.describe(self.spec, place, touch))

    def seal_found(self) -> list[SegmentAssignment]:
        """Nobody knows who holds pages of the segments found at start: from now on NOBODY writes them, and it says so in their heads. The segments."""
        for segment in self._segments.values():
            assert segment.catalogue is not None
            segment.assignment = replace(segment.assignment, writer=NOBODY)
            segment.catalogue.write_head(self._head(segment.assignment))
        return [segment.assignment for segment in self._segments.values()]

    @property
    def found(self) -> int:
        """How many segments of a former life there are."""
        return sum(segment.found for segment in self._segments.values())

    def choose(self) -> arena_files.ArenaPlace:
        """Where its files lie. Raises ConfigError."""
        return arena_files.choose_place(self.spec, instance=self._instance, arena_dir=self._arena_dir)

    async def sync(self) -> None:
        """Nothing: memory is as durable as it gets."""

    async def close(self, *, release: bool) -> None:
        """Let go of everything, and with release remove the files. Views that are alive keep their memory. Twice is once."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        await asyncio.to_thread(self._data.stop)
        self._segments.clear()
        del self._marks
        if release:
            await asyncio.to_thread(remove_files, self.tables, Path(self.place))
        lock.release(remove=release)
        if release:
            remove_empty(self.tables, Path(self.place))

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """Retract freed pages, begin segments, stamp reserved generations. A segment that cannot begin fails in `prepare`."""
        for segment, rows in self._by_segment(plan.freed["extent"]):
            if segment.catalogue is not None:
                segment.catalogue.retract(rows["slot"])
        for assignment in plan.segments:
            if assignment.tier == self.position:
                self._begin(assignment)
        mine = plan.reserved[plan.reserved["tier"] == self.position]
        if len(mine):
            failpoint("arena.stamp.before_marks")
            self._marks.use_generation(int(mine["generation"].max()))
            for segment, rows in self._by_segment(mine):
                if segment.catalogue is not None:
                    segment.catalogue.stamp(rows["slot"], rows["generation"])
        barrier()

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Allocate what these segments still lack. Raises TierFailed."""
        wanted = [self._segments.get(a.segment) for a in segments if a.tier == self.position]
        if any(segment is None or not segment.is_ready for segment in wanted):
            await asyncio.to_thread(self._prepare, [segment for segment in wanted if segment is not None])

    async def keep_namespace(self, record: bytes) -> None:
        """Store a namespace's record beside the segments, once."""
        if record in self._names:
            return
        try:
            failpoint("arena.names.before_append")
            marks.append_record(self._names_path, record)
        except OSError as error:
            raise TierFailed(f"{self._names_path}: cannot be written: {error}") from error
        self._names.add(record)

    # -- pages

    def view(self, extent: np.void) -> memoryview:
        """The page of one EXTENT row, class_bytes of writable uint8. Raises KeyError, TierFailed before `prepare`."""
        segment = self._segments[int(extent["segment"])]
        if segment.memory is None:
            raise TierFailed(
                f"{self.spec.name}: segment {segment.assignment.segment} has no memory {segment.fault or 'yet'}"
            )
        offset = int(extent["offset"])
        return segment.memory[offset : offset + segment.assignment.class_bytes]

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Enter blocks into the catalogue: EXTENT[n], META[n], a table of u64 for each. Raises InvalidArgument."""
        records = metas.copy()
        records["generation"] = extents["generation"]
        for segment, where in self._rows(extents):
            if segment.is_ready and segment.catalogue is not None:
                tables = [slices[i] for i in where.tolist()]
                segment.catalogue.publish(extents["slot"][where], metas=records[where], slices=tables)

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """The published slice tables of these pages; None where there is none of that generation."""
        tables: list[SliceTable | None] = [None] * len(extents)
        for segment, where in self._rows(extents):
            if segment.is_ready and segment.catalogue is not None:
                found = segment.catalogue.find_tables(extents["slot"][where], extents["generation"][where])
                for i, table in zip(where.tolist(), found, strict=True):
                    tables[i] = table
        return tables

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """A new descriptor of the data file. Raises KeyError, TierFailed before `prepare`."""
        if not self._segments[segment].is_ready:
            raise TierFailed(f"{self.spec.name}: segment {segment} is not prepared {self._segments[segment].fault}")
        return self._opened(self._data.path(segment), os.O_RDWR if writable else os.O_RDONLY)

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """A new read-only descriptor of the catalogue. Raises KeyError, TierFailed."""
        if not self._segments[segment].is_ready:
            raise TierFailed(f"{self.spec.name}: segment {segment} is not prepared {self._segments[segment].fault}")
        return self._opened(self._catalogue_path(segment), os.O_RDONLY)

    # -- inner

    @property
    def _names_path(self) -> Path:
        return self.tables / "namespaces.log"

    def _catalogue_path(self, segment: int) -> Path:
        return self.tables / f"{segment}{arena_recovery.SUFFIX}"

    def _opened(self, path: Path, flags: int) -> Descriptor:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TierFailed(f"{path}: cannot be opened: {error}") from error
        return Descriptor(fd, os.fstat(fd).st_size)

    def _rows(self, extents: StructArray) -> Iterator[tuple[_Segment, NDArray[np.intp]]]:
        """The rows that lie in this tier, by segment; those of unknown segments are passed over."""
        mine = extents["tier"] == self.position
        for segment_id in np.unique(extents["segment"][mine]).tolist():
            segment = self._segments.get(segment_id)
            if segment is not None:
                yield segment, np.flatnonzero(mine & (extents["segment"] == segment_id))

    def _by_segment(self, extents: StructArray) -> Iterator[tuple[_Segment, StructArray]]:
        return ((segment, extents[where]) for segment, where in self._rows(extents))

    def _begin(self, assignment: SegmentAssignment) -> None:
        """A segment begins a life. What cannot be done now (no spare file, no memory) is left to `prepare`."""
        segment = _Segment(replace(assignment, replaces=None, fresh=False))
        old = self._segments.pop(assignment.replaces, None) if assignment.replaces is not None else None
        self._segments[assignment.segment] = segment
        self._marks.use_segment(assignment.segment)
        try:
            if old is not None:
                self._succeed(old, segment, fresh=assignment.fresh)
            segment.memory = segment.memory or self._data.find_ready(assignment.segment)
            failpoint("arena.begin.before_catalogue")
            segment.catalogue = Catalogue.create(self._catalogue_path(assignment.segment), head=self._head(assignment))
        except OSError as error:
            segment.fault = f"because it could not begin: {error}"

    def _succeed(self, old: _Segment, new: _Segment, *, fresh: bool) -> None:
        """End the old life: its words, its catalogue, then its file, which the new life inherits if it may."""
        if old.catalogue is not None:
            old.catalogue.retract_all()
        self._catalogue_path(old.assignment.segment).unlink(missing_ok=True)
        if old.memory is None:
            return  # it never got a file: the place still has one to come
        if fresh or old.found:
            failpoint("arena.begin.before_discard")
            self._data.discard(old.assignment.segment)
            return
        failpoint("arena.begin.before_rename")
        try:
            self._data.rename(old.assignment.segment, new.assignment.segment)
        except OSError:
            self._data.discard(old.assignment.segment)  # else the place would never have a file again
            raise
        new.memory = old.memory

    def _head(self, assignment: SegmentAssignment) -> CatalogueHead:
        return CatalogueHead(
            store=self._marks.store,
            segment_bytes=self.spec.segment_bytes,
            assignment=replace(assignment, replaces=None),
        )

    def _prepare(self, segments: Sequence[_Segment]) -> None:
        with self._preparing:
            for segment in segments:
                self._complete(segment)

    def _complete(self, segment: _Segment) -> None:
        name = segment.assignment.segment
        try:
            if segment.fault or segment.catalogue is None:
                raise TierFailed(f"{self.spec.name}: segment {name} is of no use {segment.fault}")
            if not segment.catalogue.is_allocated:
                failpoint("arena.prepare.before_catalogue")
                segment.catalogue.allocate(self._catalogue_path(name))
            if segment.memory is None:
                failpoint("arena.prepare.before_memory")
                segment.memory = self._data.take(name)
            if self._segments.get(name) is not segment:
                self._data.discard(name)  # its life has ended meanwhile, and nobody else would unlink the file
        except OSError as error:
            raise TierFailed(
                f"{self.spec.name}: segment {name} cannot be allocated in {self.place}: {error}"
            ) from error
