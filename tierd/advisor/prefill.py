"""How long an engine takes to compute tokens, learnt from its steps.

A step has a constant cost, one for each token, and one for each pair of a token and an earlier one.
The batch of a step holds tokens of several requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tierd.advisor.fit import Fit

USUAL_S = (2e-3, 3e-5, 6e-10)
"""Of a step, a token and a pair: an 8B model on an H100."""
MEMORY = 0.98
KNOWN = 8
"""Steps until the estimate is used."""


def pairs(start: float | NDArray[np.float64], tokens: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """Pairs of a token and an earlier one, of `tokens` tokens after `start` others."""
    return tokens * (start + tokens / 2)


class Prefill:
    """The cost of one engine's steps."""

    def __init__(self) -> None:
        self._fit = Fit(USUAL_S, (0.02, 0.0, 0.001), memory=MEMORY)
        self._most = 1

    def observe(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step of `seconds`. parts: (start, tokens) of each request: so many tokens after `start`
        others were computed."""
        tokens = seen = 0.0
        for start, count in parts:
            tokens, seen = tokens + count, seen + float(pairs(start, count))
        if tokens > 0 and seconds > 0:
            self._most = max(self._most, int(tokens))
            self._fit.observe((1.0, tokens, seen), seconds)

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps to predict."""
        return self._fit.samples >= KNOWN

    def seconds(self, start: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predicted seconds to compute `tokens` tokens after `start` others, in steps as large as
        the largest seen: float64 [n]."""
        base, each, pair = self._fit.costs
        steps = np.ceil(tokens / self._most)
        found: NDArray[np.float64] = base * steps + each * tokens + pair * np.asarray(pairs(start, tokens))
        return found
