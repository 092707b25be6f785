"""Codec cachegen: few levels per token, entropy coded with tables of the block itself.

The source is CacheGen (arXiv 2310.07240, section 5.2), as LMCache ships it: tokens' differences
are not taken. The levels and their tables are LMCache's.

Keys are coded after RoPE. All channels of a token and layer share one scale, their largest
magnitude. Levels go from -7 to 7. In keys of the first third of the layers and values of the first
2, they go from -15 to 15. Each layer's channel has its own table: how often each level occurs.

Payload: scales, lowest levels, numbers of levels, counts, streams. Scales are float16,
[layer][keys, values][token]. A table has its lowest level, counted from the least possible, and its
number of levels (uint8, [layer][keys, values][channel]). Counts are uint8, of 255 if the block has
more tokens. Streams of `rans.py`, each after its length (uint32), have levels in the order
[layer][keys, values][channel][token].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops, rans
from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.values import INFINITY, Bytes, Floats, KVShape, Raw, floats_of, rounded
from tierd.errors import CorruptRecord

FINE, COARSE = 15, 7
"""Highest levels: 32 and 16 bins in the paper's words."""
LEVELS = 2 * FINE + 1
FINE_VALUE_LAYERS = 2
COUNT_MAX = 255
STREAM_TABLES = 4096
"""A stream has as many layers as have at most so many tables, and one at least."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheGen:
    """About 3.5 bits a value."""

    number: int
    name: str = "cachegen"
    version: int = 1
    is_exact: bool = False
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Every shape will do."""

    def lengths(self, shape: KVShape) -> Lengths:
        """The more even the levels, the longer."""
        least = 4 * shape.geometry.layers * shape.tokens + 3 * _tables(shape)
        return Lengths(least, max(least, shape.block_bytes))

    def expected_bytes(self, shape: KVShape) -> int:
        """Levels of real keys and values take up to 3.5 bits each."""
        return self.lengths(shape).least + shape.values * 7 // 16

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        values = floats_of(raw, shape.geometry.dtype).reshape(*shape.sizes[:3], -1)
        scales = np.abs(values).max(axis=-1).astype(np.float16)
        tops = _tops(shape.geometry.layers)
        steps = _steps(scales, tops)
        inverse = np.float32(1) / np.where(steps > 0, steps, np.float32(np.inf))
        codes = np.clip(np.rint(values * inverse), -tops, tops)
        error = float(np.abs(values - codes * steps).max())
        symbols = np.ascontiguousarray((codes + tops).astype(np.uint8).transpose(0, 1, 3, 2)).reshape(-1, shape.tokens)
        counts = _counts(symbols)
        firsts = (counts > 0).argmax(axis=1)
        ends = LEVELS - (counts[:, ::-1] > 0).argmax(axis=1)
        parts = [
            *(scales.reshape(-1).view(np.uint8), firsts.astype(np.uint8), (ends - firsts).astype(np.uint8)),
            counts[_between(firsts, ends)].astype(np.uint8),
        ]
        for tables in _groups(shape):
            which = np.arange(len(counts[tables]))
            stream = rans.encode(symbols[tables].reshape(-1), rans.frequencies_of(counts[tables]), which, shape.tokens)
            parts += [np.array([len(stream)], "<u4").view(np.uint8), stream]
        return Payload(np.concatenate(parts), error)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        layers, tokens = shape.geometry.layers, shape.tokens
        at = 4 * layers * tokens
        scales = payload[:at].copy().view(np.float16).reshape(layers, 2, tokens)
        if loops.largest(scales.view(np.uint16)) >= INFINITY["float16"]:
            raise CorruptRecord(f"codec {self.name}: a token's scale is not finite; read another copy")
        firsts, lengths = payload[at : at + 2 * _tables(shape)].reshape(2, -1).astype(np.int64)
        at += 2 * len(firsts)
        taken = payload[at : at + int(lengths.sum())]
        if (firsts + lengths).max() > LEVELS or len(taken) < lengths.sum():
            raise CorruptRecord(
                f"codec {self.name}: a table of {lengths.max()} levels is impossible; read another copy"
            )
        at += len(taken)
        counts = np.zeros((len(firsts), LEVELS), np.int64)
        counts[_between(firsts, firsts + lengths)] = taken
        symbols = np.empty((len(counts), tokens), np.uint8)
        for tables in _groups(shape):
            own = counts[tables]
            length = int.from_bytes(payload[at : at + 4].tobytes(), "little")
            stream, at = payload[at + 4 : at + 4 + length], at + 4 + length
            frequencies = rans.frequencies_of(own)
            decoded = rans.decode(
                stream, np.empty(len(own) * tokens, np.uint8), frequencies, np.arange(len(own)), tokens
            )
            symbols[tables] = decoded.reshape(-1, tokens)
        if at != len(payload):
            raise CorruptRecord(f"codec {self.name}: streams end at {at} of {len(payload)} bytes; read another copy")
        tops = _tops(layers)
        codes = symbols.reshape(layers, 2, -1, tokens).transpose(0, 1, 3, 2).astype(np.float32) - tops
        return rounded((codes * _steps(scales, tops)).reshape(shape.sizes), shape.geometry.dtype)


def _tables(shape: KVShape) -> int:
    g = shape.geometry
    return 2 * g.layers * g.kv_heads * g.head_dim


def _groups(shape: KVShape) -> list[slice]:
    """Tables of each stream."""
    per_layer = _tables(shape) // shape.geometry.layers
    each = per_layer * max(1, STREAM_TABLES // per_layer)
    return [slice(first, first + each) for first in range(0, _tables(shape), each)]


def _tops(layers: int) -> Floats:
    """Highest level: float32 [layers, 2, 1, 1]."""
    each = np.arange(layers)
    fine = np.stack((3 * each < layers, each < FINE_VALUE_LAYERS), axis=1)
    return np.where(fine, np.float32(FINE), np.float32(COARSE))[..., None, None]


def _steps(scales: NDArray[np.float16], tops: Floats) -> Floats:
    """[layers, 2, tokens, 1]."""
    return scales.astype(np.float32)[..., None] * (np.float32(1) / tops)


def _counts(symbols: Bytes) -> Counts:
    """How often each level occurs in each row, at most COUNT_MAX: [rows, LEVELS]. A level that occurs has
    1 at least."""
    rows, tokens = symbols.shape
    places = symbols + np.arange(0, rows * LEVELS, LEVELS)[:, None]
    counts = np.bincount(places.reshape(-1), minlength=rows * LEVELS).reshape(rows, LEVELS)
    return counts if tokens <= COUNT_MAX else -(-counts * COUNT_MAX // tokens)


def _between(firsts: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.bool_]:
    """Which levels a table has: [tables, LEVELS]."""
    levels = np.arange(LEVELS)
    return (levels >= firsts[:, None]) & (levels < ends[:, None])
