"""The bounded memory of the latest names."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierd.policies.reuse.key_history import HISTORY, KeyHistory


def keys(*names: int) -> np.ndarray:
    return np.array(names, np.uint64)


def numbers(names: np.ndarray, turn: int) -> np.ndarray:
    out = np.zeros(len(names), HISTORY)
    out["asked"], out["part"] = turn + 1, names
    return out


def test_what_is_not_known_is_nothing() -> None:
    """An unknown name has zeros and no part."""
    found = KeyHistory(8).recall(keys(1, 2)).numbers
    assert found["asked"].tolist() == [0, 0] and found["part"].tolist() == [-1, -1]


@given(turns=st.lists(st.lists(st.integers(1, 40), unique=True, max_size=8), max_size=30), limit=st.integers(16, 40))
def test_the_latest_are_remembered_and_no_more_than_the_limit(turns, limit):
    """The latest names, half the limit, have their last numbers. The memory never exceeds the limit."""
    history, last = KeyHistory(limit), {}
    for turn, names in enumerate(turns):
        rows = history.recall(keys(*names)).rows if turn % 2 else None  # rows are given, or looked up
        history.note(keys(*names), numbers(keys(*names), turn), rows)
        for name in names:
            last.pop(name, None)
            last[name] = turn
        assert len(history) <= limit
    fresh = list(last)[-(limit // 2 - 8) :] if limit // 2 > 8 else []
    found = history.recall(keys(*fresh)).numbers
    assert found["asked"].tolist() == [last[name] + 1 for name in fresh]
    assert found["part"].tolist() == fresh
