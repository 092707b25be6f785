"""Numpy columns that grow in small steps.

If the number of rows is known, `roomy` makes them all at once: rows take no memory before they are
written. A longer column grows in place. Nothing is copied, but the kernel may move the mapping page
by page. For forty columns of ten million rows that takes tens of milliseconds. No caller keeps a
view of a column across a call that may lengthen it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import every, true_rows

LEAST_STEP_ROWS = 256
MOST_STEP_ROWS = 1 << 14
MOST_ROWS = 1 << 24
"""At most so many rows are made at once."""
_MADV_NOHUGEPAGE = 15
_PAGE_BYTES = 4096
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def roomy(dtype: Any, rows: int, *, width: int = 0) -> NDArray[Any]:
    """Zeros [rows] or [rows, width], whose memory comes 4 KiB at a time. With numpy's huge pages,
    forty columns would take 80 MiB for one block."""
    column = np.zeros((rows, width) if width else rows, dtype)
    begin = -(-column.ctypes.data // _PAGE_BYTES) * _PAGE_BYTES
    whole = (column.ctypes.data + column.nbytes - begin) // _PAGE_BYTES * _PAGE_BYTES
    if whole > 0:
        _libc.madvise(begin, whole, _MADV_NOHUGEPAGE)
    return column


class Columns:
    """Columns of one table. rows: how many of them are initialised; an array may be longer."""

    def __init__(self, most: int = 0) -> None:
        """most: expected number of rows."""
        self.rows = 0
        self._most = min(most, MOST_ROWS)
        self._all: list[tuple[NDArray[Any], int]] = []

    def column(self, dtype: Any, *, width: int = 0, fill: int = 0) -> NDArray[Any]:
        """A new column. New rows hold `fill`."""
        array = roomy(dtype, self._most, width=width)
        self._all.append((array, fill))
        self._prepare(array, fill, 0)
        return array

    def lengthen(self, rows: int) -> None:
        """Lengthens every column to so many rows."""
        first, self.rows = self.rows, rows
        for array, fill in self._all:
            self._prepare(array, fill, first)

    def _prepare(self, array: NDArray[Any], fill: int, first: int) -> None:
        if self.rows > len(array):
            lengthen(array, self.rows)
        if fill:
            array[first : self.rows] = fill


def lengthen(column: NDArray[Any], rows: int) -> None:
    """Lengthens the column to so many rows; new ones hold zeros."""
    column.resize((rows, *column.shape[1:]), refcheck=False)


def rows_for(rows: int, wanted: int) -> int:
    """New length of a column of `rows` that must hold `wanted`: half as long again, bounded."""
    step = min(max(rows // 2, LEAST_STEP_ROWS), MOST_STEP_ROWS)
    return max(rows + step, wanted)


def runs(*keys: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Indices grouped by equal keys; groups in the order of their first member, members ascending."""
    if len(keys[0]) == 0:
        return []
    if all(every(key == key[0]) for key in keys):
        return [np.arange(len(keys[0]), dtype=np.int64)]
    order = np.lexsort(keys[::-1])
    edge = np.zeros(len(order), dtype=bool)
    for key in keys:
        edge[1:] |= key[order][1:] != key[order][:-1]
    parts = np.split(order, true_rows(edge))
    return sorted(parts, key=lambda part: int(part[0]))
