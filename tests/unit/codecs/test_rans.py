"""Interleaved rANS: symbols come back, near the entropy, and no stream makes the decoder read further."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import count
from tierd.codecs import rans
from tierd.codecs.rans import TOTAL, decode, encode, frequencies_of, lanes_of, most_bytes
from tierd.errors import CorruptRecord, InvalidArgument

Stream = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Symbols, frequencies, tables of the runs, symbols per run."""


def counted(symbols: np.ndarray, which: np.ndarray, run: int, tables: int, size: int = 256) -> np.ndarray:
    """How often each symbol occurs in the runs of each table."""
    counts = np.zeros((tables, size), np.int64)
    np.add.at(counts, (np.repeat(which, run)[: len(symbols)], symbols), 1)
    return counts


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Streams of any length, in any runs and tables."""
    size = draw(st.sampled_from([0, 1, 3, 63, 64, 65, 500, 4095, 4096, 4101, 32_767, 32_768, 33_000]))
    run = draw(st.sampled_from([1, 5, 16, 64, 256]))
    tables, most = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 17, 256]))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    which = chance.integers(0, tables, -(-size // run))
    symbols = np.minimum(chance.geometric(draw(st.sampled_from([0.02, 0.4, 0.999])), size) - 1, most - 1).astype(
        np.uint8
    )
    return symbols, frequencies_of(counted(symbols, which, run, tables, most)), which, run


@settings(max_examples=count(test=60, nightly=5_000, weekly=50_000), deadline=None)
@given(stream=streams())
def test_symbols_come_back(stream: Stream) -> None:
    """Any symbols in any tables come back, and no stream is longer than promised."""
    symbols, frequencies, which, run = stream
    coded = encode(symbols, frequencies, which, run)
    assert len(coded) <= most_bytes(len(symbols))
    assert np.array_equal(decode(coded, np.empty(len(symbols), np.uint8), frequencies, which, run), symbols)


@settings(max_examples=count(test=60, nightly=5_000, weekly=50_000), deadline=None)
@given(stream=streams(), data=st.data())
def test_damaged_streams_are_refused(stream: Stream, data: st.DataObject) -> None:
    """A stream that is cut or extended is refused. One with other bits is refused or gives other
    symbols."""
    symbols, frequencies, which, run = stream
    coded = encode(symbols, frequencies, which, run)
    cut = data.draw(st.integers(0, len(coded) - 1))
    for bad in (coded[:cut], np.append(coded, np.zeros(2, np.uint8))):
        with pytest.raises(CorruptRecord):
            decode(bad, np.empty(len(symbols), np.uint8), frequencies, which, run)
    bad = coded.copy()
    bad[data.draw(st.integers(0, len(coded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CorruptRecord):
        assert not np.array_equal(decode(bad, np.empty(len(symbols), np.uint8), frequencies, which, run), symbols)


@settings(max_examples=count(test=60, nightly=5_000, weekly=50_000), deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 1 << 40), min_size=256, max_size=256), min_size=1, max_size=3))
def test_frequencies(rows: list[list[int]]) -> None:
    """Each row sums to 4096, and has 1 at least for what occurs and 0 for what does not."""
    counts = np.array(rows)
    found = frequencies_of(counts)
    assert (found.sum(axis=1) == TOTAL).all()
    occurs = counts.any(axis=1)
    assert np.array_equal(found[occurs] > 0, counts[occurs] > 0)


@pytest.mark.parametrize(("size", "more"), [(1_000, 0.12), (20_000, 0.02), (400_000, 0.01)])
def test_streams_are_near_the_entropy(size: int, more: float) -> None:
    """A stream is at most so many bits per symbol longer than the entropy of its counts."""
    symbols = (np.random.default_rng(0).geometric(0.35, size) - 1).astype(np.uint8)
    which = np.zeros(1, np.uint8)
    counts = counted(symbols, which, size, 1)
    shares = counts[counts > 0] / size
    coded = encode(symbols, frequencies_of(counts), which, size)
    assert 8 * len(coded) / size <= -(shares * np.log2(shares)).sum() + more


def test_the_bytes_of_a_stream() -> None:
    """A small stream has these bytes: later versions must decode what this one wrote."""
    frequencies = np.array([[1024, 3072], [4095, 1]], np.uint16)
    symbols = np.array([0, 1, 1, 0, 0, 0, 1, 1], np.uint8)
    coded = encode(symbols, frequencies, np.array([0, 1]), 4)
    assert coded.tobytes().hex() == "1000040010580100ff6b5515ff330040"


@pytest.mark.parametrize("sizes", [(0, 4), (4095, 4), (4096, 16), (32_767, 16), (32_768, 64)])
def test_lanes(sizes: tuple[int, int]) -> None:
    """Short streams have few lanes: each costs four bytes."""
    assert lanes_of(sizes[0]) == sizes[1]


def test_refusals_name_the_fault() -> None:
    """Impossible tables, runs and symbols are refused by name."""
    half = np.array([[2048, 2048]], np.uint16)
    stream = encode(np.zeros(4, np.uint8), half, np.zeros(1, np.uint8), 4)
    with pytest.raises(CorruptRecord, match="do not sum to 4096"):
        decode(stream, np.empty(4, np.uint8), np.array([[2048, 2047]], np.uint16), np.zeros(1, np.uint8), 4)
    with pytest.raises(CorruptRecord, match="names table 1, there are 1"):
        decode(stream, np.empty(4, np.uint8), half, np.ones(1, np.uint8), 4)
    with pytest.raises(InvalidArgument, match="are not 2 runs"):
        decode(stream, np.empty(4, np.uint8), half, np.zeros(2, np.uint8), 4)
    with pytest.raises(InvalidArgument, match="frequency 0"):
        encode(np.ones(4, np.uint8), np.array([[4096, 0]], np.uint16), np.zeros(1, np.uint8), 4)
    assert rans.encode(np.zeros(0, np.uint8), half, np.zeros(0, np.uint8), 4).nbytes == 16
