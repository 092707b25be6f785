"""What lines keep in memory of messages that are not whole yet, and of answers that nobody takes: one bound for the daemon.

Purpose: so many bytes, whoever many lines and sessions there are. Non-purpose: how long either may take (line.py, calls.py). Invariants: at the bound the line
that has kept something longest is ended, which is who is slowest; a message that comes at once, and is taken at once, ends nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

BACKLOG_BYTES = 256 << 20
NOTED_BYTES = 16 << 10
"""A line that keeps less is not counted."""


class Backlog:
    """Of all lines. limit_bytes: what they may keep together."""

    def __init__(self, *, limit_bytes: int = BACKLOG_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes: dict[Callable[[], None], int] = {}  # who began first comes first
        self._total = 0

    def note(self, end: Callable[[], None], size: int) -> None:
        """So much a line keeps now. end: of the line, always the same; called where it keeps too much."""
        before = self._bytes.get(end, 0)
        if size > NOTED_BYTES:
            self._bytes[end] = size
            self._total += size - before
        elif before:
            del self._bytes[end]
            self._total -= before
        while self._total > self._limit:
            oldest = next(iter(self._bytes))
            self._total -= self._bytes.pop(oldest)
            log.warning("line ended", reason=f"lines keep more than {self._limit} bytes, this one for longest")
            oldest()
