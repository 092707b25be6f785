"""Copies between lists of buffers: every byte where it belongs, whatever lies beside what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.client import buffers
from tierd.streaming import STREAMING

LONG = STREAMING.from_bytes

LENGTHS = st.lists(st.sampled_from([0, 1, 7, 4096, LONG - 1, LONG, LONG + 65]), max_size=8)


def laid_out(lengths: list[int], gaps: list[int], *, fill: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A memory, and pieces of it of these lengths, each so far behind the one before; a gap below 0: in a memory of its own."""
    whole = np.full(sum(lengths) + sum(max(gap, 0) for gap in gaps) + 1, fill, np.uint8)
    out, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        if gap < 0:
            out.append(np.full(length, fill, np.uint8))
            continue
        at += gap
        out.append(whole[at : at + length])
        at += length
    return whole, out


@given(data=st.data(), lengths=LENGTHS)
def test_every_byte_where_it_belongs(data: st.DataObject, lengths: list[int]) -> None:
    """However sources and targets lie, each target has its source's bytes, and nothing beside them is touched."""
    gaps = st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=len(lengths), max_size=len(lengths))
    _, sources = laid_out(lengths, data.draw(gaps), fill=0)
    for number, source in enumerate(sources):
        source[:] = np.arange(len(source), dtype=np.uint64) * 31 + number
    whole, targets = laid_out(lengths, data.draw(gaps), fill=255)
    expected = whole.copy()
    for target, source in zip(targets, sources, strict=True):
        if len(target) and np.shares_memory(target, whole):
            at = target.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            expected[at : at + len(source)] = source
    buffers.copy_all(targets, sources)
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert np.array_equal(whole, expected)


def test_neighbours_go_at_once() -> None:
    """Pieces that lie side by side on both sides are one copy."""
    _, sources = laid_out([4096] * 6, [0, 0, 0, 1, 0, 0], fill=1)
    _, targets = laid_out([4096] * 6, [0] * 6, fill=2)
    to, at = ([buffers.address_of(piece) for piece in pieces] for pieces in (targets, sources))
    assert list(buffers._runs(to, at, [4096] * 6)) == [(0, 3), (3, 6)]


def test_lengths_that_differ() -> None:
    """Nothing is copied into a target of another length."""
    with pytest.raises(ValueError, match="copy 0: 4 bytes into 5"):
        buffers.copy_all([np.zeros(5, np.uint8)], [np.zeros(4, np.uint8)])


@pytest.mark.parametrize("sealed", [0, 1])
def test_what_is_read_only_is_not_written(sealed: int) -> None:
    """However many pieces go at once, none of them that is read-only is written to."""
    _, sources = laid_out([4096] * 2, [0] * 2, fill=1)
    whole, targets = laid_out([4096] * 2, [0] * 2, fill=2)
    targets[sealed].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        buffers.copy_all(targets, sources)
    assert (whole == 2).all()
