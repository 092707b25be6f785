"""Picking the next token from logits.

Purpose: greedy and temperature sampling. Non-purpose: search. Invariant: equal logits, temperature and generator state
give an equal token, whatever else runs in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pick_token(logits: NDArray[np.float32], *, temperature: float, rng: np.random.Generator) -> int:
    """float32 [vocab] -> a token id. temperature 0: the most likely, lowest id first; rng is then not used."""
    if temperature <= 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    # Inverse of the cumulative sum: one draw a token, so that a sequence's stream does not depend on the vocabulary.
    ladder = np.cumsum(weights)
    return int(min(np.searchsorted(ladder, rng.random() * ladder[-1], side="right"), len(ladder) - 1))
