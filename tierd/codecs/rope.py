"""Rotary position embedding, done and undone: keys as a model rotates them (arXiv 2104.09864).

Channel i of a head turns with channel i + n, n the number of frequencies, as Hugging Face's Llama
has it. Channels from 2 n on stay as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Floats

Frequencies = NDArray[np.float64]
"""Radians per position of each pair of channels: float64 [n], n at most head_dim / 2."""


def rotate(keys: Floats, position: int, frequencies: Frequencies, *, undo: bool = False) -> Floats:
    """Keys at their positions: float32 [..., tokens, heads, head_dim]. position: of the first token.
    undo: keys as they were before. Returns a copy."""
    angles = np.arange(position, position + keys.shape[-3])[:, None] * frequencies
    cosine = np.cos(angles).astype(np.float32)[:, None, :]
    sine = np.sin(-angles if undo else angles).astype(np.float32)[:, None, :]
    n = len(frequencies)
    turned = keys.copy()
    first, second = keys[..., :n], keys[..., n : 2 * n]
    turned[..., :n] = first * cosine - second * sine
    turned[..., n : 2 * n] = second * cosine + first * sine
    return turned
