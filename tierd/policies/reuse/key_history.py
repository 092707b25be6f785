"""Key history: numbers remembered for block names, whether the blocks are still held or not.

traffic.py gives the numbers their meaning. Names live in two halves. A name that is asked for is in
the young half. When that is full it becomes the old one, and the old one's names are forgotten. So
at least the last `limit / 2` names are known, and never more than `limit`.

Names are the blocks' keys of 8 bytes (blocks.py). Two names with one key share their numbers, which
only causes a wrong guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.key_numbers import KeyNumbers
from tierd.core.arrays.sets import every, some
from tierd.core.arrays.table import Keys

Rows = NDArray[np.int64]

HISTORY = np.dtype(
    [
        ("asked", "<u2"),  # Sessions that asked for it.
        ("group", "<u2"),  # That its last use put it into.
        ("part", "<i4"),  # Of the request that used it last, as the learner numbers them; -1 none.
    ]
)
_UNKNOWN = np.array((0, 0, -1), HISTORY)


@dataclass(frozen=True, slots=True)
class Recalled:
    """Remembered numbers of names, HISTORY [n], and their rows in the young half (-1: none)."""

    numbers: NDArray[np.void]
    rows: Rows


class _Half(KeyNumbers):
    """Names, and their numbers by row."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.numbers = self.columns.column(HISTORY)


class KeyHistory:
    """See the module."""

    def __init__(self, limit: int) -> None:
        """limit: names."""
        self._half_limit = max(1, limit // 2)
        self._young, self._old = _Half(self._half_limit), _Half(self._half_limit)

    def __len__(self) -> int:
        """Names in memory; one that was asked for again lately may count twice."""
        return self._young.count + self._old.count

    def recall(self, keys: Keys) -> Recalled:
        """HISTORY [n] of distinct names; of an unknown name all zero, with part -1."""
        rows = self._young.find(keys)
        young = rows >= 0
        if every(young):
            return Recalled(self._young.numbers.take(rows), rows)
        found = np.full(len(keys), _UNKNOWN)
        found[young] = self._young.numbers[rows[young]]
        if self._old.count:
            missing = np.flatnonzero(~young)
            at = self._old.find(keys[missing])
            found[missing[at >= 0]] = self._old.numbers[at[at >= 0]]
        return Recalled(found, rows)

    def note(self, keys: Keys, numbers: NDArray[np.void], rows: Rows | None = None) -> None:
        """Remembers HISTORY [n] of distinct names. rows: as recalled, if still valid."""
        if self._young.count + len(keys) > self._half_limit and self._young.count:
            self._old, self._young, rows = self._young, _Half(self._half_limit), np.full(len(keys), -1, np.int64)
        rows = self._young.find(keys) if rows is None else rows
        new = rows < 0
        if some(new):
            rows[new] = self._young.add(keys[new])
        self._young.numbers[rows] = numbers
