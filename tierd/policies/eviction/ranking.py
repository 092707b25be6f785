"""Ranking: rows in the order of their keys, some of which change.

It finds the run that is worth least. An entry is a row with the key that it had when it was
inserted. If the row's key in the column has changed since, the entry is stale and skipped. So a
change is an insertion, and a run that ends needs no work. Single rows go into a short sorted list
beside the long arrays, and are merged into them when it is full.

Keys ascend; 0 means no key. Each row has at most one entry that is not stale. All entries before
`_head` are stale.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]

MOST_SINGLE = 256
_END = (1 << 64, -1)


class Ranking:
    """See the module."""

    def __init__(self) -> None:
        self._single: list[tuple[int, int]] = []  # (key, row)
        self._head = 0
        self._set(np.zeros(0, np.uint64), np.zeros(0, np.int64))

    def renew(self, rows: NDArray[np.int64], key: Column) -> None:
        """Replaces the content by these rows. key: by row."""
        keys = key[rows]
        order = np.argsort(keys)
        self._single.clear()
        self._set(keys[order], rows[order])

    def insert(self, rows: NDArray[np.int64], key: Column) -> None:
        """Inserts rows whose keys changed since they were inserted, or that are new."""
        single = [row for known, row in self._single if key.item(row) == known]
        fresh = np.concatenate((np.array(single, np.int64), rows))
        fresh = fresh[np.argsort(key[fresh])]
        keep = self._head + np.flatnonzero(key[self.rows[self._head :]] == self.keys[self._head :])
        keys, at = self.keys[keep], np.searchsorted(self.keys[keep], key[fresh])
        self._single.clear()
        self._set(np.insert(keys, at, key[fresh]), np.insert(self.rows[keep], at, fresh))

    def insert_one(self, row: int, key: Column) -> None:
        """Inserts one row."""
        insort(self._single, (key.item(row), row))
        if len(self._single) > MOST_SINGLE:
            self.settle(key)

    def settle(self, key: Column) -> None:
        """Moves single rows into `keys` and `rows`."""
        if self._single:
            self.insert(np.zeros(0, np.int64), key)

    def first(self, key: Column) -> int | None:
        """The row with the least key, None if there is none."""
        self._drop_stale(key)
        if self._head == len(self._keys_at):
            return self._single[0][1] if self._single else None
        if self._single and self._single[0][0] < self._keys_at[self._head]:
            return self._single[0][1]
        return self._rows_at[self._head]

    def walk(self, key: Column) -> Iterator[int]:
        """The rows from the least key on; no row may be inserted meanwhile."""
        self._drop_stale(key)
        at, single = self._head, iter(self._single)
        one = next(single, _END)
        while at < len(self._keys_at) or one is not _END:
            if at < len(self._keys_at) and self._keys_at[at] < one[0]:
                known, row = self._keys_at[at], self._rows_at[at]
                at += 1
            else:
                (known, row), one = one, next(single, _END)
            if key.item(row) == known:
                yield row

    def _drop_stale(self, key: Column) -> None:
        at = self._head
        while at < len(self._keys_at) and key.item(self._rows_at[at]) != self._keys_at[at]:
            at += 1
        self._head = at
        while self._single and key.item(self._single[0][1]) != self._single[0][0]:
            del self._single[0]

    def _set(self, keys: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
        self.keys, self.rows, self._head = keys, rows, 0
        self._keys_at, self._rows_at = keys.data, rows.data
