"""Times as sums of known quantities with unknown, non-negative costs, learnt from samples.

Least squares, where each sample weighs a little less with each later one (recursive least squares
with forgetting; Haykin, Adaptive Filter Theory, chapter 10). A sample weighs by its quantities at
usual costs, and not by its seconds. So one that took ten times as long moves the costs at once.
Costs below zero mean nothing, so of the subsets of quantities the best without them is taken.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

RIDGE = 1e-9
"""It keeps equations solvable whose samples are all alike."""


class Fit:
    """Non-negative costs of at most 4 quantities.

    Args:
        usual: Seconds that one of each quantity costs somewhere.
        reluctance: Of giving a cost to each, if samples that are all alike allow several.
        memory: Weight of the samples before the latest.
    """

    def __init__(self, usual: tuple[float, ...], reluctance: tuple[float, ...], *, memory: float) -> None:
        size, self._memory = len(usual), memory
        self._usual, self._ridge = np.asarray(usual), np.asarray(reluctance) + RIDGE
        self._moments, self._products = np.zeros((size, size)), np.zeros(size)
        self._costs, self._is_solved = np.zeros(size), True
        self.samples = 0

    def observe(self, quantities: tuple[float, ...], seconds: float) -> None:
        """One sample: so many of each quantity took so long."""
        x = np.asarray(quantities)
        weight = 1 / float(self._usual @ x) ** 2
        self._moments = self._memory * self._moments + np.outer(x, x) * weight
        self._products = self._memory * self._products + x * (seconds * weight)
        self._is_solved, self.samples = False, self.samples + 1

    @property
    def costs(self) -> NDArray[np.float64]:
        """Seconds of one of each quantity: float64 [size]; zeros before the first sample."""
        if not self._is_solved:
            self._costs, self._is_solved = self._solved(), True
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
