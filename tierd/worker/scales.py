"""Scales of e4m3 pages: by which stored keys and values are multiplied, one of each kv head's keys and one of its values in each layer.

Purpose: `Scales`, and `scales_for` what a model can give. Non-purpose: bytes (`tierd.kernels.e4m3`). Invariants: they are of the weights alone, so that all workers of a model have
the same without a calibration that they would have to share; the greatest key and value that any tokens can give fits; each is a power of two, so that it adds no rounding of its
own, and what libraries sum in another order comes to the same; who has others is told apart by `text`, which is part of the namespace.
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
    """Raises ConfigError where pages of e4m3 have none, or those of another model, or other pages have some."""
    wanted = [geometry.layers, 2, geometry.kv_heads] if geometry.dtype == E4M3 else None
    found = None if scales is None else list(scales.values.shape)
    if found != wanted:
        raise ConfigError(
            f"kv dtype: pages of {geometry.dtype!r} with scales of shape {found}, they take {wanted}; make them with page_shape(model, kv_dtype=...)"
        )


def scales_for(bounds: NDArray[np.float32]) -> Scales:
    """The least powers of two with which values as great as these fit; 1 where there is no finite bound, or nothing to store."""
    fraction, exponent = np.frexp(bounds.astype(np.float64) / E4M3_MOST)
    return Scales(np.exp2(np.where(fraction == 0.5, exponent - 1, exponent)).astype(np.float32))
