"""Codec lossless: exponents and signs by rANS, fractions as they are. Every bit comes back.

The values of a group have similar exponents. A group is one channel's values in a block of 128
tokens or more, else one head's. A symbol has the distance of a value's exponent from the largest
one of its group, and whether its sign is the group's rarer one. Groups share up to 16 tables: those
of similar sums of distances and similar shares of the rarer sign. Symbols lie by tables, so that
one table at a time is in the cache.

Payload: bytes of tables, of escapes and of the rANS stream (3 uint32). Per group: largest exponent
(uint8), then its table (uint8; bit 7: most signs are negative). Tables, escapes, stream, fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import rans
from tierd.codecs.block import Context, Lengths, Payload
from tierd.codecs.values import Bytes, KVShape, Raw, bytes_of, raw_of
from tierd.errors import CorruptRecord

TABLES = 16
TABLE_SYMBOLS = 1 << 13
"""A block has a table per so many values, and 16 at most."""
CHANNEL_TOKENS = 128
ESCAPE = 127
"""Distances from this on are this one; then the exponent is in the escapes."""
SHARES = (16, 56, 100)
"""Of the rarer sign in 256: limits between four classes of channels."""
FRACTION_BITS = {"bfloat16": 7, "float16": 10}
NEGATIVE = 0x80
_HEAD = np.dtype([("tables", "<u4"), ("escapes", "<u4"), ("stream", "<u4")])


class Groups(NamedTuple):
    """count: of groups. length: values of each. by_channel: whether a group is a channel."""

    count: int
    length: int
    by_channel: bool


class Sums(NamedTuple):
    """Of each group: its largest exponent, the sum of its exponents, its negative values."""

    tops: Bytes
    exponents: NDArray[np.uint32]
    negatives: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Lossless:
    """About 10.4 bits a value of real keys and values in bfloat16."""

    number: int
    name: str = "lossless"
    version: int = 1
    is_exact: bool = True
    is_calibrated: bool = False

    def check(self, shape: KVShape) -> None:
        """Every shape will do."""

    def lengths(self, shape: KVShape) -> Lengths:
        """A block that would become no shorter stays as it is."""
        least = _HEAD.itemsize + 2 * groups_of(shape).count + _fraction_bytes(shape)
        return Lengths(least, max(least, shape.block_bytes))

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
        rows = _rows(raw, groups)
        sums = _sums(rows, fraction)
        chosen = _chosen(sums, groups)
        order = np.argsort(chosen & (TABLES - 1), kind="stable")
        which, rows = chosen[order] & (TABLES - 1), rows[order]
        exponents = rows >> fraction & (0x7FFF >> fraction)
        far = np.minimum(sums.tops[order, None] - exponents, ESCAPE)
        rare = rows >> 15 ^ (chosen[order] >> 7)[:, None]
        symbols = (2 * far + rare).astype(np.uint8)
        counts = np.zeros((int(which.max()) + 1, 256), np.int64)
        for table in range(len(counts)):
            counts[table] = np.bincount(symbols[which == table].reshape(-1), minlength=256)
        frequencies = rans.frequencies_of(counts)
        stream = rans.encode(symbols.reshape(-1), frequencies, which, groups.length)
        escapes = exponents[far == ESCAPE].astype(np.uint8)
        packed = _packed_tables(frequencies)
        head = np.array([(len(packed), len(escapes), len(stream))], _HEAD).view(np.uint8)
        fractions = _packed_fractions(bytes_of(raw, shape).view(np.uint16), fraction)
        return Payload(np.concatenate((head, sums.tops, chosen, packed, escapes, stream, fractions)), 0.0)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
        parts = _parts(payload, shape, groups)
        frequencies = _unpacked_tables(parts.tables)
        order = np.argsort(parts.chosen & (TABLES - 1), kind="stable")
        which = parts.chosen[order] & (TABLES - 1)
        symbols = rans.decode(parts.stream, shape.values, frequencies, which, groups.length).reshape(groups.count, -1)
        far, rare = symbols >> 1, symbols & 1
        exponents = parts.tops[order, None].astype(np.int16) - far
        is_escaped = far == ESCAPE
        if np.count_nonzero(is_escaped) != len(parts.escapes):
            raise _corrupt("the escapes are not as many as its symbols name")
        exponents[is_escaped] = parts.escapes
        if int(exponents.min()) < 0 or int(exponents.max()) > 0x7FFF >> fraction:
            raise _corrupt("an exponent is impossible")
        signs = rare ^ (parts.chosen[order] >> 7)[:, None]
        rows = np.empty((groups.count, groups.length), np.uint16)
        rows[order] = exponents.astype(np.uint16) << fraction | signs.astype(np.uint16) << 15
        raw = raw_of(np.empty(shape.block_bytes, np.uint8), shape)
        raw[:] = _unrows(rows, shape, groups)
        flat = bytes_of(raw, shape).view(np.uint16)
        flat |= _unpacked_fractions(parts.fractions, fraction)[: shape.values]
        return raw


def groups_of(shape: KVShape) -> Groups:
    """Which values share a table."""
    g = shape.geometry
    if shape.tokens >= CHANNEL_TOKENS:
        return Groups(2 * g.layers * g.kv_heads * g.head_dim, shape.tokens, by_channel=True)
    return Groups(2 * g.layers * g.kv_heads, shape.tokens * g.head_dim, by_channel=False)


def _rows(raw: Raw, groups: Groups) -> NDArray[np.uint16]:
    """The values of each group: [groups, length]. Groups: layers, keys and values, heads, channels."""
    order = (0, 1, 3, 4, 2) if groups.by_channel else (0, 1, 3, 2, 4)
    return np.ascontiguousarray(raw.transpose(order)).reshape(groups.count, groups.length)


def _unrows(rows: NDArray[np.uint16], shape: KVShape, groups: Groups) -> Raw:
    layers, pair, tokens, heads, dim = shape.sizes
    if groups.by_channel:
        return rows.reshape(layers, pair, heads, dim, tokens).transpose(0, 1, 4, 2, 3)
    return rows.reshape(layers, pair, heads, tokens, dim).transpose(0, 1, 3, 2, 4)


def _sums(rows: NDArray[np.uint16], fraction: int) -> Sums:
    exponents = rows >> fraction & (0x7FFF >> fraction)
    tops, total = exponents.max(axis=1).astype(np.uint8), exponents.sum(axis=1, dtype=np.uint32)
    return Sums(tops, total, (rows >> 15).sum(axis=1, dtype=np.uint32))


def _chosen(sums: Sums, groups: Groups) -> Bytes:
    """The table of each group, and whether most of its values are negative: uint8 [groups]."""
    tables = min(TABLES, max(1, groups.count * groups.length // TABLE_SYMBOLS))
    negatives, length = sums.negatives.astype(np.int64), groups.length
    is_negative = 2 * negatives > length
    rarer = 256 * np.minimum(negatives, length - negatives)
    far = sums.tops.astype(np.int64) * length - sums.exponents
    classes = np.zeros(groups.count, np.int64)
    if groups.by_channel and tables == TABLES:
        classes = np.searchsorted(np.array(SHARES) * length, rarer, side="right")
        tables //= len(SHARES) + 1
    order = np.lexsort((far, classes))  # each class is cut into parts of equal size
    first = np.searchsorted(classes[order], np.arange(len(SHARES) + 2))
    rank = np.arange(groups.count) - first[classes[order]]
    chosen = np.empty(groups.count, np.int64)
    chosen[order] = classes[order] * tables + rank * tables // np.diff(first)[classes[order]]
    return (chosen | np.where(is_negative, NEGATIVE, 0)).astype(np.uint8)


def _packed_tables(frequencies: rans.Frequencies) -> Bytes:
    """Per table: its last symbol with a frequency, then all up to it. One byte below 128, else the
    lower seven bits and NEGATIVE, then the others."""
    packed = bytearray()
    for row in frequencies.tolist():
        last = max(i for i, frequency in enumerate(row) if frequency)
        packed.append(last)
        for frequency in row[: last + 1]:
            packed += bytes((frequency,)) if frequency < 128 else bytes((frequency & 127 | 128, frequency >> 7))
    return np.frombuffer(bytes(packed), np.uint8)


def _unpacked_tables(packed: Bytes) -> rans.Frequencies:
    """Raises CorruptRecord."""
    data, at, rows = packed.tolist(), 0, []
    try:
        while at < len(data):
            row, last = [0] * 256, data[at]
            at += 1
            for symbol in range(last + 1):
                row[symbol] = data[at] & 127 | (data[at + 1] << 7 if data[at] & 128 else 0)
                at += 2 if data[at] & 128 else 1
            rows.append(row)
    except IndexError:
        raise _corrupt("a table of frequencies ends too early") from None
    if not 0 < len(rows) <= TABLES:
        raise _corrupt(f"it has {len(rows)} tables, {TABLES} at most")
    return np.minimum(np.array(rows), rans.TOTAL + 1).astype(np.uint16)


def _fraction_bytes(shape: KVShape) -> int:
    return -(-shape.values // 8) * FRACTION_BITS[shape.geometry.dtype]


def _packed_fractions(flat: NDArray[np.uint16], bits: int) -> Bytes:
    """Eight fractions in `bits` bytes, lowest bits first."""
    filled = np.zeros(-(-len(flat) // 8) * 8, np.uint16)
    filled[: len(flat)] = flat & (1 << bits) - 1
    each = np.unpackbits(filled.view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")[:, :bits]
    return np.packbits(each, bitorder="little")


def _unpacked_fractions(packed: Bytes, bits: int) -> NDArray[np.uint16]:
    each = np.zeros((len(packed) * 8 // bits, 16), np.uint8)
    each[:, :bits] = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
    return np.packbits(each, axis=1, bitorder="little").reshape(-1).view(np.uint16)


class _Parts(NamedTuple):
    tops: Bytes
    chosen: Bytes
    tables: Bytes
    escapes: Bytes
    stream: Bytes
    fractions: Bytes


def _parts(payload: Bytes, shape: KVShape, groups: Groups) -> _Parts:
    """Raises CorruptRecord if the payload's length is not that of its parts."""
    head: Any = payload[: _HEAD.itemsize].view(_HEAD)[0]
    sizes = (groups.count, groups.count, *map(int, head.tolist()), _fraction_bytes(shape))
    if _HEAD.itemsize + sum(sizes) != len(payload):
        raise _corrupt(f"its parts have {sum(sizes)} bytes, the payload {len(payload) - _HEAD.itemsize}")
    return _Parts(*np.split(payload[_HEAD.itemsize :], np.cumsum(sizes)[:-1]))


def _corrupt(fault: str) -> CorruptRecord:
    return CorruptRecord(f"codec lossless: {fault}; read another copy")
