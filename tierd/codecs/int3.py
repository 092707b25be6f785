"""Codec int3: rotated keys and values at 3 bits a value, each token predicted from the one before.

A chain is one head's keys or values over the block's tokens. Neighbours resemble each other: a
share of a token's decoded vector predicts the next one, and only the rest is coded. The chain's
weight is that share in sixteenths. Codes are levels for normal values (Max, 1960, table I); the
scale makes the decoded rest's product with the rest equal to the rest's square.

    y = H (signs * x)     rest = y - weight * y'     scale = rest.rest / rest.level(code)
    y' = weight * y' + level(code) * scale           x' = signs * H y'

A vector that its predecessor would make longer stands alone: the weight is 0 there, and its scale
has the sign bit. Payload: weights of all chains (uint8), scales (float16), three planes of one bit
a value. Chains are in the order [layer][keys, values][kv head], the rest in the order
[token][chain].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops, rotated
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.rotated import Codes
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord

BITS = 3
SIXTEENTH = np.float32(1 / 16)
MOST_WEIGHT = 15
EDGES = np.array((0.5006, 1.050, 1.748), np.float32)
LEVELS = np.array((-2.152, -1.344, -0.7560, -0.2451, 0.2451, 0.7560, 1.344, 2.152), np.float32)
"""Of unit normal values. Edges are between the sizes of levels."""
EACH_PAIR = 4
"""Weights follow from every fourth pair of neighbours."""
SIGN = np.uint16(0x8000)
LEAST_HALF = np.float32(2.0**-24)
"""A scale of 0 ends a chain, as its sign bit does."""


class _Token(NamedTuple):
    """One token of all chains. decoded: rotated. square: largest of a vector's error."""

    codes: Codes
    scales: NDArray[np.uint16]
    decoded: Floats
    square: np.float32


@dataclass(frozen=True, slots=True)
class Int3:
    """3.25 bits a value at head_dim 64."""

    number: int
    name: str = "int3"
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported."""
        rotated.signs(shape.geometry.head_dim)

    def lengths(self, shape: KVShape) -> Lengths:
        """One length per shape."""
        length = _chains(shape) * (1 + 2 * shape.tokens) + BITS * shape.values // 8
        return Lengths(length, length)

    def expected_bytes(self, shape: KVShape) -> int:
        """One length per shape."""
        return self.lengths(shape).most

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        whole, data = room(self.lengths(shape).most, context)
        if loops.library is None:
            return Payload(data, _plain_encode(raw, shape, data), whole)
        return Payload(data, rotated.native_encode(raw, shape, data), whole)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        chains = _chains(shape)
        weights, scales = payload[:chains], payload[chains : chains * (1 + 2 * shape.tokens)]
        if weights.max() > MOST_WEIGHT:
            raise CorruptRecord(f"codec int3: a weight of {weights.max()} sixteenths is impossible; read another copy")
        rotated.check_scales(scales)
        if loops.library is not None:
            return rotated.native_decode(payload, shape, room_for_raw(shape, context))
        planes = np.unpackbits(payload[chains + len(scales) :].reshape(BITS, -1), axis=1, bitorder="little")
        levels = LEVELS[planes[0] | planes[1] << 1 | planes[2] << 2].reshape(shape.tokens, chains, -1)
        halves = scales.copy().view(np.uint16).reshape(shape.tokens, chains)
        scale = (halves & ~SIGN).view(np.float16).astype(np.float32)
        weight = np.where((halves & SIGN > 0) | (scale == 0), np.float32(0), weights * SIXTEENTH)
        decoded, last = np.empty_like(levels), np.zeros_like(levels[0])
        for token, level in enumerate(levels):
            last = weight[token, :, None] * last + level * scale[token, :, None]
            decoded[token] = last
        rows = rotated.hadamard(decoded.reshape(-1, levels.shape[-1])) * rotated.signs(levels.shape[-1])
        return rounded(_of_chains(rows, shape), shape.geometry.dtype)


def _chains(shape: KVShape) -> int:
    g = shape.geometry
    return 2 * g.layers * g.kv_heads


def _by_chains(values: Floats) -> Floats:
    """[layers, 2, tokens, heads, dim] -> [tokens, chains, dim]."""
    return np.ascontiguousarray(values.transpose(2, 0, 1, 3, 4)).reshape(values.shape[2], -1, values.shape[-1])


def _of_chains(rows: Floats, shape: KVShape) -> Floats:
    layers, pair, tokens, heads, dim = shape.sizes
    return np.ascontiguousarray(rows.reshape(tokens, layers, pair, heads, dim).transpose(1, 2, 0, 3, 4))


def _plain_encode(raw: Raw, shape: KVShape, data: Bytes) -> float:
    """Writes the payload. Returns the error."""
    values = _by_chains(floats_of(raw, shape.geometry.dtype))
    dim = values.shape[-1]
    weights = _weights(values)
    y = rotated.hadamard((values * rotated.signs(dim)).reshape(-1, dim)).reshape(values.shape)
    tokens, last = list[_Token](), np.zeros_like(y[0])
    for each in y:
        tokens.append(_encoded(each, last, weights * SIXTEENTH))
        last = tokens[-1].decoded
    codes = np.concatenate([token.codes for token in tokens])
    planes = [np.packbits(codes >> bit & 1, bitorder="little") for bit in range(BITS)]
    scales = np.concatenate([token.scales for token in tokens]).view(np.uint8)
    np.concatenate((weights, scales, *planes), out=data)
    return rotated.length_of(float(np.max([token.square for token in tokens])))


def _weights(values: Floats) -> Bytes:
    """Of chains, float32 [tokens, chains, dim]: those with the least squares of rests, rounded down."""
    both, square = np.zeros_like(values[0]), np.zeros_like(values[0])
    for token in range(1, len(values), EACH_PAIR):
        both += values[token] * values[token - 1]
        square += values[token - 1] * values[token - 1]
    total = rotated.summed(square)
    share = rotated.summed(both) / np.where(total > 0, total, np.float32(np.inf)) * np.float32(16)
    return np.where(share >= 1, np.minimum(share, MOST_WEIGHT), 0).astype(np.uint8)


def _encoded(y: Floats, last: Floats, weights: Floats) -> _Token:
    """A token's vectors after the decoded ones of the token before: float32 [chains, dim]."""
    zero, one = np.float32(0), np.float32(1)
    rest = y - weights[:, None] * last
    square, whole = rotated.summed(rest * rest), rotated.summed(y * y)
    weight = np.where(square < whole, weights, zero)
    square, rest = np.where(square < whole, square, whole), y - weight[:, None] * last
    step = np.sqrt(square * np.float32(1 / y.shape[1]))
    is_zero = step < np.float32(rotated.LEAST_LENGTH / 1000)
    z = rest * (one / np.where(is_zero, one, step))[:, None]
    steps = (np.abs(z)[..., None] > EDGES).sum(axis=-1)
    codes = np.where(z < 0, 3 - steps, 4 + steps).astype(np.uint8)
    levels = LEVELS[codes]
    product = rotated.summed(rest * levels)
    scales = np.where(is_zero, zero, square / product)
    scales = np.where(weight > 0, np.maximum(scales, LEAST_HALF), scales).astype(np.float16)
    s = scales.astype(np.float32)
    off = np.maximum(square - (s + s) * product + s * s * rotated.summed(levels * levels), zero)
    decoded = weight[:, None] * last + levels * s[:, None]
    halves = scales.view(np.uint16) | np.where(weight == 0, SIGN, np.uint16(0))
    return _Token(codes, halves, decoded, (off + whole * rotated.SLACK).max())
