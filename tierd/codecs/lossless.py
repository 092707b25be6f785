"""Codec lossless: exponents and signs by rANS, fractions as they are. Every bit comes back.

Groups of values (grouped.py) share up to 16 tables. A table is for groups with similar sums of
distances from their largest exponent, and with similar shares of the rarer sign. Symbols lie by
tables, so that one table at a time is in the cache.

Payload: bytes of tables, number of escapes, bytes of the rANS stream (3 uint32). Per group: largest
exponent (uint8), then its table (uint8; bit 7: most signs are negative). Tables, escapes, stream,
fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tierd.codecs import grouped, loops, rans
from tierd.codecs.block import Context, Lengths, Payload, room, room_for_raw
from tierd.codecs.grouped import NEGATIVE, TABLES, Chosen, Groups, Split, Sums, fraction_bytes, groups_of
from tierd.codecs.values import Bytes, KVShape, Raw
from tierd.errors import CorruptRecord

TABLE_SYMBOLS = 1 << 13
"""A block has a table per so many values, and 16 at most."""
SHARES = (16, 56, 100)
"""Of the rarer sign in 256: limits between four classes of channels."""
_HEAD = np.dtype([("tables", "<u4"), ("escapes", "<u4"), ("stream", "<u4")])


class _Parts(NamedTuple):
    """Of a payload."""

    tops: Bytes
    chosen: Bytes
    tables: Bytes
    escapes: Bytes
    stream: Bytes
    fractions: Bytes


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
        least = _HEAD.itemsize + 2 * groups_of(shape).number + fraction_bytes(shape)
        return Lengths(least, max(least, shape.block_bytes))

    def expected_bytes(self, shape: KVShape) -> int:
        """Real keys and values take 10.4 bits each in bfloat16, 11 in short blocks."""
        return shape.values * 23 // 16

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """See block.Codec."""
        groups = groups_of(shape)
        chosen = _chosen(grouped.sums_of(raw, shape), groups)
        coded = grouped.split(raw, shape, chosen)
        frequencies = rans.frequencies_of(coded.counts)
        stream = rans.encode(coded.symbols, frequencies, _which(chosen), groups.length)
        tables = _packed(frequencies)
        head = np.array([(len(tables), len(coded.escapes), len(stream))], _HEAD).view(np.uint8)
        parts = (head, chosen.tops, chosen.tables, tables, coded.escapes, stream)
        before = sum(map(len, parts))
        whole, data = room(before + fraction_bytes(shape), context)
        np.concatenate(parts, out=data[:before])
        grouped.pack(raw, shape, data[before:])
        return Payload(data, 0.0, whole)

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """See block.Codec."""
        parts = _parts(payload, shape)
        chosen, frequencies = Chosen(parts.tops, parts.chosen), _unpacked(parts.tables)
        into = loops.scratch("symbols", shape.values)
        symbols = rans.decode(parts.stream, into, frequencies, _which(chosen), groups_of(shape).length)
        raw = room_for_raw(shape, context)
        if not grouped.join(raw, shape, chosen, Split(symbols, frequencies, parts.escapes), parts.fractions):
            raise _corrupt("an exponent is impossible, or the escapes are not as many as the symbols name")
        return raw


def _which(chosen: Chosen) -> Bytes:
    """The table of each group, in the order of the symbols."""
    return np.sort(chosen.tables & (TABLES - 1))


def _chosen(sums: Sums, groups: Groups) -> Chosen:
    """Cuts the groups of each class of signs into parts of equal size: a table for each part."""
    count, length = groups.number, groups.length
    tables = min(TABLES, max(1, count * length // TABLE_SYMBOLS))
    negatives = sums.negatives.astype(np.int64)
    far = sums.tops.astype(np.int64) * length - sums.exponents
    classes = np.zeros(count, np.int64)
    if groups.by_channel and tables == TABLES:
        rarer = 256 * np.minimum(negatives, length - negatives)
        classes = np.searchsorted(np.array(SHARES) * length, rarer, side="right")
        tables //= len(SHARES) + 1
    order = np.sort((classes * (far.max() + 1) + far) * count + np.arange(count)) % count  # by classes, then far
    ordered = classes[order]
    first = np.searchsorted(ordered, np.arange(len(SHARES) + 2))
    rank = np.arange(count) - first[ordered]
    chosen = np.empty(count, np.int64)
    chosen[order] = ordered * tables + rank * tables // np.diff(first)[ordered]
    return Chosen(sums.tops, (chosen | np.where(2 * negatives > length, NEGATIVE, 0)).astype(np.uint8))


def _packed(frequencies: rans.Frequencies) -> Bytes:
    """The number of tables, the last symbol of each that has a frequency, and all frequencies up to
    these. One byte below 128, else the lower seven bits and 128, then the others."""
    size = frequencies.shape[1]
    last = size - 1 - np.argmax(frequencies[:, ::-1] > 0, axis=1)
    values = frequencies[np.arange(size) <= last[:, None]]
    both = np.stack((values & 127 | np.where(values > 127, 128, 0), values >> 7), axis=1).astype(np.uint8)
    needed = np.stack((np.ones_like(values, bool), values > 127), axis=1)
    return np.concatenate((np.array([len(last)], np.uint8), last.astype(np.uint8), both[needed]))


def _unpacked(packed: Bytes) -> rans.Frequencies:
    """Raises CorruptRecord."""
    count = int(packed[0]) if len(packed) else 0
    last, data = packed[1 : 1 + count].astype(np.int64), packed[1 + count :].astype(np.uint16)
    is_second = np.append(False, data[:-1] > 127) if len(data) else np.empty(0, bool)
    is_used = np.arange(256) <= last[:, None]
    if not 0 < count == len(last) <= TABLES or np.count_nonzero(~is_second) != np.count_nonzero(is_used):
        raise _corrupt("its tables of frequencies do not have their length")
    values = data[~is_second] & 127
    if data[-1] > 127 or (data[is_second] > rans.TOTAL >> 7).any():
        raise _corrupt("a frequency is impossible")
    values[np.flatnonzero(data[~is_second] > 127)] += data[is_second] << 7
    frequencies = np.zeros((count, 256), np.uint16)
    frequencies[is_used] = values
    return frequencies


def _parts(payload: Bytes, shape: KVShape) -> _Parts:
    """Raises CorruptRecord if the payload's length is not that of its parts."""
    head: Any = payload[: _HEAD.itemsize].view(_HEAD)[0]
    count = groups_of(shape).number
    sizes = (count, count, *map(int, head.tolist()), fraction_bytes(shape))
    if _HEAD.itemsize + sum(sizes) != len(payload):
        raise _corrupt(f"its parts have {sum(sizes)} bytes, the payload {len(payload) - _HEAD.itemsize}")
    return _Parts(*np.split(payload[_HEAD.itemsize :], np.cumsum(sizes)[:-1]))


def _corrupt(fault: str) -> CorruptRecord:
    return CorruptRecord(f"codec lossless: {fault}; read another copy")
