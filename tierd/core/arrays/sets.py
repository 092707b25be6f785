"""Sets of whole numbers in numpy arrays of some hundred elements, the size of one request.

`np.unique` hashes, `np.isin` makes tables: ten times slower than sorting a thousand numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
Mask = NDArray[np.bool_] | np.bool_
MANY = 1024
"""The least number of rows that `span` examines."""
FEW = 4
"""At most so many are compared one after another."""


def true_rows(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indices at which a mask [n] is true: `np.flatnonzero` without its five inner calls."""
    return mask.nonzero()[0]


def some(mask: Mask) -> bool:
    """Whether any is true, in a third of the time of `mask.any()`."""
    return bool(np.count_nonzero(mask))


def every(mask: Mask) -> bool:
    """Whether all are true, in a third of the time of `mask.all()`."""
    return int(np.count_nonzero(mask)) == mask.size


def span(rows: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """A slice for MANY or more consecutive rows, else the rows unchanged. numpy reads slices
    several times as fast, but may return a view."""
    if len(rows) < MANY or rows[-1] - rows[0] != len(rows) - 1 or not every(rows[1:] - rows[:-1] == 1):
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def distinct(values: Numbers) -> Numbers:
    """Each value once, ascending. It may be the array itself."""
    if len(values) < 2 or every(values[1:] > values[:-1]):
        return values
    values = np.sort(values)
    return values[starts(values)]


def firsts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each value once, in order of first occurrence."""
    return np.fromiter(dict.fromkeys(values.tolist()), np.int64)


def tally(values: Numbers) -> tuple[Numbers, NDArray[np.int64]]:
    """Each value once, ascending, and how often it occurs."""
    if len(values) < 2 or every(values[1:] > values[:-1]):
        return values, np.ones(len(values), np.int64)
    values = np.sort(values)
    firsts = starts(values)
    counts = np.empty(len(firsts), np.int64)
    np.subtract(firsts[1:], firsts[:-1], out=counts[:-1])
    counts[-1] = len(values) - firsts[-1]
    return values[firsts], counts


def kinds(values: Numbers) -> list[int]:
    """Each value once, ascending; for arrays with few different values, such as tiers."""
    if len(values) == 0:
        return []
    if every(values == values[0]):
        return [int(values[0])]
    return sorted(set(values.tolist()))


def starts(values: Numbers) -> NDArray[np.int64]:
    """Index in sorted values of the first of each run of equal ones."""
    first = np.empty(len(values), bool)
    first[:1] = True
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return true_rows(first)


def in_order(values: Numbers) -> Numbers:
    """Each value that is not negative, once, by first occurrence. May be the array itself."""
    ascending = distinct(values)
    if len(ascending) == len(values) and (len(values) == 0 or ascending[0] >= 0):
        return values
    order = values.argsort(kind="stable")
    firsts = values[np.sort(order[starts(values[order])])]
    return firsts[firsts >= 0]


def among(values: Numbers, pool: Numbers | Sequence[int]) -> NDArray[np.bool_]:
    """Which of the values are in the pool."""
    if len(pool) <= FEW:
        out = np.zeros(values.shape, bool)
        for one in pool:
            out |= values == one
        return out
    ascending = np.sort(np.asarray(pool))
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending[at] == values, bool)
