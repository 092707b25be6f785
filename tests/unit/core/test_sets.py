"""The set functions give what numpy's own give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.sets import among, distinct, in_order, kinds, starts

NUMBERS = st.lists(st.integers(-3, 12), max_size=40).map(lambda given: np.asarray(given, np.int64))


@given(NUMBERS)
def test_each_once(values: np.ndarray) -> None:
    """Each value once: ascending, or as they first come without what is negative; where each begins in a sorted array."""
    ascending = np.unique(values)
    before = values.copy()
    assert distinct(values).tolist() == ascending.tolist() == kinds(values)
    assert in_order(values).tolist() == list(dict.fromkeys(v for v in values.tolist() if v >= 0))
    assert starts(np.sort(values)).tolist() == np.unique(np.sort(values), return_index=True)[1].tolist()
    assert np.array_equal(values, before)


@given(NUMBERS, NUMBERS)
def test_among(values: np.ndarray, pool: np.ndarray) -> None:
    """Which values are in a pool, whatever its size and order."""
    assert np.array_equal(among(values, pool), np.isin(values, pool))
    assert np.array_equal(among(values, pool.tolist()), np.isin(values, pool))
