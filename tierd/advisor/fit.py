"""Times as sums of known quantities with unknown, non-negative costs, learnt from samples.

Least squares of relative errors, where each sample weighs a little less with each later one
(recursive least squares with forgetting; Haykin, Adaptive Filter Theory, chapter 10). Costs below
zero mean nothing, so of the subsets of quantities the best without them is taken.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

LEAST_S = 1e-6
"""Shorter times count as this long: clocks are not finer."""
RIDGE = 1e-9
"""It keeps equations solvable whose samples are all alike."""


class Fit:
    """reluctance: per quantity, at most 4 of them: how reluctantly a cost is given to it, if samples
    that are all alike allow several. memory: weight of the samples before the latest."""

    def __init__(self, reluctance: tuple[float, ...], *, memory: float) -> None:
        size, self._memory, self._ridge = len(reluctance), memory, np.asarray(reluctance) + RIDGE
        self._moments, self._products = np.zeros((size, size)), np.zeros(size)
        self._costs: NDArray[np.float64] | None = None
        self.samples = 0

    def observe(self, quantities: tuple[float, ...], seconds: float) -> None:
        """One sample: so many of each quantity took so long."""
        x = np.asarray(quantities) / max(seconds, LEAST_S)  # the target is 1: errors are relative
        self._moments = self._memory * self._moments + np.outer(x, x)
        self._products = self._memory * self._products + x
        self._costs, self.samples = None, self.samples + 1

    @property
    def costs(self) -> NDArray[np.float64]:
        """Seconds of one of each quantity: float64 [size]; zeros before the first sample."""
        if self._costs is None:
            self._costs = self._solved()
        return self._costs

    def _solved(self) -> NDArray[np.float64]:
        size = len(self._products)
        best, least = np.zeros(size), 0.0
        for count in range(1, size + 1):
            for chosen in map(list, combinations(range(size), count)):
                moments = self._moments[np.ix_(chosen, chosen)]
                scale = np.sqrt(np.maximum(np.diag(moments), 1e-300))
                scaled = moments / np.outer(scale, scale) + np.diag(self._ridge[chosen])
                found = np.linalg.solve(scaled, self._products[chosen] / scale) / scale
                error = -float(self._products[chosen] @ found)  # less than with zeros by so much
                if (found >= 0).all() and error < least:
                    best, least = np.zeros(size), error
                    best[chosen] = found
        return best
