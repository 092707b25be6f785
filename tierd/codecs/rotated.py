"""Rotated codes: a signed Hadamard transform of each head's vector, then a few bits a value.

The rotation spreads outliers over all channels, so that one scale per vector fits them all
(QuaRot, arXiv 2404.00456, section 4). Codes are the middles of equal steps. The step is a share of
the vector's largest value, near the step that fits normal values best (Max, 1960). The stored
scale makes the decoded vector's product with the original equal to the original's square.
A least-squares scale would shrink vectors and blur sharp attention. At 4 bits tiny-llama's recall
loses 0.19 with it, and 0.04 with this one (perplexity per token).

    x -> y = H (signs * x)        k = rint(y / step - 1/2), clamped     scale = y.y / y.(k + 1/2)
    y' = (k + 1/2) * scale        x' = signs * H y'                     error^2 = |y - y'|^2

Sums run in a fixed order, so that the native loops give the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.values import INFINITY, Bytes, Floats, KVShape, Raw
from tierd.errors import CorruptRecord, Unsupported

Codes = NDArray[np.uint8]
HEAD_DIMS = (16, 32, 64, 128, 256)
LANES = 16
LEVELS = np.dtype([("peak", "<f4"), ("low", "<f4"), ("high", "<f4"), ("bits", "<i4")])
"""How a vector's step follows from it: peak times its largest value. It is at least low and at most
high times the root mean square."""
STEPS = {
    4: np.array((0.12, 0.8 * 0.3352, 1.25 * 0.3352, 4), LEVELS),
    8: np.array((1 / 127.5, 0.0308, 1.0, 8), LEVELS),  # wide enough to clip nothing
}
"""By bits. Max has 0.3352 as the best step for normal values and 16 levels (table II)."""
SLACK = np.float32(5e-6)
"""Of a vector's square: more than what rounding of sums takes from the square of its error."""
LEAST_LENGTH = 1e-17
"""Shorter vectors may have a square that is 0 in float32."""
_SIGNS = np.unpackbits(np.frombuffer(hashlib.sha256(b"rotation 1").digest(), np.uint8)).astype(np.float32) * 2 - 1


class Rotated(NamedTuple):
    """codes: [rows, head_dim]. scales: [rows]. error: largest length of a row's error."""

    codes: Codes
    scales: NDArray[np.float16]
    error: float


def signs(head_dim: int) -> Floats:
    """The signs of the rotation: float32 [head_dim], 1 or -1. They are part of the format."""
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"codec: head_dim {head_dim} cannot be rotated; rotated codecs take {HEAD_DIMS}")
    return _SIGNS[:head_dim]


def hadamard(rows: Floats) -> Floats:
    """The normalised Hadamard transform of each row: float32 [rows, n], n a power of two. It is its
    own inverse. The distance of the butterflies doubles from 1."""
    n, width = rows.shape[1], 1
    while width < n:
        pairs = rows.reshape(-1, n // (2 * width), 2, width)
        rows = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2).reshape(-1, n)
        width *= 2
    return rows * np.float32(1.0 / np.sqrt(n))


def encode(rows: Floats, bits: int) -> Rotated:
    """Codes of rows: float32 [rows, head_dim], finite. A row whose square is below float32 is 0."""
    y = hadamard(rows * signs(rows.shape[1]))
    square, levels, one, half = summed(y * y), STEPS[bits], np.float32(1.0), np.float32(0.5)
    mean = np.sqrt(square * np.float32(1.0 / rows.shape[1]))
    step = np.maximum(mean * levels["low"], np.abs(y).max(axis=1) * levels["peak"])
    step = np.minimum(mean * levels["high"], step)
    low, high = np.float32(-(1 << bits - 1)), np.float32((1 << bits - 1) - 1)
    is_zero = step < np.float32(LEAST_LENGTH / 1000)
    inverse = one / np.where(is_zero, one, step)
    k = np.rint(np.clip(y * inverse[:, None] - half, low, high))
    middles = k + half
    product = summed(y * middles)
    scales = np.where(is_zero, np.float32(0.0), square / np.where(is_zero, one, product)).astype(np.float16)
    s = scales.astype(np.float32)
    off = np.maximum(square - (s + s) * product + s * s * summed(middles * middles), np.float32(0.0)) + square * SLACK
    return Rotated((k - low).astype(np.uint8), scales, length_of(float(off.max())))


def length_of(square: float) -> float:
    """A bound of a vector's length: its square may be too small for float32. NaN stays NaN."""
    return math.sqrt(square) + LEAST_LENGTH


def check_scales(scales: Bytes) -> None:
    """Raises CorruptRecord for a scale that is not finite: no encoder writes one."""
    if loops.largest(np.ascontiguousarray(scales).reshape(-1).view(np.uint16)) >= INFINITY["float16"]:
        raise CorruptRecord("encoded block: a scale of rotated codes is not finite; read another copy")


def decode(codes: Codes, scales: NDArray[np.float16], bits: int) -> Floats:
    """The rows: float32 [rows, head_dim]. Any codes and scales give some values."""
    offset = np.float32((1 << bits - 1) - 0.5)
    y = (codes.astype(np.float32) - offset) * scales.astype(np.float32)[:, None]
    return hadamard(y) * signs(codes.shape[1])


def summed(terms: Floats) -> Floats:
    """Sums of rows, float32 [rows, n], in the order of the native loops: 16 lanes over the row, then
    halves."""
    lanes = terms.reshape(len(terms), -1, LANES)
    total = lanes[:, 0].copy()
    for i in range(1, lanes.shape[1]):
        total += lanes[:, i]
    width = LANES // 2
    while width:
        total = total[:, :width] + total[:, width:]
        width //= 2
    return total[:, 0]


def native_encode(raw: Raw, shape: KVShape, out: Bytes, bits: tuple[int, ...] = ()) -> float:
    """Payload by the native loops. Returns the error. bits: of rot's keys and values; none: int3."""
    assert loops.library is not None
    levels, sign = _levels(*bits), signs(shape.geometry.head_dim)
    block = loops.described(raw, shape)
    square = loops.library.tierd_rotated_encode(block, levels, loops.address_of(sign), loops.address_of(out))
    return length_of(struct.unpack("<f", square.to_bytes(4, "little"))[0])


def native_decode(payload: Bytes, shape: KVShape, raw: Raw, bits: tuple[int, ...] = ()) -> Raw:
    """Writes the values of such a payload to raw, and returns it."""
    assert loops.library is not None
    sign = signs(shape.geometry.head_dim)
    block = loops.described(raw, shape)
    loops.library.tierd_rotated_decode(block, _levels(*bits), loops.address_of(sign), loops.address_of(payload))
    return raw


@cache
def _levels(*bits: int) -> bytes | None:
    return b"".join(STEPS[each].tobytes() for each in bits) or None
