"""Arithmetic on keys: their attention weights from log-sum-exps, bounds of pages, rotation."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.reference import summarize_pages

Floats = NDArray[np.floating]

PARTS = 2
"""Parts of a page with bounds of their own: rotated keys of fewer tokens are closer together."""


def key_weights(q: Floats, k: Floats, lse: Floats) -> Floats:
    """The weight of each key, [kv_heads, slots], summed over queries and the query heads of a group.

    q: [rows, q_heads, head_dim], of the last rows of the slots. k: [slots, kv_heads, head_dim].
    lse: natural log-sum-exps [rows, q_heads] of attention over these keys.
    """
    rows, q_heads, dim = q.shape
    slots, heads, _ = k.shape
    group = q_heads // heads
    queries = q.reshape(rows, heads, group, dim).transpose(1, 0, 2, 3).reshape(heads, rows * group, dim)
    scores = scaled(queries) @ k.transpose(1, 2, 0)
    scores -= lse.reshape(rows, heads, group).transpose(1, 0, 2).reshape(heads, rows * group, 1)
    weights = np.exp(scores).reshape(heads, rows, group, slots)
    if rows > 1:
        is_hidden = np.arange(slots) > np.arange(slots - rows, slots)[:, None]
        weights[:, is_hidden.nonzero()[0], :, is_hidden.nonzero()[1]] = 0
    total: Floats = weights.sum(axis=(1, 2))
    return total


def scaled(q: Floats) -> Floats:
    """Queries [..., head_dim] divided by the root of head_dim, as attention scores them."""
    result: Floats = q / np.float32(math.sqrt(q.shape[-1]))
    return result


def bounds_of(keys: Floats) -> NDArray[np.float32]:
    """The least and greatest keys in each part of a page: float32 [PARTS, kv_heads, 2, head_dim].

    keys: [tokens, kv_heads, head_dim] of the page.
    """
    parts = np.array_split(keys, PARTS)
    return np.concatenate([summarize_pages(part[None], [0], [len(part)]) for part in parts])


def turned(keys: Floats, by: int, frequencies: NDArray[np.float32]) -> Floats:
    """Rotated keys [tokens, kv_heads, head_dim], moved by so many positions.

    frequencies: radians per position, float32 [head_dim / 2].
    """
    angles = by * frequencies.astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = np.split(keys.astype(np.float32), 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
