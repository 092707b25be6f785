"""Blocks of any codec: those that need a calibration get one of random samples for their geometry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from tierd.codecs import block
from tierd.codecs.block import Codec, Context, Decoded
from tierd.codecs.calibration import Calibration, Samples
from tierd.codecs.fit import make
from tierd.codecs.values import Bytes, KVShape
from tierd.core.formats.block import KVGeometry

TOKENS = 128
POSITION = 1000
_MADE: dict[bytes, Calibration] = {}


def samples(geometry: KVGeometry, *, with_gradients: bool = True, seed: int = 0) -> Samples:
    """Normal values whose channels have unequal scales and means, with gradients or their stand-ins."""
    chance = np.random.default_rng(seed)
    g = geometry
    shape = (g.layers, 2, TOKENS, g.kv_heads, g.head_dim)

    def normal(*sizes: int) -> np.ndarray:
        return chance.standard_normal(sizes, dtype=np.float32)

    scales, means = np.exp(normal(g.layers, 2, 1, g.kv_heads, g.head_dim)), 3 * normal(g.layers, 2, 1, 1, g.head_dim)
    values = normal(*shape) * scales + means
    frequencies = 10.0 ** -np.linspace(0, 4, g.head_dim // 2)
    if with_gradients:
        return Samples(
            geometry, frequencies, values, gradients=normal(*shape) * np.exp(normal(*shape[:2], 1, *shape[3:]))
        )
    queries, outputs = (
        normal(g.layers, 64, 2 * g.kv_heads, g.head_dim),
        normal(g.layers, 32, 2 * g.kv_heads * g.head_dim),
    )
    return Samples(geometry, frequencies, values, queries=queries, outputs=outputs)


def calibration_for(shape: KVShape) -> Calibration:
    """One calibration per number of layers, heads and channels."""
    g = shape.geometry
    found = _made(g.layers, g.kv_heads, g.head_dim)
    _MADE[found.hash] = found
    return found


@cache
def _made(layers: int, kv_heads: int, head_dim: int) -> Calibration:
    return make(samples(KVGeometry(layers, kv_heads, head_dim, "bfloat16")))


def encode(codec: Codec, data: Any, shape: KVShape, context: Context | None = None, out: Bytes | None = None) -> Bytes:
    """block.encode, with a calibration where the codec needs one."""
    if context is None:
        context = Context(POSITION, calibration_for(shape)) if codec.is_calibrated else Context()
    return block.encode(codec, data, shape, context, out)


def decode(data: Any, codecs: Mapping[int, Codec], out: Bytes | None = None) -> Decoded:
    """block.decode with all calibrations that `encode` used."""
    return block.decode(data, codecs, _MADE, out=out)
