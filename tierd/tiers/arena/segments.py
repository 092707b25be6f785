"""The records of a tier whose segments clients map: its segments, their catalogues and their
memory.

`SegmentBooks` is common to all such tiers: it carries out plans, publishes blocks and keeps
namespaces. A `SegmentSupply` (files of an arena, slabs of a GPU) provides the memory.
`arena_files.py` chooses the directories.

- `apply` retracts, then begins, then stamps. So a page's old entry and generation are gone before
  its new generation is there. Writes start later, since handles leave later.
- Processes unknown to the core may map a segment recovered at start. Once it is empty, its memory
  is discarded whole, as with `fresh`. Readers with an old lease keep its bytes.
- One thread at a time calls apply, publish, slices: that of the event loop. `prepare` uses a thread
  of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import every, kinds, true_rows
from tierd.core.formats.meta import duplicate, picked
from tierd.core.formats.model import SegmentAssignment, StructArray, TierSpec
from tierd.core.formats.words import barrier
from tierd.errors import CorruptRecord, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.arena import arena_files, marks
from tierd.tiers.arena.arena_recovery import SUFFIX, drop_everything
from tierd.tiers.arena.catalogue import Catalogue, CatalogueHead
from tierd.tiers.fsck.purge import remove_empty, remove_files
from tierd.tiers.io.files import remedy_of
from tierd.tiers.io.lock import OwnerLock, take_lock
from tierd.tiers.tier import Descriptor, SliceTable

if TYPE_CHECKING:
    from tierd.core.plan import Plan

MARKS_NAME = "arena.tbl"

Memory = TypeVar("Memory")
Given_co = TypeVar("Given_co", covariant=True)


class SegmentSupply(Protocol[Given_co]):
    """Memory for as many segments as the tier has places, made ahead if possible."""

    def find_ready(self, segment: int) -> Given_co | None:
        """Spare memory, now the segment's; None if there is none. Does not wait. Raises OSError."""

    def take(self, segment: int) -> Given_co:
        """Memory, now the segment's: a spare, or new. In a thread. Raises TierFailed, OSError."""

    def rename(self, old: int, new: int) -> None:
        """Move the memory of one segment to another; mappings of it stay. Raises OSError."""

    def discard(self, segment: int) -> None:
        """Discard a segment's memory. Processes that map it keep its bytes. The place may get new."""


@dataclass(slots=True)
class ArenaSegment(Generic[Memory]):
    """A segment in use. memory, catalogue: None until ready, or with a fault. found: recovered."""

    assignment: SegmentAssignment
    catalogue: Catalogue | None = None
    memory: Memory | None = None
    fault: str = ""
    error: OSError | None = None
    found: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether pages of it can be handed out."""
        return self.memory is not None and self.catalogue is not None and self.catalogue.is_allocated


class SegmentBooks(Generic[Memory]):
    """The state of a tier of segments. instance: name of the daemon's instance; arena_dir: base
    directory, empty to choose one.

    On opening, a subclass sets `_lock`, `_marks` and `_data`. Then tables is the directory of
    everything but the memory.
    """

    def __init__(self, spec: TierSpec, *, position: int, instance: str, arena_dir: str = "") -> None:
        self.spec = spec
        self.position = position
        self.mode = ""
        self.place = ""
        self.notices: list[str] = []
        self.on_published: Callable[[StructArray, StructArray], None] = lambda _extents, _metas: None
        """Called with blocks that were entered: EXTENT [n], META [n]."""
        self.tables = Path()
        self._instance, self._arena_dir = instance, arena_dir
        self._segments: dict[int, ArenaSegment[Memory]] = {}
        self._names: set[bytes] = set()
        self._preparing, self._turn = threading.Lock(), threading.Lock()
        self._lock: OwnerLock | None = None
        self._marks: marks.Marks
        self._data: SegmentSupply[Memory]

    # -- open and close

    def choose(self) -> arena_files.ArenaPlace:
        """Choose the directories of its files. Raises ConfigError."""
        return arena_files.choose_place(self.spec, instance=self._instance, arena_dir=self._arena_dir)

    def _own(self, place: arena_files.ArenaPlace) -> None:
        """Take the directory of tables, and marks. Raises AlreadyOwned, VersionMismatch, OSError."""
        self.tables = place.tables
        what = f"{self.spec.name} of instance {self._instance}"
        self._lock = take_lock(place.tables / arena_files.LOCK_NAME, what=what)
        self._marks = self._open_marks(place)

    def _open_marks(self, place: arena_files.ArenaPlace) -> marks.Marks:
        """Marks of the previous run. If they are damaged, its segments are unusable and dropped."""
        try:
            return marks.Marks(place.tables / MARKS_NAME)
        except CorruptRecord as error:
            self.notices.append(f"{self.spec.name}: {error}; the arena starts empty")
            drop_everything(place.tables, place.data)
            return marks.begin_anew(place.tables / MARKS_NAME)

    def _disown(self) -> None:
        """Release the lock after a failed opening."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _restore_names(self) -> list[bytes]:
        names = marks.read_records(self._names_path)
        self._names = set(names)
        return names

    def _end(self, lock: OwnerLock, *, release: bool, places: Sequence[Path]) -> None:
        """Release everything; with release, remove the files. places: their directories."""
        self._segments.clear()
        del self._marks
        if release:
            remove_files(*places)
        lock.release(remove=release)
        if release:
            remove_empty(*places)

    async def sync(self) -> None:
        """Nothing to do for memory."""

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """Mark retired pages, retract freed ones, begin segments, stamp reserved generations. If a
        segment cannot begin, `prepare` fails."""
        for segment, rows in self._rows(plan.retired):
            if segment.catalogue is not None:
                segment.catalogue.retire(plan.retired["slot"][rows], plan.retired["generation"][rows])
        freed = plan.freed["extent"]
        for segment, rows in self._rows(freed):
            if segment.catalogue is not None:
                segment.catalogue.retract(freed["slot"][rows])
        for assignment in plan.segments:
            if assignment.tier == self.position:
                self._begin(assignment)
        generations = plan.reserved["generation"]
        mine = generations[plan.reserved["tier"] == self.position]
        if len(mine):
            failpoint("arena.stamp.before_marks")
            self._marks.use_generation(int(mine.max()))
            for segment, rows in self._rows(plan.reserved):
                if segment.catalogue is not None:
                    segment.catalogue.stamp(plan.reserved["slot"][rows], generations[rows])
        barrier()

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Allocate memory that these segments still lack. Raises TierFailed."""
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
            raise TierFailed(f"{self._names_path}: cannot be written ({error}); {remedy_of(error)}") from error
        self._names.add(record)

    def _close(self, segments: Sequence[int]) -> None:
        """End segments that the core has vacated for good; their memory goes."""
        for number in segments:
            with self._turn:
                old = self._segments.pop(number, None)
            if old is None:
                continue
            if old.catalogue is not None:
                old.catalogue.retract_all()
            failpoint("arena.close.before_catalogue")
            with contextlib.suppress(OSError):  # a file that remains has no valid page, and the next start removes it
                self._remove_catalogue(number)
            failpoint("arena.close.before_discard")
            if old.memory is not None:
                self._data.discard(number)

    # -- pages

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Enter blocks into the catalogue: EXTENT[n], META[n], u64 tables. Raises InvalidArgument."""
        records = duplicate(metas)
        records["generation"] = extents["generation"]
        for segment, where in self._rows(extents):
            if segment.is_ready and segment.catalogue is not None:
                tables = [slices[i] for i in where.tolist()]
                segment.catalogue.publish(extents["slot"][where], metas=picked(records, where), slices=tables)
        self.on_published(extents, metas)

    def note_arrived(self, extents: StructArray, counts: NDArray[np.int64]) -> None:
        """Tell clients of verified leading slices of pages being filled: EXTENT[n], int [n]."""
        for segment, where in self._rows(extents):
            if segment.is_ready and segment.catalogue is not None:
                pages = extents[where]
                segment.catalogue.note_arrived(pages["slot"], pages["generation"], counts[where])

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """The published slice tables of these pages; None if there is none of that generation."""
        tables: list[SliceTable | None] = [None] * len(extents)
        for segment, where in self._rows(extents):
            if segment.is_ready and segment.catalogue is not None:
                found = segment.catalogue.find_tables(extents["slot"][where], extents["generation"][where])
                for i, table in zip(where.tolist(), found, strict=True):
                    tables[i] = table
        return tables

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """A new read-only descriptor of the catalogue. Raises KeyError, TierFailed."""
        self._ready(segment)
        return opened(self._catalogue_path(segment), os.O_RDONLY)

    # -- inner

    @property
    def _names_path(self) -> Path:
        return self.tables / "namespaces.log"

    def _catalogue_path(self, segment: int) -> Path:
        return self.tables / f"{segment}{SUFFIX}"

    def _ready(self, segment: int) -> Memory:
        """The memory of a prepared segment. Raises KeyError, TierFailed."""
        found = self._segments[segment]
        if not found.is_ready or found.memory is None:
            raise TierFailed(f"{self.spec.name}: segment {segment} is not prepared {found.fault}")
        return found.memory

    def _rows(self, extents: StructArray) -> Iterator[tuple[ArenaSegment[Memory], NDArray[np.intp]]]:
        """The rows in this tier, by segment; rows of unknown segments are skipped."""
        mine, segments = extents["tier"] == self.position, extents["segment"]
        for segment_id in kinds(segments if every(mine) else segments[mine]):
            segment = self._segments.get(segment_id)
            if segment is not None:
                yield segment, true_rows(mine & (segments == segment_id))

    def _begin(self, assignment: SegmentAssignment) -> None:
        """Begin a segment. If there is no spare memory, `prepare` makes it later."""
        segment: ArenaSegment[Memory] = ArenaSegment(replace(assignment, replaces=None, fresh=False))
        with self._turn:  # from here on no thread gives the old one memory
            old = self._segments.pop(assignment.replaces, None) if assignment.replaces is not None else None
        self._segments[assignment.segment] = segment
        self._marks.use_segment(assignment.segment)
        try:
            if old is not None:
                self._succeed(old, segment, fresh=assignment.fresh)
            segment.memory = segment.memory or self._data.find_ready(assignment.segment)
            failpoint("arena.begin.before_catalogue")
            segment.catalogue = self._new_catalogue(assignment)
        except OSError as error:
            segment.fault, segment.error = f"because it could not begin: {error}", error

    def _succeed(self, old: ArenaSegment[Memory], new: ArenaSegment[Memory], *, fresh: bool) -> None:
        """End the old segment: words, catalogue, then memory, which the new one inherits if it may."""
        if old.catalogue is not None:
            old.catalogue.retract_all()
        with contextlib.suppress(OSError):  # a file that remains has no valid page, and the next start removes it
            self._remove_catalogue(old.assignment.segment)
        if old.memory is None:
            return  # it never got memory, so the place can still get some
        if fresh or old.found:
            failpoint("arena.begin.before_discard")
            self._data.discard(old.assignment.segment)
            return
        failpoint("arena.begin.before_rename")
        try:
            self._data.rename(old.assignment.segment, new.assignment.segment)
        except OSError:
            self._data.discard(old.assignment.segment)  # else the place would never get memory again
            raise
        new.memory = old.memory

    def _new_catalogue(self, assignment: SegmentAssignment) -> Catalogue:
        """A catalogue for a new segment. Raises OSError."""
        return Catalogue.create(self._catalogue_path(assignment.segment), head=self._head(assignment))

    def _remove_catalogue(self, segment: int) -> None:
        """Remove a segment's catalogue, if there is one. Raises OSError."""
        self._catalogue_path(segment).unlink(missing_ok=True)

    def _head(self, assignment: SegmentAssignment) -> CatalogueHead:
        return CatalogueHead(
            store=self._marks.store,
            segment_bytes=self.spec.segment_bytes,
            assignment=replace(assignment, replaces=None),
        )

    def _prepare(self, segments: Sequence[ArenaSegment[Memory]]) -> None:
        with self._preparing:
            for segment in segments:
                self._complete(segment)

    def _complete(self, segment: ArenaSegment[Memory]) -> None:
        name = segment.assignment.segment
        try:
            if segment.fault or segment.catalogue is None:
                raise TierFailed(f"{self.spec.name}: segment {name} is unusable {segment.fault}") from segment.error
            if not segment.catalogue.is_allocated:
                failpoint("arena.prepare.before_catalogue")
                segment.catalogue.allocate(self._catalogue_path(name))
            if segment.memory is None:
                failpoint("arena.prepare.before_memory")
                self._give(segment, self._data.take(name))
        except OSError as error:
            if self._segments.get(name) is not segment:
                return  # the segment ended meanwhile, and its files with it
            raise TierFailed(
                f"{self.spec.name}: segment {name} cannot be allocated in {self.place}: {error}"
            ) from error

    def _give(self, segment: ArenaSegment[Memory], memory: Memory) -> None:
        """Hand memory to the segment it was made for; discard it if that segment ended meanwhile."""
        name = segment.assignment.segment
        with self._turn:
            is_alive = self._segments.get(name) is segment
            if is_alive:
                segment.memory = memory
        if not is_alive:
            self._data.discard(name)


def opened(path: Path, flags: int) -> Descriptor:
    """A new descriptor of a file. Raises TierFailed."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TierFailed(f"{path}: cannot be opened: {error}") from error
    return Descriptor(fd, os.fstat(fd).st_size)
