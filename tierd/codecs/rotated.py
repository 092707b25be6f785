"""Rotated codes: a signed Hadamard transform of each head's vector, then a few bits a value.

The rotation spreads outliers over all channels, so that one scale per vector fits them all
(QuaRot, arXiv 2404.00456, section 4). Codes are the middles of equal steps. The step follows from
the vector's root mean square: 3.35 of it fit 16 steps best if values are normal (Max, 1960). The
stored scale makes the decoded vector's product with the original equal to the original's square.
A least-squares scale would shrink vectors and blur sharp attention. At 4 bits tiny-llama's recall
loses 0.19 with it, and 0.04 with this one (perplexity per token).

    x -> y = H (signs * x)        k = rint(y / step - 1/2), clamped     scale = y.y / y.(k + 1/2)
    y' = (k + 1/2) * scale        x' = signs * H y'

Sums run in a fixed order, so that the native loops give the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs.values import Floats
from tierd.errors import Unsupported

Codes = NDArray[np.uint8]
HEAD_DIMS = (16, 32, 64, 128, 256)
LANES = 16
STEPS = {3: 0.5860, 4: 0.3352, 8: 0.0308}
"""Bits of a code -> best step for normal values of variance 1 (Max, 1960, table II; 8: uniform)."""
TRIES = {3: (1.0, 0.85), 4: (1.0, 0.8, 1.25), 8: (1.0,)}
"""Of this step, the multiples tried for each row. The one with the least error is kept."""
LEAST_LENGTH = 1e-17
"""Shorter vectors may have a square that is 0 in float32."""
_SIGNS = np.unpackbits(np.frombuffer(hashlib.sha256(b"rotation 1").digest(), np.uint8)).astype(np.float32) * 2 - 1


class Rotated(NamedTuple):
    """codes: [rows, head_dim]. scales: [rows]. error: largest length of a row's error."""

    codes: Codes
    scales: NDArray[np.float16]
    error: float


class _Coded(NamedTuple):
    """off: square of each row's error."""

    codes: Codes
    scales: NDArray[np.float16]
    off: Floats


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
    square = _sum(y * y)
    step = np.sqrt(square * np.float32(1.0 / rows.shape[1])) * np.float32(STEPS[bits])
    if bits == 8:  # wide enough to clip nothing
        step = np.maximum(step, np.abs(y).max(axis=1) * np.float32(1 / 127.5))
    best = _coded(y, square, step * np.float32(TRIES[bits][0]), bits)
    for times in TRIES[bits][1:]:
        other = _coded(y, square, step * np.float32(times), bits)
        is_better = other.off < best.off
        best.codes[is_better], best.scales[is_better] = other.codes[is_better], other.scales[is_better]
        best.off[is_better] = other.off[is_better]
    return Rotated(best.codes, best.scales, float(np.sqrt(best.off.max())) + LEAST_LENGTH)


def _coded(y: Floats, square: Floats, step: Floats, bits: int) -> _Coded:
    """Codes of rotated rows for one step per row. square: of each row."""
    half, one = np.float32(0.5), np.float32(1.0)
    low, high = np.float32(-(1 << bits - 1)), np.float32((1 << bits - 1) - 1)
    is_zero = step < np.float32(LEAST_LENGTH / 1000)
    inverse = one / np.where(is_zero, one, step)
    k = np.rint(np.clip(y * inverse[:, None] - half, low, high))
    middles = k + half
    product = _sum(y * middles)
    scales = np.where(is_zero, np.float32(0.0), square / np.where(is_zero, one, product)).astype(np.float16)
    off = y - middles * scales.astype(np.float32)[:, None]
    return _Coded((k - low).astype(np.uint8), scales, _sum(off * off))


def decode(codes: Codes, scales: NDArray[np.float16], bits: int) -> Floats:
    """The rows: float32 [rows, head_dim]. Any codes and scales give some values."""
    offset = np.float32((1 << bits - 1) - 0.5)
    y = (codes.astype(np.float32) - offset) * scales.astype(np.float32)[:, None]
    return hadamard(y) * signs(codes.shape[1])


def _sum(terms: Floats) -> Floats:
    """Sums of rows in the order of the native loops: 16 lanes over the row, then halves."""
    lanes = terms.reshape(len(terms), -1, LANES)
    total = lanes[:, 0].copy()
    for i in range(1, lanes.shape[1]):
        total += lanes[:, i]
    width = LANES // 2
    while width:
        total = total[:, :width] + total[:, width:]
        width //= 2
    return total[:, 0]
