"""Columns that grow in small steps.

Purpose: how a numpy column gets longer. Non-purpose: what is in it. A column is lengthened in place (for large ones the kernel moves the
mapping, nothing is copied), so a step costs only the zeroing of the new rows. Invariant: nobody keeps a view of a column
across a call that may lengthen it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_STEP_ROWS = 256
MOST_STEP_ROWS = 1 << 14


def lengthen(column: NDArray[Any], rows: int, fill: int = 0) -> None:
    """Gives the column so many rows; new ones hold `fill`."""
    old = len(column)
    column.resize((rows, *column.shape[1:]), refcheck=False)
    if fill:
        column[old:] = fill


def rows_for(rows: int, wanted: int) -> int:
    """How long a column of `rows` should become to hold `wanted`: in steps of half its length, within bounds."""
    step = min(max(rows // 2, LEAST_STEP_ROWS), MOST_STEP_ROWS)
    return max(rows + step, wanted)


def runs(*keys: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Indices grouped by equal keys; groups in the order of their first member, members ascending."""
    if len(keys[0]) == 0:
        return []
    if all((key == key[0]).all() for key in keys):
        return [np.arange(len(keys[0]), dtype=np.int64)]
    order = np.lexsort(keys[::-1])
    edge = np.zeros(len(order), dtype=bool)
    for key in keys:
        edge[1:] |= key[order][1:] != key[order][:-1]
    parts = np.split(order, np.flatnonzero(edge))
    return sorted(parts, key=lambda part: int(part[0]))
