"""Fits the tables of the codecs kvquant-4, kvquant-3 and kvquant-2 (KVQuant, arXiv 2401.18079)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.calibration import Samples, Tensors
from tierd.codecs.kvquant import BITS, OUTLIERS, limits_of_keys, limits_of_tokens, scaled

ROUNDS = 50
"""Of k-means."""


def fit(samples: Samples) -> Tensors:
    """Limits of key channels, and tables of edges and levels for each of BITS.

    kvquant.limits: float32 [layers, 2, channels], middles and half widths. They are of keys
    before RoPE. kvquant.edges4: float32 [layers, 2, 15], between neighbouring levels.
    kvquant.levels4: float32 [layers, 2, 16]. Sensitivity is the squared gradient (section 3.3).
    """
    layers, _, tokens, heads, dim = samples.values.shape
    flat = samples.values.reshape(layers, 2, tokens, heads * dim)
    weights = None if samples.gradients is None else np.square(samples.gradients.reshape(flat.shape))
    ends = np.quantile(flat[:, 0], (OUTLIERS / 2, 1 - OUTLIERS / 2), axis=1)
    low, high = ends[:, :, None]
    limits = np.concatenate(((low + high) / 2, (high - low) / 2), axis=1).astype(np.float32)
    tensors = {"kvquant.limits": limits}
    for bits in BITS:
        tensors[f"kvquant.edges{bits}"] = np.empty((layers, 2, (1 << bits) - 1), np.float32)
        tensors[f"kvquant.levels{bits}"] = np.empty((layers, 2, 1 << bits), np.float32)
    keys, values = limits_of_keys(limits), limits_of_tokens(flat[:, 1])
    for pair, each in enumerate((keys, values)):
        z = scaled(flat[:, pair], each)
        inside = (flat[:, pair] >= each.lows) & (flat[:, pair] <= each.highs)
        for layer in range(layers):
            own = np.ones(inside[layer].sum()) if weights is None else weights[layer, pair][inside[layer]]
            for bits, table in _tables(z[layer][inside[layer]].astype(np.float64), own.astype(np.float64)):
                tensors[f"kvquant.edges{bits}"][layer, pair] = table.edges
                tensors[f"kvquant.levels{bits}"][layer, pair] = table.levels
    return tensors


class _Table(NamedTuple):
    edges: NDArray[np.float64]
    levels: NDArray[np.float64]


def _tables(z: NDArray[np.float64], weights: NDArray[np.float64]) -> Iterator[tuple[int, _Table]]:
    """Weighted k-means of one dimension, for each of BITS. Then levels get the mean and the deviation
    of z (Q-Norm, section 3.5). The paper has this at 2 bits alone. Else keys would shrink."""
    order = np.argsort(z, kind="stable")
    z, weights = z[order], weights[order] + weights.mean() * 1e-9 + 1e-300
    mass, moment = (np.concatenate(([0.0], np.cumsum(each))) for each in (weights, weights * z))
    for bits in BITS:
        quantiles = (np.arange(1 << bits) + 0.5) / (1 << bits) * mass[-1]
        levels = z[np.searchsorted(mass[1:], quantiles).clip(0, len(z) - 1)]
        for _ in range(ROUNDS):
            ends = np.concatenate(([0], np.searchsorted(z, (levels[1:] + levels[:-1]) / 2), [len(z)]))
            inside = np.diff(mass[ends])
            means = np.diff(moment[ends]) / np.where(inside > 0, inside, 1.0)
            levels = np.sort(np.where(inside > 0, means, levels))
        edges = (levels[1:] + levels[:-1]) / 2
        near = levels[np.searchsorted(edges, z)]
        yield bits, _Table(edges, (levels - near.mean()) * (z.std() / max(near.std(), 1e-30)) + z.mean())
