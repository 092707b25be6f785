"""Turns at a disk: the number of calls at one time, separate for reads and writes.

A client waits for nearly every read, and for few writes. With one queue a read would follow all
waiting writes, of which demotion has 64 MiB. So neither kind waits for the other's turns. While
there are reads, writes have half as many turns.

There are never more than `most` calls of a kind. Calls of a kind get turns in order of arrival. The
presence of reads is measured by calls, not by a clock.
"""

from __future__ import annotations

import threading
from collections import deque

from tierd.tiers.io.calls import KINDS, Kind

ALONE = 64
"""After this many writes since the last read, writes count as alone: tens of milliseconds."""


class Turns:
    """most: calls of each kind at one time. Used by threads."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self.taken = dict.fromkeys(KINDS, 0)
        self.waiting: dict[Kind, deque[threading.Lock]] = {kind: deque() for kind in KINDS}
        """A lock for each waiter, released when it gets its turn."""
        self._since_read = ALONE

    def take(self, kind: Kind, *, timeout_s: float) -> bool:
        """Wait for a turn; False if none came in time."""
        with self._lock:
            self._note(kind)
            if self._is_free(kind):  # then none waits
                self._begin(kind)
                return True
            mine = threading.Lock()
            mine.acquire()
            self.waiting[kind].append(mine)
        if mine.acquire(timeout=timeout_s):
            return True
        with self._lock:
            is_late = mine in self.waiting[kind]  # else it came at the last moment
            if is_late:
                self.waiting[kind].remove(mine)
            return not is_late

    def give(self, kind: Kind) -> None:
        """The call has returned."""
        with self._lock:
            self.taken[kind] -= 1
            self._note(kind)
            while self.waiting[kind] and self._is_free(kind):
                self._begin(kind)
                self.waiting[kind].popleft().release()

    def _note(self, kind: Kind) -> None:
        """Note a read: reads count as present until ALONE writes have followed."""
        if kind == "read":
            self._since_read = 0

    def _begin(self, kind: Kind) -> None:
        self.taken[kind] += 1
        self._since_read += kind == "write"

    def _is_free(self, kind: Kind) -> bool:
        is_beside = kind == "write" and (self._since_read < ALONE or self.taken["read"])
        return self.taken[kind] < (max(1, self.most // 2) if is_beside else self.most)
