"""The arena: a mapped tier in plain files. Host tiers, and device tiers of kind "cpu".

The daemon and its clients map its pages. A catalogue beside them survives the daemon. The arena
neither decides nor hashes payloads. `../FORMAT.md` describes the layout on disk. The invariants of
`segments.py` hold. The event loop's thread calls `view`; `open` uses a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog

from tierd.core.formats.model import NOBODY, SegmentAssignment, StructArray, TierSpec
from tierd.errors import ConfigError, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.arena import arena_files, arena_recovery
from tierd.tiers.arena.data_files import SUFFIX as DATA_SUFFIX
from tierd.tiers.arena.data_files import DataFiles
from tierd.tiers.arena.segments import MARKS_NAME, ArenaSegment, SegmentBooks, opened
from tierd.tiers.arena.writers import await_writers, note_writer
from tierd.tiers.tier import Descriptor, Recovered

log = structlog.get_logger(__name__)


class Arena(SegmentBooks[memoryview]):
    """One mapped tier. After `open`, place is the directory of data files, and tables that of all
    others. first_touch_bytes_per_s and huge_page_share are measured, 0 if that failed."""

    _data: DataFiles
    has_failed = False
    """The daemon did not start: `close` removes the spare files made by this run."""

    def __init__(self, spec: TierSpec, *, position: int, instance: str, arena_dir: str = "") -> None:
        super().__init__(spec, position=position, instance=instance, arena_dir=arena_dir)
        self.first_touch_bytes_per_s = 0.0
        self.huge_page_share = 0.0

    # -- open and close

    async def open(self) -> Recovered:
        """Take the directory, recover segments, start making spare files. Raises AlreadyOwned,
        ConfigError, VersionMismatch, TierFailed."""
        try:
            return await asyncio.to_thread(self._open)
        except BaseException as error:
            self._disown()
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
        self.mode, self.place = place.mode, str(place.data)
        self._own(place)
        self._data = DataFiles(
            place.data, segment_bytes=spec.segment_bytes, places=spec.capacity_bytes // spec.segment_bytes
        )
        arena_files.check_room(spec, place=place, held_bytes=self._data.held_bytes())
        failpoint("arena.open.before_recovery")
        await_writers(self.tables, what=spec.name)
        recovered = self._recover()
        self._data.adopt_spares()
        self._measure(place)
        failpoint("arena.open.after_recovery")
        self._data.start()
        return recovered

    def _recover(self) -> Recovered:
        found = arena_recovery.recover(
            self.tables, self._data, spec=self.spec, position=self.position, store=self._marks.store
        )
        for f in found.segments:
            self._segments[f.assignment.segment] = ArenaSegment(f.assignment, f.catalogue, f.memory, found=True)
        self._marks.use_segment(found.highest_segment)
        self._marks.use_generation(found.highest_generation)
        extents, metas = arena_recovery.joined(found.segments)
        if found.segments:
            log.info("blocks recovered", tier=self.spec.name, blocks=len(extents), segments=len(found.segments))
        if found.dropped:
            self.notices.append(f"{self.spec.name}: {len(found.dropped)} segments dropped; first: {found.dropped[0]}")
        return Recovered(
            segments=[f.assignment for f in found.segments],
            extents=extents,
            metas=metas,
            next_segment=self._marks.next_segment,
            next_generation=self._marks.next_generation,
            namespaces=self._restore_names(),
        )

    def _measure(self, place: arena_files.ArenaPlace) -> None:
        touch = arena_files.measure_touch(place.data)
        if touch is not None:
            self.first_touch_bytes_per_s, self.huge_page_share = touch.bytes_per_s, touch.huge_share
            log.debug(
                "first touch", tier=self.spec.name, bytes_per_s=round(touch.bytes_per_s), huge_share=touch.huge_share
            )
        self.notices += arena_files.shortcomings(self.spec, place, touch)

    def seal_found(self) -> list[SegmentAssignment]:
        """Set the writer of all recovered segments to NOBODY, also in their headers, and return
        them. Called when the holders of their pages are unknown."""
        for segment in self._segments.values():
            assert segment.catalogue is not None
            segment.assignment = replace(segment.assignment, writer=NOBODY)
            segment.catalogue.write_head(self._head(segment.assignment))
        return [segment.assignment for segment in self._segments.values()]

    @property
    def found(self) -> int:
        """Number of segments recovered from the previous run."""
        return sum(segment.found for segment in self._segments.values())

    async def close(self, *, release: bool) -> None:
        """Release everything; with release, remove the files. Live views stay. Repeats do nothing."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        await asyncio.to_thread(self._data.stop, undo=self.has_failed)
        await asyncio.to_thread(self._end, lock, release=release, places=(self.tables, Path(self.place)))

    def check_growth(self, spec: TierSpec) -> None:
        """Check that a larger tier fits. Raises ConfigError with the remedy."""
        place = arena_files.ArenaPlace(Path(self.place), self.tables, self.mode)
        arena_files.check_room(spec, place=place, held_bytes=self._data.held_bytes())

    def grow(self, places: int) -> None:
        """Make memory for so many more segments, in the background and on demand."""
        self._data.grow(places)

    async def shrink(self, places: int, segments: Sequence[int]) -> None:
        """Free the memory of so many places, and of the segments that ended there."""
        self._close(segments)
        await asyncio.to_thread(self._data.shrink, places)

    @property
    def unready_bytes(self) -> int:
        """Capacity still to be allocated and touched, in the background or on demand."""
        return self._data.unready_bytes

    @property
    def unready_reason(self) -> str:
        """Why it is made only on demand; empty while the background thread makes it."""
        return self._data.idle_reason

    @property
    def has_room(self) -> bool:
        """Whether there is memory for one more segment."""
        free = arena_files.find_free(Path(self.place))
        return self._data.spares > 0 or free is None or free >= self.spec.segment_bytes + self.spec.segment_bytes // 8

    def find_removed(self) -> str:
        """The file that was removed or cut short under processes that still map it; empty if there
        is none. Runs in a thread.

        Lengths of staging files (sealed puts) are not checked: a cut fails one commit of a client.
        """
        files = [(path, -1) for path in (self.tables / arena_files.LOCK_NAME, self.tables / MARKS_NAME)]
        staging = set[int]()
        for number, segment in list(self._segments.items()):
            if segment.is_ready:
                files += [(self._catalogue_path(number), number), (self._data.path(number), number)]
            if self.spec.sealed_puts and segment.assignment.writer != self.spec.own_writer:
                staging.add(number)
        for path, number in files:
            try:
                size = path.lstat().st_size
            except FileNotFoundError:
                size = -1
            is_data = path.suffix == DATA_SUFFIX
            wanted = self.spec.segment_bytes if is_data and number not in staging else max(size, 1 - is_data)
            if size != wanted and (number < 0 or number in self._segments):  # the segment was not replaced meanwhile
                what = "was removed" if size < 0 else f"was cut to {size} bytes of {wanted}"
                return f"{self.spec.name}: {path} {what} while the daemon ran; do not touch the files in {self.place}"
        return ""

    # -- pages

    def view(self, extent: np.void) -> memoryview:
        """The page of one EXTENT row, writable uint8. Raises KeyError, TierFailed before `prepare`."""
        memory, size = self._memory(int(extent["segment"]))
        offset = int(extent["offset"])
        return memory[offset : offset + size]

    def views(self, extents: StructArray) -> list[memoryview]:
        """`view` of each of EXTENT [n]."""
        segments, offsets = extents["segment"].tolist(), extents["offset"].tolist()
        memories = {segment: self._memory(segment) for segment in set(segments)}
        pages = list[memoryview]()
        for segment, offset in zip(segments, offsets, strict=True):
            memory, size = memories[segment]
            pages.append(memory[offset : offset + size])
        return pages

    def _memory(self, number: int) -> tuple[memoryview, int]:
        """A segment's memory and page length. Raises KeyError, TierFailed."""
        segment = self._segments[number]
        if segment.memory is None:
            raise TierFailed(
                f"{self.spec.name}: segment {segment.assignment.segment} has no memory {segment.fault or 'yet'}"
            )
        return segment.memory, segment.assignment.class_bytes

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """A new descriptor of the data file. Raises KeyError, TierFailed before `prepare`."""
        self._ready(segment)
        return opened(self._data.path(segment), os.O_RDWR if writable else os.O_RDONLY)

    def note_writer(self, pid: int) -> None:
        """Record a process beside the daemon that will write to this memory. Raises TierFailed."""
        try:
            note_writer(self.tables, pid)
        except OSError as error:
            raise TierFailed(
                f"{self.spec.name}: process {pid} cannot be recorded as a writer in {self.tables}: {error}"
            ) from error
