"""Files of places, and who could ever map them.

Purpose: whether a place's file may serve its next life, though processes may still map it that nobody knows of: a fork outlives its parent with what that had
mapped. Non-purpose: the processes that are known (pages.py).
"""

from __future__ import annotations

from tierd.core.model import SEALED
from tierd.core.segment import Key


class Files:
    """Of one tier, by place."""

    def __init__(self, places: int) -> None:
        self._domains: list[set[int]] = [set() for _ in range(places)]
        self._lent: set[int] = set()

    def note(self, place: int, domain: int, *, is_writable: bool) -> None:
        """A client of the domain maps it."""
        self._domains[place].add(domain)
        if is_writable:
            self.note_writable(place)

    def note_writable(self, place: int) -> None:
        """A client can write to it, or could."""
        self._lent.add(place)

    def is_fit(self, place: int, key: Key) -> bool:
        """Whether nobody maps it who may not see the key's segment, or write to it where no client may."""
        return not self._domains[place] - {key.domain} and not (key.writer == SEALED and place in self._lent)

    def renew(self, place: int) -> None:
        """The place gets another file."""
        self._domains[place].clear()
        self._lent.discard(place)
