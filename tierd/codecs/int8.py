"""Codec int8: one signed byte a value, and one byte of scale for each row of some 128 values.

A row is a token's values of one or several heads. Its step is the block's largest step times a
power of 2 ** (-1/16), the smallest that clips nothing; the byte has the exponent. Payload: largest
step (float32), exponents, codes. Rows are in the order [layer][keys, values][token][heads].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.values import Bytes, KVShape, Raw, floats_of, rounded

TOP = np.float32(127)
ROW_VALUES = 128
LEAST_STEP = np.float32(1e-30)


def _powers() -> NDArray[np.float32]:
    """2 ** (-i/16) for i below 256, by exactly rounded operations alone: they are part of the format."""
    root = math.sqrt(math.sqrt(math.sqrt(math.sqrt(0.5))))
    powers = [1.0]
    for i in range(1, 256):
        powers.append(powers[i - 16] / 2 if i >= 16 else powers[-1] * root)
    return np.array(powers, np.float32)


POWERS = _powers()


@dataclass(frozen=True, slots=True)
class Int8:
    """8.06 bits a value."""

    number: int
    name: str = "int8"
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Every shape will do."""

    def lengths(self, shape: KVShape) -> Lengths:
        """One length per shape."""
        length = 4 + shape.values // _row_values(shape) + shape.values
        return Lengths(length, length)

    def expected_bytes(self, shape: KVShape) -> int:
        """One length per shape."""
        return self.lengths(shape).most

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        rows = floats_of(raw, shape.geometry.dtype).reshape(-1, _row_values(shape))
        least = np.abs(rows).max(axis=1) / TOP
        base = np.maximum(least.max(), LEAST_STEP)
        steps = base * POWERS
        exponents = len(steps) - 1 - np.searchsorted(steps[:0:-1], least)  # the last that is large enough
        chosen = steps[exponents]
        codes = np.clip(np.rint(rows * (np.float32(1) / chosen)[:, None]), -TOP, TOP)
        error = float(np.abs(rows - codes * chosen[:, None]).max())
        parts = (
            np.array([base]).view(np.uint8),
            exponents.astype(np.uint8),
            codes.astype(np.int8).reshape(-1).view(np.uint8),
        )
        return Payload(np.concatenate(parts), error)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        count = shape.values // _row_values(shape)
        base = payload[:4].view(np.float32)[0]
        steps = base * POWERS[payload[4 : 4 + count]]
        codes = payload[4 + count :].view(np.int8).reshape(count, -1)
        values = codes.astype(np.float32) * steps[:, None]
        return rounded(values.reshape(shape.sizes), shape.geometry.dtype)


def _row_values(shape: KVShape) -> int:
    """Values of a row: those of the most heads that divide all heads and have 128 together."""
    heads, dim = shape.geometry.kv_heads, shape.geometry.head_dim
    most = min(heads, max(1, ROW_VALUES // dim))
    return dim * next(n for n in range(most, 0, -1) if heads % n == 0)
