"""Asides: sockets over which clients give leases back, and which wake nobody: they are read when their client calls anyway, when room is wanted, and a moment after its last call.

    call is answered ──▶ client copies, and gives back over the aside ──▶ its next call is answered, which reads that, or the next look does

Purpose: when they are read. Non-purpose: reading (session_socket.py), what a release is (cache). Invariants: what a client gives back within the time that it may take for that is read within two looks;
nobody is looked after who has not called since the last look but one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.05
"""Between two looks. More than twice the time after an answer within which clients give back by this way (`ASIDE_S` of tierd/client/session.py)."""


class Asides:
    """hear: reads the aside of a session, if it is there."""

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear
        self._answered: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, session: int) -> None:
        """A call of the session has been answered: what its client has said before is read, and is looked for later."""
        self._hear(session)
        loop = asyncio.get_running_loop()
        self._answered[session] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def hear(self) -> None:
        """Reads all that may have something."""
        for session in list(self._answered):
            self._hear(session)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self.hear()
        self._answered = {session: at for session, at in self._answered.items() if loop.time() - at < LOOK_S}
        self._timer = loop.call_later(LOOK_S, self._look) if self._answered else None
