"""A wear budget as a token bucket: bytes that may be written, refilled evenly, saved up to a burst.

It bounds how much is written, not what. Over any span of time, the bytes spent within the level are
at most the burst plus rate x time. The level starts at zero, so a daemon that restarts often writes
no more either. Durable writes, never refused, take the level below zero and are paid off first.
"""

from __future__ import annotations

import math

import numpy as np

from tierd.core.admission import Balance, Sizes
from tierd.core.eviction import Mask
from tierd.core.plan import Ids


class Budget:
    """rate_bytes_per_s 0.0: no budget. burst_s: how long an unused refill is saved."""

    def __init__(self, rate_bytes_per_s: float, *, burst_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.burst_s = burst_s
        self._burst_bytes = rate_bytes_per_s * burst_s
        self._level_bytes = 0.0
        self._at: float | None = None

    def __bool__(self) -> bool:
        """Whether there is a budget."""
        return self.rate_bytes_per_s > 0

    def level(self, now: float) -> float:
        """Bytes that may be written at once; infinite without a budget."""
        return self.balance(now).level_bytes if self else math.inf

    def advance(self, now: float) -> None:
        """Moves the time to `now`; the refill begins with the first call."""
        self._level_bytes = self.balance(now).level_bytes
        self._at = now

    def afforded(self, order: Ids, sizes_bytes: Sizes, now: float) -> Mask:
        """The blocks that the level pays for, in this order (rows of sizes_bytes)."""
        chosen = np.zeros(len(sizes_bytes), bool)
        self.allow(sizes_bytes[order])
        self.advance(now)
        within = np.cumsum(sizes_bytes[order]) <= self.level(now)
        chosen[order[within]] = True
        return chosen

    def allow(self, sizes_bytes: Sizes) -> None:
        """Raises the burst to the largest of these sizes: a smaller one never admits that block."""
        if len(sizes_bytes) and self:
            self._burst_bytes = max(self._burst_bytes, float(sizes_bytes.max()))

    def spend(self, size_bytes: int, now: float) -> None:
        """Takes the bytes of a write from the level."""
        self.advance(now)
        self._level_bytes -= size_bytes if self else 0

    def balance(self, now: float) -> Balance:
        """The budget's state at `now`."""
        gone_s = 0.0 if self._at is None else max(0.0, now - self._at)
        level = min(self._burst_bytes, self._level_bytes + gone_s * self.rate_bytes_per_s)
        return Balance(self.rate_bytes_per_s, self._burst_bytes, level)

    def resume(self, level_bytes: float, now: float) -> None:
        """Restores the level of a previous run, cut to this one's burst."""
        if self:
            self._level_bytes = min(level_bytes, self._burst_bytes)
        self._at = now
