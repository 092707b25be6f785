"""Times as sums of known quantities with unknown, non-negative costs, learnt from samples.

Least squares, where each sample weighs a little less with each later one (recursive least squares
with forgetting; Haykin, Adaptive Filter Theory, chapter 10). A sample weighs by its quantities at
usual costs, and not by its seconds. So one that took ten times as long moves the costs at once.
Costs below zero mean nothing, so of the subsets of quantities the best without them is taken.
"""

from __future__ import annotations

import math
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
        moments, products, ridge = self._moments.tolist(), self._products.tolist(), self._ridge.tolist()
        best, least = np.zeros(size), 0.0
        for count in range(1, size + 1):
            for chosen in combinations(range(size), count):
                scale = [math.sqrt(max(moments[i][i], 1e-300)) for i in chosen]
                rows = [
                    [
                        moments[i][j] / (a * b) + (ridge[i] if i == j else 0.0)
                        for j, b in zip(chosen, scale, strict=True)
                    ]
                    + [products[i] / a]
                    for i, a in zip(chosen, scale, strict=True)
                ]
                found = [x / a for x, a in zip(_solution(rows), scale, strict=True)]
                error = -sum(products[i] * x for i, x in zip(chosen, found, strict=True))  # below that of zeros
                if min(found) >= 0 and error < least:
                    best, least = np.zeros(size), error
                    best[list(chosen)] = found
        return best


def _solution(rows: list[list[float]]) -> list[float]:
    """Solves equations of a positive definite matrix by elimination, in place. rows: of the matrix,
    with the right side as the last column. For so few equations it is ten times as fast as LAPACK."""
    size = len(rows)
    for at, pivot in enumerate(rows):
        for row in rows[at + 1 :]:
            share = row[at] / pivot[at]
            for i in range(at, size + 1):
                row[i] -= share * pivot[i]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][i] * found[i] for i in range(at + 1, size))
        found[at] = (rows[at][size] - rest) / rows[at][at]
    return found
