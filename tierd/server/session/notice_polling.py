"""Mailboxes: sockets over which clients give leases back and tell of gets that they made by themselves, and which wake nobody: they are read when their client calls anyway, when room is
wanted, and every now and then for a while after its last call.

    call is answered ──▶ client copies, and says so by the mailbox ──▶ its next call is answered, which reads that, or the next look does

Purpose: when they are read. Non-purpose: reading (notices.py), what a release is (cache). Invariants: what a client says within KEPT_S of a session's last answer is read within LOOK_S or
a little more; nobody is looked after who has not called for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.05
"""Between two looks."""
KEPT_S = 1.0
"""After a session's last answer its mailbox is looked into for so long, and once more: for as long as its client uses it (`MAILBOX_S` of tierd/client/session/notices.py), who counts from before the answer."""


class NoticePolling:
    """read: empties the mailbox of a session, if it has one."""

    def __init__(self, read: Callable[[int], None]) -> None:
        self._read = read
        self._answered: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, session: int) -> None:
        """A call of the session has been answered: what its client has said before is read, and is looked for later."""
        self._read(session)
        loop = asyncio.get_running_loop()
        self._answered[session] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def read_all(self) -> None:
        """Those in which something may be."""
        for session in list(self._answered):
            self._read(session)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()  # reading may take its time, in which more comes into those that were read first
        try:
            self.read_all()
        finally:
            self._answered = {session: at for session, at in self._answered.items() if begun - at < KEPT_S}
            self._timer = loop.call_later(LOOK_S, self._look) if self._answered else None
