"""The daemon's clock: real time, or a trace's own.

The core takes "now" as an argument; the daemon gets it here, in seconds that never go back. The
wall clock may jump. It only dates commits and decides nothing else. Deadlines of calls are in the
event loop's time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of "now"."""

    is_replay: bool

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def advance(self, now: float) -> None:
        """A caller's own time; a real clock ignores it."""
        ...

    def wall_ms(self) -> int:
        """Unix time, milliseconds."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: unmoved by changes of the wall clock."""

    is_replay = False

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()

    def advance(self, now: float) -> None:
        """Ignored."""

    def wall_ms(self) -> int:
        """The machine's wall clock."""
        return time.time_ns() // 1_000_000


class ReplayClock:
    """Stands still between the times that calls carry; background work waits for Quiesce."""

    is_replay = True

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The latest time that a call carried."""
        return self._now

    def advance(self, now: float) -> None:
        """Moves forward, never back."""
        self._now = max(self._now, now)

    def wall_ms(self) -> int:
        """The machine's wall clock."""
        return time.time_ns() // 1_000_000
