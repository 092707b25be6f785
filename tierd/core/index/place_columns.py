"""Facts about a tier's places as columns, for questions asked at every small step.

A tier may have 20,000 places; a scan of them takes milliseconds. The columns say which clients may
write to a place, and which segment it has. They are kept by pages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.formats.model import DAEMON, NOBODY, SEALED, StructArray
from tierd.core.index.segment import Segment
from tierd.core.plan import Bools, Ids


class PlaceColumns:
    """sealed, nobodys: bool by place, and False at -1, the place of pages without one."""

    def __init__(self, segments: Sequence[Segment | None]) -> None:
        """segments: by place; the caller changes it."""
        self._segments = segments
        self.sealed: Bools = np.zeros(len(segments) + 1, np.bool_)
        """No client can write there: none ever could, or its writer's process ended in this run."""
        self.nobodys: Bools = np.zeros(len(segments) + 1, np.bool_)
        """Other holders of its pages are unknown."""
        self._table: Ids | None = None

    def lengthen(self) -> None:
        """There are more places."""
        more = np.zeros(len(self._segments) + 1 - len(self.sealed), np.bool_)
        self.sealed, self.nobodys = (np.concatenate((c[:-1], more, c[-1:])) for c in (self.sealed, self.nobodys))

    def note(self, place: int, last_writer: int) -> None:
        """A segment began, ended or changed its writer. last_writer: last session, or DAEMON."""
        segment, self._table = self._segments[place], None
        writer = segment.key.writer if segment is not None else None
        is_left = writer == DAEMON and last_writer != DAEMON
        self.sealed[place], self.nobodys[place] = writer == SEALED or is_left, writer == NOBODY

    def find(self, extents: StructArray) -> Ids:
        """Page ids by (segment, slot); -1 if no such segment is in use or the slot is beyond it."""
        if self._table is None:
            used = sorted((s.id, s.first, s.pages) for s in self._segments if s is not None)
            self._table = np.asarray([*used, (1 << 32, -1, 0)], np.int64).T
        ids, first, pages = self._table
        at = np.searchsorted(ids, extents["segment"])
        slots = extents["slot"].astype(np.int64)
        known = (ids[at] == extents["segment"]) & (slots < pages[at])
        return np.where(known, first[at] + slots, -1)
