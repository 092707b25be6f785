"""One log line a minute for what best_effort swallows.

Purpose: an operator learns that something fails, and a worker's log is not flooded. Non-purpose: metrics.
"""

from __future__ import annotations

import logging
import time

from tierd.errors import TierdError

log = logging.getLogger("tierd.client")

INTERVAL_S = 60.0


class Complaints:
    """Failures of one client."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._next = 0.0
        self._unsaid = 0

    def note(self, error: TierdError) -> None:
        """Logs the error if the last line is a minute old, with how many were not said since."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        rest = f" ({self._unsaid} more since the last line)" if self._unsaid else ""
        log.warning("tierd at %s: %s: %s%s; served as misses", self._target, type(error).__name__, error, rest)
        self._next, self._unsaid = now + INTERVAL_S, 0
