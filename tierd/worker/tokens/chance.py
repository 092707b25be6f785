"""Random choices of the same size: a measured policy must be better than these."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import Budget, Place, ReadingPolicy, ScoringPolicy, top


class RandomTokens(ScoringPolicy):
    """Keeps random tokens. The draws depend on the layer alone."""

    def __init__(self, budget: Budget, place: Place) -> None:
        super().__init__(budget, place)
        self._rng = np.random.default_rng(place.layer)

    def keep(self, held: int, seen: int) -> NDArray[np.int64] | None:
        """Slots to keep: each token is drawn a score once."""
        count = self.budget.of(seen, prompt=self.place.prompt)
        if held <= count:
            return None
        known = self.scores.shape[1]
        self._extend(held)
        self.scores[:, known:] = self._rng.random((self.place.kv_heads, held - known))
        return self._kept(top(self.scores, count))


class RandomPages(ReadingPolicy):
    """Reads random pages, others for each query."""

    def __init__(self, budget: Budget, place: Place) -> None:
        super().__init__(budget, place)
        self._rng = np.random.default_rng(place.layer)

    def scores_of(self, q: NDArray[np.floating], bounds: NDArray[np.float32]) -> NDArray[np.floating]:
        """New draws [kv_heads, pages]."""
        return self._rng.random((self.place.kv_heads, len(bounds)))
