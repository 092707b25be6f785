"""Multiples of a step as symbols, escapes and low bits. FORMAT.md has their order."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.product import Multiples
from tierd.codecs.rans import Frequencies
from tierd.codecs.values import Bytes
from tierd.errors import CorruptRecord

SYMBOLS = 64
ESCAPE, CENTRE = SYMBOLS - 1, SYMBOLS // 2 - 1
MOST_SHIFT = 12
_MULTIPLES = struct.Struct("<5Q")


class Coding(NamedTuple):
    """How coefficients are coded.

    tables: uint8 [coefficients]. shifts: uint8 [coefficients], how many low bits stay as they are.
    known: uint8 [tables, SYMBOLS], 255 for symbols with a frequency, else 0.
    """

    tables: NDArray[np.uint8]
    shifts: NDArray[np.uint8]
    known: NDArray[np.uint8]


def known_of(frequencies: Frequencies) -> NDArray[np.uint8]:
    """`Coding.known` of tables."""
    return np.where(frequencies > 0, np.uint8(255), np.uint8(0))


class Split(NamedTuple):
    """symbols: uint8 [coefficients, tokens]; scratch memory, until the next call. low: packed bits.
    escapes: int16."""

    symbols: Bytes
    low: Bytes
    escapes: NDArray[np.int16]


def low_bytes(coding: Coding, tokens: int) -> int:
    """Length of the low bits."""
    return (int(coding.shifts.sum()) * tokens + 7) // 8


def split(q: Multiples, coding: Coding) -> Split:
    """The parts of q: contiguous."""
    if loops.library is None:
        return _plain_split(q, coding)
    symbols = loops.scratch("symbols", q.size).reshape(q.shape)
    escapes = loops.scratch("escapes", 2 * q.size).view(np.int16)
    low = np.zeros(low_bytes(coding, q.shape[1]) + 8, np.uint8)
    count = loops.library.tierd_transform_split(
        *(_described(coding, q.shape[1]), loops.address_of(q), loops.address_of(symbols)),
        *(loops.address_of(low), loops.address_of(escapes)),
    )
    return Split(symbols, low[:-8], escapes[:count])


def _plain_split(q: Multiples, coding: Coding) -> Split:
    high = q >> coding.shifts[:, None]
    symbols = symbols_of(high).astype(np.uint8)
    symbols[coding.known[coding.tables[:, None], symbols] == 0] = ESCAPE
    planes = [(q[coding.shifts > bit] >> bit & 1).astype(np.uint8).reshape(-1) for bit in range(coding.shifts.max())]
    low = np.packbits(np.concatenate(planes), bitorder="little") if planes else np.empty(0, np.uint8)
    return Split(symbols, low, high[symbols == ESCAPE])


def join(parts: Split, coding: Coding) -> Multiples:
    """q again. Raises CorruptRecord for another number of escapes, and for multiples beyond int16."""
    symbols, low, escapes = parts
    if loops.library is None:
        return _plain_join(parts, coding)
    q = np.empty_like(symbols, np.int16)
    is_good = loops.library.tierd_transform_join(
        *(_described(coding, len(symbols[0])), loops.address_of(symbols), loops.address_of(low)),
        *(loops.address_of(escapes), len(escapes), loops.address_of(q)),
    )
    return _checked(q, len(escapes), is_good=bool(is_good))


def _plain_join(parts: Split, coding: Coding) -> Multiples:
    symbols, low, escapes = parts
    tokens = len(symbols[0])
    q = symbols.astype(np.int32) - CENTRE
    is_far = symbols == ESCAPE
    if np.count_nonzero(is_far) != len(escapes):
        return _checked(q, len(escapes), is_good=False)
    q[is_far] = escapes
    bits = np.unpackbits(low, bitorder="little")
    q <<= coding.shifts[:, None]
    first = 0
    for bit in range(coding.shifts.max()):
        has = np.flatnonzero(coding.shifts > bit)
        q[has] |= bits[first : first + len(has) * tokens].reshape(-1, tokens).astype(np.int32) << bit
        first += len(has) * tokens
    return _checked(q, len(escapes), is_good=bool((q == q.astype(np.int16)).all()))


def _checked(q: NDArray[Any], escapes: int, *, is_good: bool) -> Multiples:
    if not is_good:
        raise CorruptRecord(
            f"codec transform: {escapes} escapes are not those of its symbols, or too large; read another copy"
        )
    return q.astype(np.int16, copy=False)


def symbols_of(high: NDArray[Any]) -> NDArray[Any]:
    """Symbols of coefficients without their low bits: around CENTRE, or ESCAPE."""
    return np.where(np.abs(high) > CENTRE, ESCAPE, high + CENTRE)


def _described(coding: Coding, tokens: int) -> bytes:
    """TierdMultiples of codecs.cpp."""
    tables, shifts, known = (loops.address_of(each) for each in coding)
    return _MULTIPLES.pack(tables, shifts, known, len(coding.tables), tokens)
