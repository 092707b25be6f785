"""SnapKV: the prompt's tokens that its last queries attend to (arXiv 2404.14469, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.worker.tokens.policy import ScoringPolicy, top

WINDOW = 64
"""Last queries of the prompt that vote, and tokens that are always kept."""
KERNEL = 5
"""Neighbours that a score is averaged over."""


class SnapKV(ScoringPolicy):
    """Drops tokens of the prompt once; all decoded tokens stay.

    A budget below twice the window keeps a window of half the budget.
    """

    queries = WINDOW
    least = 2

    def keep(self, held: int, seen: int) -> NDArray[np.int64] | None:
        """Slots to keep, at the end of the prompt."""
        count = self.budget.of(self.place.prompt, prompt=self.place.prompt, least=self.least)
        if held <= count or seen != self.place.prompt:
            return None
        window = min(WINDOW, count // 2)
        self._extend(held)
        before = pooled(self.scores[:, : held - window])
        return self._kept(top(np.pad(before, ((0, 0), (0, window))), count, last=window))


def pooled(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """The mean of each KERNEL neighbours along the rows of [rows, n]; 0 beyond their ends."""
    half = KERNEL // 2
    wide = np.pad(scores, ((0, 0), (half, half)))
    mean: NDArray[np.floating] = np.lib.stride_tricks.sliding_window_view(wide, KERNEL, axis=1).mean(axis=2)
    return mean
