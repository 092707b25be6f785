"""Rotary position embedding, done and undone: keys as a model rotates them (arXiv 2104.09864).

Channel i of a head turns with channel i + n, n the number of frequencies, as Hugging Face's Llama
has it. Channels from 2 n on stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Floats

Frequencies = NDArray[np.float64]
"""Radians per position of each pair of channels: float64 [n], n at most head_dim / 2."""


class Turns(NamedTuple):
    """float32 [tokens, pairs of channels]."""

    cosine: Floats
    sine: Floats


def turns(tokens: int, position: int, frequencies: Frequencies) -> Turns:
    """Of the angles of so many positions."""
    angles = np.arange(position, position + tokens)[:, None] * frequencies
    return Turns(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def rotate(keys: Floats, position: int, frequencies: Frequencies, *, undo: bool = False) -> Floats:
    """Keys at their positions: float32 [..., tokens, heads, head_dim]. position: of the first token.
    undo: keys as they were before. Returns a copy."""
    cosine, sine = (each[:, None, :] for each in turns(keys.shape[-3], position, frequencies))
    sine = -sine if undo else sine
    n = len(frequencies)
    turned = keys.copy()
    first, second = keys[..., :n], keys[..., n : 2 * n]
    turned[..., :n] = first * cosine - second * sine
    turned[..., n : 2 * n] = second * cosine + first * sine
    return turned
