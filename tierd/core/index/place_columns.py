"""What is asked about the places of a tier at every small step, ready as columns: there may be 20,000, and to go through them takes milliseconds.

Purpose: who may write to a place, and where a segment lies. Non-purpose: keeping segments (pages.py), which tells of each that begins, ends or changes hands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.formats.model import DAEMON, NOBODY, SEALED, StructArray
from tierd.core.index.segment import Segment
from tierd.core.plan import Bools, Ids


class PlaceColumns:
    """sealed, nobodys: bool by place, and False at -1, the place of pages that have none."""

    def __init__(self, segments: Sequence[Segment | None]) -> None:
        """segments: by place, which the caller changes."""
        self._segments = segments
        self.sealed: Bools = np.zeros(len(segments) + 1, np.bool_)
        """No client can write there: none ever could, or the one that could has gone in this life of the daemon."""
        self.nobodys: Bools = np.zeros(len(segments) + 1, np.bool_)
        """Who else holds pages there is not known."""
        self._table: Ids | None = None

    def note(self, place: int, last_writer: int) -> None:
        """A segment has begun or ended there, or has another writer. last_writer: the session that wrote there last, or DAEMON."""
        segment, self._table = self._segments[place], None
        writer = segment.key.writer if segment is not None else None
        is_left = writer == DAEMON and last_writer != DAEMON
        self.sealed[place], self.nobodys[place] = writer == SEALED or is_left, writer == NOBODY

    def find(self, extents: StructArray) -> Ids:
        """Page ids by (segment, slot); -1 where no such segment is in use or the slot is beyond it."""
        if self._table is None:
            used = sorted((s.id, s.first, s.pages) for s in self._segments if s is not None)
            self._table = np.asarray([*used, (1 << 32, -1, 0)], np.int64).T
        ids, first, pages = self._table
        at = np.searchsorted(ids, extents["segment"])
        slots = extents["slot"].astype(np.int64)
        known = (ids[at] == extents["segment"]) & (slots < pages[at])
        return np.where(known, first[at] + slots, -1)
