"""The segments that one session has mapped, and the segments that handles point into.

session.py requests segments from the daemon; mapping.py makes arrays of their files. A segment that
only views keep mapped is not listed here. Its memory lives as long as they do.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierd.client.session.mapping import MappedSegment, SegmentTable
from tierd.core.arrays.sets import every
from tierd.core.formats.model import StructArray

if TYPE_CHECKING:
    from tierd.client.session.device import DeviceSegment

SWEEP_SEGMENTS = 32
"""With more mapped segments than this, empty ones are dropped before another is mapped."""

Place = tuple[int, int]
"""Tier and segment."""
Parts = list[tuple[Place, NDArray[np.intp] | slice]]
"""Handles by segment: each segment with the rows of its handles."""


class Segments:
    """The mapped segments. on_gpu: numbers of the tiers in GPU memory."""

    def __init__(self, on_gpu: Container[int]) -> None:
        self._on_gpu = on_gpu
        self._mapped: dict[Place, MappedSegment | DeviceSegment] = {}
        self._table: SegmentTable | None = None
        self._tabled: tuple[int, object] = (0, None)

    def at(self, place: Place) -> MappedSegment | DeviceSegment | None:
        """A mapped segment."""
        return self._mapped.get(place)

    def add(self, place: Place, segment: MappedSegment | DeviceSegment) -> None:
        """Notes that a segment is mapped."""
        self._mapped[place] = segment

    def clear(self) -> None:
        """Forgets all segments."""
        self._mapped.clear()
        self._table, self._tabled = None, (0, None)

    def unmapped(self, handles: StructArray) -> set[Place]:
        """Segments of HANDLE [n] that are not mapped yet."""
        only = only_place(handles)
        places = places_of(handles) if only is None else (only,)
        return {place for place in places if place not in self._mapped}

    def has(self, places: Iterable[Place]) -> bool:
        """Whether all of these are mapped."""
        return all(place in self._mapped for place in places)

    def table(self) -> SegmentTable:
        """The mapped segments of host memory."""
        mapped = list(self._mapped.values())
        known = len(mapped), mapped[-1] if mapped else None  # new ones come last; removals change the length
        if self._table is None or self._tabled != known:
            self._table = SegmentTable(segment for segment in mapped if isinstance(segment, MappedSegment))
            self._tabled = known
        return self._table

    def sweep(self) -> None:
        """Drops empty segments: in host memory only above SWEEP_SEGMENTS, on a GPU always. A mapped
        GPU segment that has ended keeps its memory from other users."""
        is_many = len(self._mapped) >= SWEEP_SEGMENTS
        swept = [place for place, segment in self._mapped.items() if is_many or place[0] in self._on_gpu]
        for place in swept:
            if self._mapped[place].is_empty:
                del self._mapped[place]


def places_of(handles: StructArray) -> set[Place]:
    """The segments that HANDLE [n] point into."""
    return set(zip(handles["tier"].tolist(), handles["segment"].tolist(), strict=True))


def only_place(handles: StructArray) -> Place | None:
    """The only segment of HANDLE [n]; None: several segments, or no handles."""
    if not len(handles):
        return None
    tiers, segments = handles["tier"], handles["segment"]
    if len(handles) > 1 and not (every(segments == segments[0]) and every(tiers == tiers[0])):
        return None
    return int(tiers[0]), int(segments[0])


def by_place(handles: StructArray) -> Parts:
    """HANDLE [n] by segment: each segment with the rows of its handles."""
    only = only_place(handles)
    if only is not None:
        return [(only, slice(None))]
    keys = handles["tier"].astype(np.uint64) << np.uint64(32) | handles["segment"]
    return [((int(key) >> 32, int(key) & 0xFFFFFFFF), np.flatnonzero(keys == key)) for key in np.unique(keys)]
