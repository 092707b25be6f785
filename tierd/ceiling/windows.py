"""Rolling windows of numbers that add up, in buckets of a minute.

Memory is fixed: one row of numbers for each minute of the longest window.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]

BUCKET_S = 60.0
WINDOWS_S = (900.0, 3600.0, 86400.0)
"""The windows that operators see: 15 minutes, an hour, a day."""
_BUCKETS = int(WINDOWS_S[-1] / BUCKET_S)


class Windows:
    """See the module. The time never runs backwards."""

    def __init__(self, width: int, now: float) -> None:
        """width: numbers in a row."""
        self._sums, self._minutes = np.zeros((_BUCKETS, width)), np.full(_BUCKETS, -1, np.int64)
        self._began_s = now

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self._sums.nbytes + self._minutes.nbytes

    def add(self, numbers: Sums, now: float) -> None:
        """Adds a row, float64 [width], to the current minute."""
        minute = self._minute(now)
        at = minute % _BUCKETS
        if self._minutes[at] != minute:
            self._minutes[at], self._sums[at] = minute, 0.0
        self._sums[at] += numbers

    def sums(self, seconds: float, now: float) -> Sums:
        """The sums over the window that ends now, in whole minutes: float64 [width]."""
        first = self._minute(now) - int(seconds / BUCKET_S)
        total: Sums = self._sums[self._minutes > first].sum(axis=0)
        return total

    def covered_s(self, seconds: float, now: float) -> float:
        """How much of the window has been observed."""
        return min(seconds, max(0.0, now - self._began_s))

    def _minute(self, now: float) -> int:
        return int(max(0.0, now - self._began_s) / BUCKET_S)
