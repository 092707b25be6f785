"""The client's end of a session's mailbox: what the daemon is to hear soon, and need not be woken for.

Purpose: leases that end within a moment of a call, and gets and lookups that are made without one (one_sided_get.py).
Non-purpose: the daemon's end (tierd/server/session/notice_polling.py). Invariants: nothing here waits; what
cannot be said in time is told to the caller, who says it another way; after UNASKED_LIMIT gets, or MAILBOX_S, the daemon is called again.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

MAILBOX_S = 1.0
"""For so long after a call that was answered was asked the mailbox is used: the daemon looks into it for a little longer."""
IDS_PER_MESSAGE = 200
UNASKED_LIMIT = 32
"""Gets and lookups that are made without a call, at most, before the next one is."""
MESSAGE_MAX_BYTES = 20 << 10
"""The daemon reads so much of a message: the names of 512 blocks, and the other fields of a Group."""
_USED, _LOOKED_UP = struct.pack("<Q", 0), struct.pack("<Q", (1 << 64) - 1)
TOLD_MAX_BYTES = MESSAGE_MAX_BYTES - len(_USED)
"""Of a Group that can be told."""


class Notices:
    """is_told_of_gets: whether the daemon hears here of gets that are made without a call."""

    def __init__(self, *, is_told_of_gets: bool) -> None:
        self.socket: socket.socket | None = None
        """Of the daemon, which gives it with the first line, if it can."""
        self._is_told_of_gets = is_told_of_gets
        self._answered_s = -MAILBOX_S
        self._unasked = 0

    def note_answered(self, asked_s: float) -> None:
        """A call that was asked then, of time.monotonic(), has been answered, by a daemon that looks into the mailbox for a while from its answer on."""
        self._answered_s, self._unasked = max(self._answered_s, asked_s), 0

    def post(self, leases: Sequence[int]) -> bool:
        """Whether they are in the mailbox, and came there before the daemon's last look. What comes late may be told twice: a lease ends once."""
        if self._is_late or len(leases) > IDS_PER_MESSAGE:
            return False
        return self._took(struct.pack(f"<{len(leases)}Q", *leases)) and not self._is_late

    @property
    def takes_gets(self) -> bool:
        """Whether a get may be made without a call: the daemon has answered one a moment ago, and is about to read what it is told."""
        return self._is_told_of_gets and self._unasked < UNASKED_LIMIT and not self._is_late

    def tell_used(self, group: bytes, *, is_lookup: bool = False) -> bool:
        """Tells of a get, or a lookup, that was made without a call, of a Group, as a call says it. False where it
        cannot be told so: then call."""
        message = (_LOOKED_UP if is_lookup else _USED) + group
        if not self.takes_gets or len(group) > TOLD_MAX_BYTES or not self._took(message):
            return False
        self._unasked += 1
        return True

    @property
    def _is_late(self) -> bool:
        return self.socket is None or time.monotonic() - self._answered_s > MAILBOX_S

    def _took(self, message: bytes) -> bool:
        """False: it is full, or closed."""
        try:
            return self.socket is not None and bool(self.socket.send(message, socket.MSG_NOSIGNAL))
        except OSError:
            return False
