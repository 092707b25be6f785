"""Values in groups, for codec lossless: sums, symbols and fractions. In C++, or plain.

A group is one channel's values in a block of 128 tokens or more, else one head's. Groups are in the
order of layers, keys and values, heads, channels. A symbol is twice the distance of a value's
exponent from the largest one of its group. It is 1 more if the sign is the group's rarer one.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.values import Bytes, KVShape, Raw, bytes_of

CHANNEL_TOKENS = 128
ESCAPE = 127
"""Distances from this on are this one; then the exponent is in the escapes."""
FRACTION_BITS = {"bfloat16": 7, "float16": 10}
TABLES = 16
NEGATIVE = 0x80
_GROUPS = struct.Struct("<8Q")

Words = NDArray[np.uint16]


class Groups(NamedTuple):
    """number: of groups. length: values of each. by_channel: whether a group is a channel."""

    number: int
    length: int
    by_channel: bool


class Sums(NamedTuple):
    """Of each group: its largest exponent, the sum of its exponents, its negative values."""

    tops: Bytes
    exponents: NDArray[np.uint32]
    negatives: NDArray[np.uint32]


class Chosen(NamedTuple):
    """tops: uint8 [groups]. tables: uint8 [groups], the table of each. NEGATIVE: most values are."""

    tops: Bytes
    tables: Bytes

    @property
    def order(self) -> NDArray[np.intp]:
        """The groups by their tables, as symbols lie."""
        return np.argsort(self.tables & (TABLES - 1), kind="stable")


class Split(NamedTuple):
    """symbols: of all groups in their order; they may lie in scratch memory.
    counts: of each symbol, [tables, 256]. escapes: exponents."""

    symbols: Bytes
    counts: NDArray[Any]
    escapes: Bytes


def groups_of(shape: KVShape) -> Groups:
    """Which values share a table."""
    g = shape.geometry
    if shape.tokens >= CHANNEL_TOKENS:
        return Groups(2 * g.layers * g.kv_heads * g.head_dim, shape.tokens, by_channel=True)
    return Groups(2 * g.layers * g.kv_heads, shape.tokens * g.head_dim, by_channel=False)


def fraction_bytes(shape: KVShape) -> int:
    """Length of all fractions: eight in as many bytes as one has bits."""
    return -(-shape.values // 8) * FRACTION_BITS[shape.geometry.dtype]


def sums_of(raw: Raw, shape: KVShape) -> Sums:
    """Of each group."""
    groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
    if _is_plain(shape):
        rows = _rows(raw, groups)
        exponents = rows >> fraction & (0x7FFF >> fraction)
        tops, total = exponents.max(axis=1).astype(np.uint8), exponents.sum(axis=1, dtype=np.uint32)
        return Sums(tops, total, (rows >> 15).sum(axis=1, dtype=np.uint32))
    assert loops.library is not None
    sums = Sums(np.empty(groups.number, np.uint8), *np.empty((2, groups.number), np.uint32))
    addresses = (loops.address_of(sums.tops), loops.address_of(sums.exponents), loops.address_of(sums.negatives))
    loops.library.tierd_lossless_sums(_described(raw, shape), *addresses)
    return sums


def split(raw: Raw, shape: KVShape, chosen: Chosen) -> Split:
    """Symbols of the values."""
    groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
    order, tables = chosen.order, chosen.tables & (TABLES - 1)
    counts = np.zeros((int(tables.max()) + 1, 256), np.uint32)
    if _is_plain(shape):
        rows, which = _rows(raw, groups)[order], tables[order]
        exponents = rows >> fraction & (0x7FFF >> fraction)
        far = np.minimum(chosen.tops[order, None] - exponents, ESCAPE)
        symbols = (2 * far + (rows >> 15 ^ (chosen.tables[order] >> 7)[:, None])).astype(np.uint8)
        for table in range(len(counts)):
            counts[table] = np.bincount(symbols[which == table].reshape(-1), minlength=256)
        return Split(symbols.reshape(-1), counts, exponents[far == ESCAPE].astype(np.uint8))
    assert loops.library is not None
    flat, escapes, arrays = loops.scratch("symbols", shape.values), np.empty(0, np.uint8), _places(chosen)
    for _ in range(2):  # the second time with room for the escapes that the first has found
        found = loops.library.tierd_lossless_split(
            *(_described(raw, shape, chosen, *arrays), loops.address_of(flat), loops.address_of(counts)),
            *(loops.address_of(escapes), len(escapes)),
        )
        if found == len(escapes):
            break
        escapes = np.empty(found, np.uint8)
    return Split(flat, counts, escapes)


def pack(raw: Raw, shape: KVShape, data: Bytes) -> None:
    """The fractions, in the order of the block's bytes: lowest bits first."""
    bits = FRACTION_BITS[shape.geometry.dtype]
    if _is_plain(shape):
        words = np.zeros(-(-shape.values // 8) * 8, np.uint16)
        words[: shape.values] = bytes_of(raw, shape).view(np.uint16) & (1 << bits) - 1
        each = np.unpackbits(words.view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")[:, :bits]
        data[:] = np.packbits(each, bitorder="little")
        return
    assert loops.library is not None
    loops.library.tierd_lossless_pack(_described(raw, shape), loops.address_of(data))


def join(raw: Raw, shape: KVShape, chosen: Chosen, coded: Split, fractions: Bytes) -> bool:
    """Writes the values to raw. Returns whether exponents and escapes are possible; counts do not matter."""
    groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
    if not _is_plain(shape):
        assert loops.library is not None
        arrays = _places(chosen)
        return bool(
            loops.library.tierd_lossless_join(
                *(_described(raw, shape, chosen, *arrays), loops.address_of(coded.symbols)),
                *(loops.address_of(coded.escapes), len(coded.escapes), loops.address_of(fractions)),
            )
        )
    symbols, order = coded.symbols.reshape(groups.number, -1), chosen.order
    far = symbols >> 1
    exponents, is_escaped = chosen.tops[order, None].astype(np.int16) - far, far == ESCAPE
    if np.count_nonzero(is_escaped) != len(coded.escapes):
        return False
    exponents[is_escaped] = coded.escapes
    if int(exponents.min()) < 0 or int(exponents.max()) > 0x7FFF >> fraction:
        return False
    rows = np.empty((groups.number, groups.length), np.uint16)
    signs = (symbols & 1 ^ (chosen.tables[order] >> 7)[:, None]).astype(np.uint16)
    rows[order] = exponents.astype(np.uint16) << fraction | signs << 15
    raw[:] = _unrows(rows, shape, groups)
    each = np.zeros((len(fractions) * 8 // fraction, 16), np.uint8)
    each[:, :fraction] = np.unpackbits(fractions, bitorder="little").reshape(-1, fraction)
    flat = bytes_of(raw, shape).view(np.uint16)
    flat |= np.packbits(each, axis=1, bitorder="little").reshape(-1).view(np.uint16)[: shape.values]
    return True


def _is_plain(shape: KVShape) -> bool:
    return loops.library is None or shape.geometry.head_dim % loops.STEP != 0


def _rows(raw: Raw, groups: Groups) -> Words:
    """The values of each group: [groups, length]."""
    order = (0, 1, 3, 4, 2) if groups.by_channel else (0, 1, 3, 2, 4)
    return np.ascontiguousarray(raw.transpose(order)).reshape(groups.number, groups.length)


def _unrows(rows: Words, shape: KVShape, groups: Groups) -> Words:
    layers, pair, tokens, heads, dim = shape.sizes
    if groups.by_channel:
        return rows.reshape(layers, pair, heads, dim, tokens).transpose(0, 1, 4, 2, 3)
    return rows.reshape(layers, pair, heads, tokens, dim).transpose(0, 1, 3, 2, 4)


def _places(chosen: Chosen) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The group at each place, and the place of each group."""
    order = chosen.order.astype(np.uint32)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.uint32)
    return order, places


def _described(raw: Raw, shape: KVShape, chosen: Chosen | None = None, *arrays: NDArray[np.uint32]) -> bytes:
    """TierdLossless of codecs.cpp. arrays: of `_places`; they must live as long."""
    groups, fraction = groups_of(shape), FRACTION_BITS[shape.geometry.dtype]
    known = [0] * 4
    if chosen:
        known = [loops.address_of(chosen.tops), loops.address_of(chosen.tables), *map(loops.address_of, arrays)]
    return loops.described(raw, shape) + _GROUPS.pack(*known, groups.number, groups.length, groups.by_channel, fraction)
