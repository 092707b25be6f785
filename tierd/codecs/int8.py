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

from tierd.codecs import loops
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord

TOP = np.float32(127)
ROW_VALUES = 128
LEAST_STEP = np.float32(1e-30)
HALF = 0.5 + 1e-4
"""Of the largest step: no code is off by more, with what float32 rounds."""


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
        whole, data = room(self.lengths(shape).most, context)
        values = _row_values(shape)
        if loops.library is None or shape.geometry.head_dim % loops.STEP:
            _plain_encode(floats_of(raw, shape.geometry.dtype).reshape(-1, values), data)
        else:
            loops.library.tierd_int8_encode(
                *(loops.described(raw, shape), values // shape.geometry.head_dim),
                *(loops.address_of(POWERS), loops.address_of(data)),
            )
        return Payload(data, HALF * float(data[:4].view(np.float32)[0]), whole)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        base, values = payload[:4].view(np.float32)[0], _row_values(shape)
        if not 0 <= base < np.inf:
            raise CorruptRecord(f"codec int8: a step of {base} is impossible; read another copy")
        if loops.library is None or shape.geometry.head_dim % loops.STEP:
            count = shape.values // values
            codes = payload[4 + count :].view(np.int8).reshape(count, -1)
            rows = codes.astype(np.float32) * (base * POWERS[payload[4 : 4 + count]])[:, None]
            return rounded(rows.reshape(shape.sizes), shape.geometry.dtype)
        raw = room_for_raw(shape, context)
        loops.library.tierd_int8_decode(
            *(loops.described(raw, shape), values // shape.geometry.head_dim),
            *(loops.address_of(POWERS), loops.address_of(payload)),
        )
        return raw


def _plain_encode(rows: Floats, data: Bytes) -> None:
    least = np.abs(rows).max(axis=1) / TOP
    base = np.maximum(least.max(), LEAST_STEP)
    steps = base * POWERS
    exponents = len(steps) - 1 - np.searchsorted(steps[:0:-1], least)  # the last that is large enough
    codes = np.rint(rows * (np.float32(1) / steps[exponents])[:, None])
    data[:4].view(np.float32)[:] = base
    data[4 : 4 + len(rows)] = exponents
    data[4 + len(rows) :].view(np.int8)[:] = codes.reshape(-1)


def _row_values(shape: KVShape) -> int:
    """Values of a row: those of the most heads that divide all heads and have 128 together."""
    heads, dim = shape.geometry.kv_heads, shape.geometry.head_dim
    most = min(heads, max(1, ROW_VALUES // dim))
    return dim * next(n for n in range(most, 0, -1) if heads % n == 0)
