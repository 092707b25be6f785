"""Decides when notices (releases and hit reports, which wake no process) are read.

    call answered ──▶ client copies, sends a notice ──▶ read at the next answer or the next look

The daemon reads them at a client's calls, when room is needed, and every LOOK_S for a while after a
session's last answer. A notice sent within KEPT_S of that answer is read within about LOOK_S.
Sessions idle for longer are not polled. notices.py reads them; the cache releases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.05
"""Time between two looks."""
KEPT_S = 1.0
"""How long notices are polled after a session's last answer; one more look follows.

Clients send them for as long (`NOTICE_S` of tierd/client/session/notices.py), measured from before
the answer."""


class NoticePolling:
    """read: processes the notices of a session, if it has a socket for them."""

    def __init__(self, read: Callable[[int], None]) -> None:
        self._read = read
        self._answered: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, session: int) -> None:
        """Reads the session's notices after an answered call, and polls it for a while."""
        self._read(session)
        loop = asyncio.get_running_loop()
        self._answered[session] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def read_all(self) -> None:
        """Reads the notices of all polled sessions."""
        for session in list(self._answered):
            self._read(session)

    def close(self) -> None:
        """Stops polling."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()  # taken first: notices may arrive while others are read
        try:
            self.read_all()
        finally:
            self._answered = {session: at for session, at in self._answered.items() if begun - at < KEPT_S}
            self._timer = loop.call_later(LOOK_S, self._look) if self._answered else None
