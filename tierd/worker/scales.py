"""Scales of e4m3 pages: factors of stored keys and values.

Each kv head of each layer has one for its keys and one for its values. They depend on the weights
alone, so all workers of a model have the same scales without a shared calibration. The greatest
possible key and value fit. Each is a power of two: it adds no rounding, and another summation order
gives the same scale. Their `text` tells scales apart and is part of the namespace. Bytes are in
`tierd.kernels.e4m3`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError
from tierd.kernels.e4m3 import E4M3, E4M3_MOST


@dataclass(frozen=True, eq=False, slots=True)
class Scales:
    """values: float32 [layers, 2, kv_heads], of keys, then of values."""

    values: NDArray[np.float32]

    @property
    def text(self) -> str:
        """Equal for equal scales."""
        return "scales " + hashlib.sha256(self.values.astype("<f4").tobytes()).hexdigest()


def check_scales(geometry: KVGeometry, scales: Scales | None) -> None:
    """Raises ConfigError if pages of e4m3 have no scales or another model's, or other pages have some."""
    wanted = [geometry.layers, 2, geometry.kv_heads] if geometry.dtype == E4M3 else None
    found = None if scales is None else list(scales.values.shape)
    if found != wanted:
        raise ConfigError(
            f"kv dtype: pages of {geometry.dtype!r} with scales of shape {found}, they take {wanted}; make them with page_shape(model, kv_dtype=...)"
        )


def scales_for(bounds: NDArray[np.float32]) -> Scales:
    """The least powers of two that fit values as great as these; 1 for no finite bound or no values."""
    fraction, exponent = np.frexp(bounds.astype(np.float64) / E4M3_MOST)
    return Scales(np.exp2(np.where(fraction == 0.5, exponent - 1, exponent)).astype(np.float32))
