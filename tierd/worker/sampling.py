"""Picking the next token from logits.

Sampling is greedy or by temperature; there is no search. Equal logits, temperature and generator
state give an equal token, independent of the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pick_token(logits: NDArray[np.float32], *, temperature: float, rng: np.random.Generator) -> int:
    """float32 [vocab] -> a token id. temperature 0: the most likely, lowest id first, without rng."""
    if temperature <= 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    # One draw a token by the inverse of the cumulative sum: the vocabulary does not change a
    # stream.
    ladder = np.cumsum(weights)
    return int(min(np.searchsorted(ladder, rng.random() * ladder[-1], side="right"), len(ladder) - 1))
