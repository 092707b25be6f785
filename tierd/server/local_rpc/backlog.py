"""Limits the bytes that all lines keep in memory: incomplete messages and unread answers.

One limit holds for the daemon, for any number of lines and sessions. At the limit, the line that
has kept bytes longest is ended: the slowest one. A message that arrives and is read at once ends
none. Time limits are in line.py and calls.py.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

BACKLOG_BYTES = 256 << 20
NOTED_BYTES = 16 << 10
"""A line that keeps less is not counted."""


class Backlog:
    """The bytes kept by all lines. limit_bytes: their total limit."""

    def __init__(self, *, limit_bytes: int = BACKLOG_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes: dict[Callable[[], None], int] = {}  # in the order in which they began
        self._total = 0

    def note(self, end: Callable[[], None], size: int) -> None:
        """Records a line's kept bytes. end: ends the line, always the same object; called if it
        keeps too much."""
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
            log.warning(
                "local RPC cut off",
                reason=f"unsent answers are above {self._limit} bytes, the oldest are this client's",
            )
            oldest()
