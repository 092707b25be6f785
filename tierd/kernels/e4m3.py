"""Pages of e4m3, a byte a value: encodes and decodes them, also in libraries without such a type.

Attention takes `ScaledPages` instead of pages of wider values. A value is the stored one times its
head's scale. Rounding is to the nearest, ties to even, as in the store kernel. Larger values become
the greatest, and NaN stays NaN. numpy has no such type: there pages are uint8. Format: Micikevicius
et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), E4M3 without infinities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

Array = Any
"""A numpy array or a torch tensor."""
E4M3 = "float8_e4m3fn"
"""Its name in torch and in safetensors."""
E4M3_MOST = 448.0
"""The greatest finite value."""
LEAST_NORMAL = 2.0**-6
STEPS = 512
"""Steps per 1 of values below the least normal one."""
NAN = 0x7F


@dataclass(frozen=True, slots=True)
class ScaledPages(Sequence[Array]):
    """Pages of e4m3 for `reference.paged_attention`: each is decoded when it is read.

    Kernels take the stored pages and the scales.
    stored: [2, page_tokens, kv_heads, head_dim] each; on a GPU or for kernels also several layers.
    scales: f32 [2, kv_heads] of keys and of values, or [layers, 2, kv_heads], in numpy.
    """

    stored: Sequence[Array]
    scales: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, page: Any) -> Array:
        return decoded(self.stored[page], self.scales[:, None, :])


def encoded(values: Array, scales: NDArray[np.float32]) -> Array:
    """Divides values [..., kv_heads, head_dim] by scales f32 [..., kv_heads] and encodes them.
    Returns uint8 in numpy, torch's own type in torch."""
    xp = array_namespace(values)
    divided = xp.astype(values, xp.float32) / xp.asarray(scales, device=device(values))[..., None]
    capped = xp.clip(divided, -E4M3_MOST, E4M3_MOST)
    return xp.astype(capped, getattr(xp, E4M3)) if hasattr(xp, E4M3) else _bytes_of(capped)


def decoded(stored: Array, scales: NDArray[np.float32]) -> Array:
    """The values, float32, of the output of `encoded`, or of an array of ml_dtypes."""
    xp = array_namespace(stored)
    values = xp.astype(stored, xp.float32) if hasattr(xp, E4M3) else VALUES[stored.view(np.uint8)]
    return values * xp.asarray(scales, device=device(stored))[..., None]


def _bytes_of(capped: NDArray[np.float32]) -> NDArray[np.uint8]:
    """For values within the greatest."""
    size = np.abs(capped)
    bits = size.view(np.uint32)
    # Of a float32 the upper 3 bits of the fraction stay; the exponent's bias is 7 instead of 127.
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3)
    small = np.rint(np.fmin(size, LEAST_NORMAL) * STEPS).astype(np.uint32)  # 8 is the least normal value
    code = np.where(np.isnan(size), NAN, np.where(size < LEAST_NORMAL, small, normal))
    return (code | np.where(np.signbit(capped), 0x80, 0)).astype(np.uint8)


def _values() -> NDArray[np.float32]:
    """The value of each byte."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    values = np.where(exponent == 0, fraction / STEPS, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    values[code & 0x7F == NAN] = np.nan
    return np.where(code & 0x80, -values, values).astype(np.float32)


VALUES = _values()
