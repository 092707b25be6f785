"""Releases that nobody waits for: made a moment later, so that the call which a client makes next is served before them.

Purpose: a put-off, no more. Non-purpose: what a release is (cache.py). Invariants: each is made within DELAY_S of the loop's time; who wants room that they may give has
them made at once, those that its client has sent and nobody has read yet with them; their order stays; one that fails is told, and keeps none of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

log = structlog.get_logger(__name__)

DELAY_S = 0.005
"""A few calls take less, and several releases at once take hardly more than one; that pages are pinned for so long longer is nobody's loss."""


class LateReleases:
    """give_back: makes releases of a session."""

    def __init__(self, give_back: Callable[[int, Sequence[int]], None]) -> None:
        self._give_back = give_back
        self._waiting: dict[int, list[int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.hear: Callable[[int | None], None] = lambda _session: None
        """Reads what clients have given back already, and what else one of them has said: releases come other ways than the calls that count on them."""

    def add(self, session: int, leases: Sequence[int]) -> None:
        """To be made soon."""
        self._waiting.setdefault(session, []).extend(leases)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._make)

    def make(self, *, asker: int | None = None) -> bool:
        """Makes them now; whether there were any. asker: a session that wants the room."""
        self.hear(asker)
        return self._make()

    def _make(self) -> bool:
        waiting, self._waiting = self._waiting, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for session, leases in waiting.items():
            try:
                self._give_back(session, leases)
            except Exception:  # no fault of who has them made, nor of the others
                log.exception("releases failed", session=session, count=len(leases))
        return bool(waiting)
