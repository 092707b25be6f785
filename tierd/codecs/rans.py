"""Interleaved rANS: entropy coding of small symbols with several tables in one stream.

Range asymmetric numeral systems (Duda, arXiv 1311.2540, section 2.3), with frequencies of 12 bits,
states of 32 bits and words of 16 bits. Symbol i belongs to state i mod lanes, so that one vector
instruction serves many states (Giesen, arXiv 1402.3392, section 3). The number of lanes follows
from the number of symbols. Symbols come in runs, and each run names its table.

A stream has the last state of each lane (uint32), then the words. The encoder goes from the last
symbol to the first, and the decoder reads forwards. All states begin at 2^16. So the decoder ends
there and at the stream's last word, or the stream is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.codecs import loops
from tierd.codecs.values import Bytes
from tierd.errors import CorruptRecord, InvalidArgument

BITS = 12
TOTAL = 1 << BITS
LEAST_STATE = 1 << 16
_RANS = struct.Struct("<8Q")
UNCOUNTED = "rANS: a symbol has frequency 0 in its table; count all symbols first"
LANES = ((1 << 15, 64), (1 << 12, 16), (0, 4))
"""Symbols, and the lanes of a stream with at least so many."""

Frequencies = NDArray[np.uint16]
"""[tables, symbols]: each row sums to 4096."""
Which = NDArray[Any]
"""Integers [runs]: the table of each run."""


class _Tables(NamedTuple):
    """starts: uint64 [tables, symbols], sums of the frequencies before. symbols: uint8 [tables, 4096]."""

    starts: NDArray[np.uint64]
    symbols: Bytes


def lanes_of(count: int) -> int:
    """States of a stream of so many symbols."""
    return next(lanes for least, lanes in LANES if count >= least)


def most_bytes(count: int) -> int:
    """No stream of so many symbols is longer: a symbol takes one word at most."""
    return 4 * lanes_of(count) + 2 * count


def frequencies_of(counts: NDArray[Any]) -> Frequencies:
    """Frequencies for counts of symbols: integers [tables, symbols], at most 256 symbols.

    Symbols that occur have 1 at least. The largest frequencies of a row take what rounding leaves.
    A row without any counts has all of 4096 at symbol 0.
    """
    some = counts.astype(np.int64)
    some[some.sum(axis=1) == 0, 0] = 1
    totals = some.sum(axis=1, keepdims=True)
    scaled = np.where(some > 0, np.maximum(1, (2 * TOTAL * some + totals) // (2 * totals)), 0)
    rows = np.arange(len(scaled))
    while (left := TOTAL - scaled.sum(axis=1)).any():
        at = scaled.argmax(axis=1)
        most = scaled[rows, at] // 16  # not all from one, and it stays above 0
        scaled[rows, at] += np.clip(left, -most, most)
    return scaled.astype(np.uint16)


def encode(symbols: Bytes, frequencies: Frequencies, which: Which, run: int) -> Bytes:
    """The stream of symbols: uint8 [n]. run: symbols per run; the last run may be shorter.
    Raises InvalidArgument for a symbol whose frequency is 0."""
    _check(frequencies, which, run, len(symbols))
    if loops.library is None:
        return _plain_encode(symbols, frequencies, which, run)
    stream = loops.scratch("stream", most_bytes(len(symbols)))
    entries = loops.scratch("tables", 8 * 256 * len(frequencies))
    end = loops.address_of(stream) + len(stream)
    with _described(symbols, len(symbols), frequencies, which, run) as rans:
        length: int = loops.library.tierd_rans_encode(rans, loops.address_of(entries), end)
    if length > len(stream):
        raise InvalidArgument(UNCOUNTED)
    return stream[len(stream) - length :].copy()


def _plain_encode(symbols: Bytes, frequencies: Frequencies, which: Which, run: int) -> Bytes:
    each, table = _tables(frequencies), _table_of_each(which, run, len(symbols))
    own, starts = frequencies.astype(np.uint64), each.starts
    if len(symbols) and not own[table, symbols].all():
        raise InvalidArgument(UNCOUNTED)
    lanes = lanes_of(len(symbols))
    states, words = np.full(lanes, LEAST_STATE, np.uint64), []
    for first in range((len(symbols) - 1) // lanes * lanes, -1, -lanes) if len(symbols) else ():
        part, of = symbols[first : first + lanes], table[first : first + lanes]
        frequency, x = own[of, part], states[: len(part)]
        is_full = x >= frequency << np.uint64(32 - BITS)
        words.append(x[is_full].astype("<u2"))
        x[is_full] >>= np.uint64(16)
        quotient, rest = np.divmod(x, frequency)
        states[: len(part)] = (quotient << np.uint64(BITS)) + rest + starts[of, part]
    return np.concatenate((states.astype("<u4").view(np.uint8), *(word.view(np.uint8) for word in reversed(words))))


def decode(stream: Bytes, into: Bytes, frequencies: Frequencies, which: Which, run: int) -> Bytes:
    """The symbols again, as many as `into` has: uint8 [n]. Raises CorruptRecord unless all of the
    stream fits.

    It reads no byte outside of stream, and takes memory for the tables alone.
    """
    count = len(into)
    lanes = lanes_of(count)
    _check(frequencies, which, run, count)
    if len(stream) < 4 * lanes or len(stream) % 2:
        raise CorruptRecord(f"rANS: {len(stream)} bytes are no stream of {lanes} states; read another copy")
    if loops.library is None:
        return _plain_decode(stream, into, frequencies, which, run)
    entries = loops.scratch("tables", 4 * TOTAL * len(frequencies))
    with _described(into, count, frequencies, which, run) as rans:
        is_whole = loops.library.tierd_rans_decode(
            *(rans, loops.address_of(entries), loops.address_of(stream)),
            *((len(stream) - 4 * lanes) // 2, loops.address_of(into)),
        )
    if not is_whole:
        raise CorruptRecord(f"rANS: the stream does not end with its {count} symbols; read another copy")
    return into


def _plain_decode(stream: Bytes, symbols: Bytes, frequencies: Frequencies, which: Which, run: int) -> Bytes:
    count = len(symbols)
    lanes = lanes_of(count)
    each, table = _tables(frequencies), _table_of_each(which, run, count)
    states = np.frombuffer(stream[: 4 * lanes].tobytes(), "<u4").astype(np.uint64)
    words = np.frombuffer(stream[4 * lanes :].tobytes(), "<u2").astype(np.uint64)
    at = 0
    own, starts, of_slot = frequencies.astype(np.uint64), each.starts, each.symbols
    for first in range(0, count, lanes):
        of = table[first : first + lanes]
        x = states[: len(of)]
        slot = x & np.uint64(TOTAL - 1)
        symbols[first : first + lanes] = part = of_slot[of, slot]
        x[:] = own[of, part] * (x >> np.uint64(BITS)) + slot - starts[of, part]
        is_low = x < LEAST_STATE
        taken = words[at : at + np.count_nonzero(is_low)]
        if len(taken) < np.count_nonzero(is_low):
            raise CorruptRecord(f"rANS: the stream ends at symbol {first} of {count}; read another copy")
        x[is_low] = x[is_low] << np.uint64(16) | taken
        at += len(taken)
    if at != len(words) or (states != LEAST_STATE).any():
        raise CorruptRecord(f"rANS: the stream does not end with its {count} symbols; read another copy")
    return symbols


def _tables(frequencies: Frequencies) -> _Tables:
    wide = frequencies.astype(np.int64)
    tables, size = wide.shape
    symbols = np.repeat(np.tile(np.arange(size, dtype=np.uint8), tables), wide.reshape(-1))
    return _Tables((wide.cumsum(axis=1) - wide).astype(np.uint64), symbols.reshape(tables, TOTAL))


def _table_of_each(which: Which, run: int, count: int) -> NDArray[np.intp]:
    return np.repeat(which, run)[:count].astype(np.intp)


def _check(frequencies: Frequencies, which: Which, run: int, count: int) -> None:
    """Raises InvalidArgument for another number of runs. Raises CorruptRecord for impossible tables,
    and for a table that is not there: both may come from a payload."""
    if frequencies.ndim != 2 or not 0 < frequencies.shape[1] <= 256 or (frequencies.sum(axis=1) != TOTAL).any():
        raise CorruptRecord(f"rANS: a table's frequencies do not sum to {TOTAL}; read another copy")
    if run < 1 or len(which) != -(-count // run):
        raise InvalidArgument(
            f"rANS: {count} symbols in runs of {run} are not {len(which)} runs; give each run a table"
        )
    if count and not 0 <= int(which.min()) <= int(which.max()) < len(frequencies):
        raise CorruptRecord(f"rANS: a run names table {which.max()}, there are {len(frequencies)}; read another copy")


@contextmanager
def _described(symbols: Bytes, count: int, frequencies: Frequencies, which: Which, run: int) -> Iterator[bytes]:
    """TierdRans of codecs.cpp, whose arrays live as long as this."""
    arrays: tuple[NDArray[Any], ...] = (
        *(np.ascontiguousarray(symbols, np.uint8), np.ascontiguousarray(frequencies, np.uint16)),
        np.ascontiguousarray(which, np.uint32),
    )
    yield _RANS.pack(*(loops.address_of(array) for array in arrays), count, *frequencies.shape, run, lanes_of(count))
    del arrays
