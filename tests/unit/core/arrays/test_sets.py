"""The set functions return the same as numpy's own functions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.arrays.sets import MANY, among, distinct, in_order, kinds, span, starts, tally

NUMBERS = st.lists(st.integers(-3, 12), max_size=40).map(lambda given: np.asarray(given, np.int64))


@given(NUMBERS)
def test_each_once(values: np.ndarray) -> None:
    """Each value comes once, ascending or in first order without negatives. `starts` gives its first
    index."""
    ascending = np.unique(values)
    before = values.copy()
    assert distinct(values).tolist() == ascending.tolist() == kinds(values)
    assert in_order(values).tolist() == list(dict.fromkeys(v for v in values.tolist() if v >= 0))
    assert starts(np.sort(values)).tolist() == np.unique(np.sort(values), return_index=True)[1].tolist()
    each, counts = tally(values)
    assert (each.tolist(), counts.tolist()) == tuple(found.tolist() for found in np.unique(values, return_counts=True))
    assert np.array_equal(values, before)


@given(NUMBERS, NUMBERS)
def test_among(values: np.ndarray, pool: np.ndarray) -> None:
    """`among` marks the values that are in a pool of any size and order."""
    assert np.array_equal(among(values, pool), np.isin(values, pool))
    assert np.array_equal(among(values, pool.tolist()), np.isin(values, pool))


@given(
    st.integers(0, 50),
    st.integers(0, 2 * MANY),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=2),
)
def test_a_span_is_the_same_rows(first: int, count: int, swaps: list[tuple[int, int]]) -> None:
    """`span` selects the same rows of a column as its ids, and is a slice for many consecutive ids."""
    rows = np.arange(first, first + count)
    for one, other in swaps:
        if max(one, other) < count:
            rows[[one, other]] = rows[[other, one]]
    column, expected = np.zeros(first + count + 1, np.int64), np.zeros(first + count + 1, np.int64)
    column[span(rows)], expected[rows] = np.arange(count), np.arange(count)
    assert column.tolist() == expected.tolist()
    is_sorted = bool((rows[1:] > rows[:-1]).all())
    assert isinstance(span(rows), slice) == (count >= MANY and is_sorted)
