"""Turns at a disk: how many calls are there at one time, reads apart from writes.

Somebody waits for nearly every read, and for few of the writes. In one line a read would come behind all writes that wait, and at the disk behind those that are there already: demotion has 64 MiB of
them. So neither waits for the other's turns, and where there are reads too writes have half as many.

Purpose: `Turns`. Non-purpose: threads (lanes.py). Invariants: there are never more than `most` calls of a kind; those of a kind have their turns in the order in which they came, so that none waits for
longer than what was before it takes; whether there are reads goes by calls and not by a clock.
"""

from __future__ import annotations

import threading
from collections import deque

from tierd.tiers.io.calls import KINDS, Kind

ALONE = 64
"""So many writes after the last read writes count as alone: tens of milliseconds."""


class Turns:
    """most: calls of each kind at one time. Used by threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.taken = dict.fromkeys(KINDS, 0)
        self.waiting: dict[Kind, deque[threading.Lock]] = {kind: deque() for kind in KINDS}
        """A lock for each who waits, which he is given with his turn."""
        self._since_read = ALONE

    def take(self, kind: Kind, *, timeout_s: float) -> bool:
        """Waits for a turn; False: there was none in time."""
        with self._lock:
            self._note(kind)
            if self._is_free(kind):  # then nobody waits
                self._begin(kind)
                return True
            mine = threading.Lock()
            mine.acquire()
            self.waiting[kind].append(mine)
        if mine.acquire(timeout=timeout_s):
            return True
        with self._lock:
            is_late = mine in self.waiting[kind]  # else it came in the last moment
            if is_late:
                self.waiting[kind].remove(mine)
            return not is_late

    def give(self, kind: Kind) -> None:
        """The call has come back."""
        with self._lock:
            self.taken[kind] -= 1
            self._note(kind)
            while self.waiting[kind] and self._is_free(kind):
                self._begin(kind)
                self.waiting[kind].popleft().release()

    def _note(self, kind: Kind) -> None:
        """There are reads until so many writes after the last."""
        if kind == "read":
            self._since_read = 0

    def _begin(self, kind: Kind) -> None:
        self.taken[kind] += 1
        self._since_read += kind == "write"

    def _is_free(self, kind: Kind) -> bool:
        is_beside = kind == "write" and (self._since_read < ALONE or self.taken["read"])
        return self.taken[kind] < (max(1, self._most // 2) if is_beside else self._most)
