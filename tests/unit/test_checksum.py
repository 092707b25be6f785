"""Checksums of slices and slice tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiers.store_world import table_digest
from tierd.checksum import (
    raw_tables,
    record_checksum,
    slice_sums,
    sums_of_views,
    table_digests,
    verify,
)
from tierd.errors import InvalidArgument


def test_sums_are_xxh3_as_published() -> None:
    """The algorithm is XXH3 with seed 0, and digests are in its canonical byte order."""
    assert record_checksum(b"") == 0x2D06800538D394C2
    assert slice_sums(b"", [0]).tolist() == [0x2D06800538D394C2]
    assert table_digest(np.zeros(0, dtype="<u8")).hex() == "99aa06d3014798d86001c324468d497f"


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.data())
def test_any_changed_bit_is_noticed(lengths: list[int], data: st.DataObject) -> None:
    """A block with any one changed bit fails verification; bytes behind its slices do not matter."""
    block = bytearray(np.random.default_rng(sum(lengths)).bytes(sum(lengths) + 16))
    sums = slice_sums(block, lengths)
    block[sum(lengths)] ^= 1
    assert verify(block, sums, lengths)
    bit = data.draw(st.integers(0, sum(lengths) * 8 - 1))
    block[bit // 8] ^= 1 << bit % 8
    assert not verify(block, sums, lengths)


def test_slices_are_summed_one_by_one() -> None:
    """Each sum depends only on its own slice, so slices can be verified separately."""
    block = np.arange(100, dtype=np.uint8)
    sums = slice_sums(memoryview(block), [60, 40])
    assert sums.tolist() == [record_checksum(block[:60].tobytes()), record_checksum(block[60:].tobytes())]


def test_wrong_sizes_are_not_verified() -> None:
    """A view shorter than the slices, or a table of another length, fails; summing such a view is refused."""
    sums = slice_sums(bytes(64), [32, 32])
    assert not verify(bytes(63), sums, [32, 32])
    assert not verify(bytes(64), sums[:1], [32, 32])
    with pytest.raises(InvalidArgument, match="63"):
        slice_sums(bytes(63), [32, 32])


def test_order_of_the_table_matters_to_the_digest() -> None:
    """Two exchanged slices give another digest."""
    sums = np.array([1, 2], dtype="<u8")
    assert table_digest(sums) != table_digest(sums[::-1])


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=5), st.integers(0, 3))
def test_many_views_are_summed_as_each_alone(cuts: list[list[int]], spare: int) -> None:
    """Many views give the same sums and digests as one at a time, with any cuts and any spare bytes."""
    views = [memoryview(np.random.default_rng(i).bytes(sum(cut) + spare)) for i, cut in enumerate(cuts)]
    tables = sums_of_views(views, cuts)
    assert [table.tolist() for table in tables] == [
        slice_sums(view, cut).tolist() for view, cut in zip(views, cuts, strict=True)
    ]
    assert table_digests(raw_tables(tables)).tobytes() == b"".join(map(table_digest, tables))


@pytest.mark.parametrize("cuts", [[[8], [9]], [[4, 4], [9]]])
def test_a_view_that_is_too_short_is_refused_among_many(cuts: list[list[int]]) -> None:
    """A view that ends before its slices raises, as it would alone."""
    with pytest.raises(InvalidArgument, match="9 bytes in all, but the page has 8"):
        sums_of_views([memoryview(bytes(8))] * 2, cuts)
