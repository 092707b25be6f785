"""H2O: heavy hitters and recent tokens, half and half (arXiv 2306.14048, algorithm 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import EVERY, ScoringPolicy, top


class H2O(ScoringPolicy):
    """Keeps the last half of the budget, and of the others those that got most attention so far."""

    queries = EVERY
    notes_decoding = True
    least = 2

    def keep(self, held: int, seen: int) -> NDArray[np.int64] | None:
        """Slots to keep; a dropped token never comes back."""
        count = self.budget.of(seen, prompt=self.place.prompt, least=self.least)
        if held <= count:
            return None
        self._extend(held)
        return self._kept(top(self.scores[:, :held], count, last=count // 2))
