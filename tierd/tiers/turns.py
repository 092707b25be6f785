"""Turns at a disk: how many calls are there at one time, reads apart from writes.

Somebody waits for nearly every read, and for few of the writes. In one line a read would come behind all writes that wait, and at the disk behind those that are there already: demotion has 64 MiB of
them. So neither waits for the other's turns, and where there are reads too writes have half as many.

Purpose: `Turns`. Non-purpose: threads (lanes.py). Invariants: there are never more than `most` calls of a kind; whether there are reads goes by calls and not by a clock, so that a simulation has it
as the daemon does.
"""

from __future__ import annotations

import threading

from tierd.tiers.calls import KINDS, Kind

ALONE = 64
"""So many writes after the last read writes count as alone: tens of milliseconds."""


class Turns:
    """most: calls of each kind at one time. Used by threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        lock = threading.Lock()
        self._free = {kind: threading.Condition(lock) for kind in KINDS}
        self.taken = dict.fromkeys(KINDS, 0)
        self._since_read = ALONE

    def take(self, kind: Kind, *, timeout_s: float) -> bool:
        """Waits for a turn; False: there was none in time."""
        with self._free[kind]:
            self._note(kind)
            if not self._free[kind].wait_for(lambda: self._is_free(kind), timeout_s):
                return False
            self.taken[kind] += 1
            self._since_read += kind == "write"
            if self._is_free(kind):  # writes that are alone again have more turns than come back
                self._free[kind].notify()
            return True

    def give(self, kind: Kind) -> None:
        """The call has come back."""
        with self._free[kind]:
            self.taken[kind] -= 1
            self._note(kind)
            self._free[kind].notify()

    def _note(self, kind: Kind) -> None:
        """There are reads until so many writes after the last."""
        if kind == "read":
            self._since_read = 0

    def _is_free(self, kind: Kind) -> bool:
        is_beside = kind == "write" and (self._since_read < ALONE or self.taken["read"])
        return self.taken[kind] < (max(1, self._most // 2) if is_beside else self._most)
