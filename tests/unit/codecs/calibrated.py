"""Calibrations of normal values for tests, made once per model."""

from __future__ import annotations

from functools import cache

import numpy as np

from tierd.codecs import kvquant_fit
from tierd.codecs.calibration import FREQUENCIES, Calibration, Samples
from tierd.core.formats.block import KVGeometry

TOKENS = 256
MADE: dict[bytes, Calibration] = {}
"""By hash, as `decode` takes them."""


def calibration_of(geometry: KVGeometry) -> Calibration:
    """For all blocks of this model: its dtype and layout do not matter."""
    made = _made(geometry.layers, geometry.kv_heads, geometry.head_dim)
    MADE[made.hash] = made
    return made


@cache
def _made(layers: int, heads: int, dim: int) -> Calibration:
    geometry = KVGeometry(layers, heads, dim, "bfloat16", "NHD")
    chance = np.random.default_rng(7)
    values = chance.standard_normal((layers, 2, TOKENS, heads, dim)).astype(np.float32)
    values[:, 0] += 2 * chance.standard_normal((layers, 1, heads, dim), np.float32)  # keys have means
    gradients = chance.standard_normal(values.shape, np.float32)
    frequencies = 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
    samples = Samples(geometry, frequencies, values, gradients)
    return Calibration(geometry, {FREQUENCIES: frequencies, **kvquant_fit.fit(samples)})
