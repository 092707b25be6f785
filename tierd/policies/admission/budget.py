"""A wear budget as a token bucket: bytes that may be written, refilled evenly, saved up to a burst.

Purpose: how much may be written now. Non-purpose: what. Invariants: over any span of time what was spent within the level is at most the burst plus
rate x time; the level starts at nothing, so a daemon that is started over and over writes no more either. Only durable
writes, which nobody may refuse, take the level below zero, and are paid off first.
"""

from __future__ import annotations

import math

import numpy as np

from tierd.core.admission import Balance, Sizes
from tierd.core.eviction import Mask
from tierd.core.plan import Ids


class Budget:
    """rate_bytes_per_s 0.0: no budget, and everything is within it. burst_s: for so long an unused refill is saved."""

    def __init__(self, rate_bytes_per_s: float, *, burst_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.burst_s = burst_s
        self._burst_bytes = rate_bytes_per_s * burst_s
        self._level_bytes = 0.0
        self._at: float | None = None

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.rate_bytes_per_s > 0

    def level(self, now: float) -> float:
        """Bytes that may be written at once; infinite without a budget."""
        return self.balance(now).level_bytes if self else math.inf

    def advance(self, now: float) -> None:
        """Time has come to `now`; the first time that is told begins the refill."""
        self._level_bytes = self.balance(now).level_bytes
        self._at = now

    def afforded(self, order: Ids, sizes_bytes: Sizes, now: float) -> Mask:
        """Which of the blocks can be paid for, as far as the level reaches in this order (rows of sizes_bytes)."""
        chosen = np.zeros(len(sizes_bytes), bool)
        self.allow(sizes_bytes[order])
        self.advance(now)
        within = np.cumsum(sizes_bytes[order]) <= self.level(now)
        chosen[order[within]] = True
        return chosen

    def allow(self, sizes_bytes: Sizes) -> None:
        """Blocks of these sizes are asked about: a burst below one block would keep that block out for ever."""
        if len(sizes_bytes) and self:
            self._burst_bytes = max(self._burst_bytes, float(sizes_bytes.max()))

    def spend(self, size_bytes: int, now: float) -> None:
        """So much is written."""
        self.advance(now)
        self._level_bytes -= size_bytes if self else 0

    def balance(self, now: float) -> Balance:
        """As it stands."""
        gone_s = 0.0 if self._at is None else max(0.0, now - self._at)
        level = min(self._burst_bytes, self._level_bytes + gone_s * self.rate_bytes_per_s)
        return Balance(self.rate_bytes_per_s, self._burst_bytes, level)

    def resume(self, level_bytes: float, now: float) -> None:
        """It stood so in a former life; what that one had saved beyond the burst of this one is lost."""
        if self:
            self._level_bytes = min(level_bytes, self._burst_bytes)
        self._at = now
