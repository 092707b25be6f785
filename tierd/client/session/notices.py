"""The client's notices to the daemon: messages that it should read soon, without being woken.

They report leases that end soon after a call, and gets and lookups made without a call
(one_sided_get.py). The daemon's side is tierd/server/session/notice_polling.py. Nothing here waits.
If a notice cannot be sent in time, the caller learns so and uses another way. After UNASKED_LIMIT
gets, or NOTICE_S, the client calls the daemon again.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

NOTICE_S = 1.0
"""Notices are sent for this long after the last answered call began; the daemon polls longer."""
IDS_PER_MESSAGE = 200
UNASKED_LIMIT = 32
"""Maximum gets and lookups without a call before the next call."""
MESSAGE_MAX_BYTES = 20 << 10
"""The daemon reads this much: the names of 512 blocks, and the other fields of a Group."""
_USED, _LOOKED_UP = struct.pack("<Q", 0), struct.pack("<Q", (1 << 64) - 1)
REPORT_MAX_BYTES = MESSAGE_MAX_BYTES - len(_USED)
"""Maximum bytes of a Group in a notice."""


class Notices:
    """accepts_reports: whether the daemon reads notices of gets made without a call."""

    def __init__(self, *, accepts_reports: bool) -> None:
        self.socket: socket.socket | None = None
        """The daemon's socket for notices; it comes with the first line, if the daemon supports it."""
        self._accepts_reports = accepts_reports
        self._answered_s = -NOTICE_S
        self._unasked = 0

    def note_answered(self, asked_s: float) -> None:
        """Notes that a call was answered. asked_s: time.monotonic() at its start. The daemon polls
        the notices for a while after its answer."""
        self._answered_s, self._unasked = max(self._answered_s, asked_s), 0

    def post(self, leases: Sequence[int]) -> bool:
        """Sends ended leases; True if they were sent while the daemon still polls. A late notice
        may be sent again another way, because a lease ends only once."""
        if self._is_late or len(leases) > IDS_PER_MESSAGE:
            return False
        return self._took(struct.pack(f"<{len(leases)}Q", *leases)) and not self._is_late

    @property
    def takes_gets(self) -> bool:
        """Whether a get needs no call: the daemon has just answered one and will read a notice."""
        return self._accepts_reports and self._unasked < UNASKED_LIMIT and not self._is_late

    def report_hit(self, group: bytes, *, is_lookup: bool = False) -> bool:
        """Reports a get or lookup made without a call, by its Group. False: make a call instead."""
        message = (_LOOKED_UP if is_lookup else _USED) + group
        if not self.takes_gets or len(group) > REPORT_MAX_BYTES or not self._took(message):
            return False
        self._unasked += 1
        return True

    @property
    def _is_late(self) -> bool:
        return self.socket is None or time.monotonic() - self._answered_s > NOTICE_S

    def _took(self, message: bytes) -> bool:
        """False: the socket is full or closed."""
        try:
            return self.socket is not None and bool(self.socket.send(message, socket.MSG_NOSIGNAL))
        except OSError:
            return False
