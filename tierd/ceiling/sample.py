"""The sample: the blocks that the miniatures know, one row each.

A block is in the sample if the first `bits` bits of its mixed hash are 0. So the same blocks are in
it in every request, as in C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST
2015, section 3. Policies take the sample for `Blocks`: columns by row instead of id; row 0 is
unused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import lengthen
from tierd.core.arrays.sets import true_rows
from tierd.core.eviction import Ids

Words = NDArray[np.uint64]

_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd; spreads hashes that are plain numbers too


def mixed(hashes: Words) -> Words:
    """Evenly spread numbers of the first words of hashes: uint64 [n]."""
    return np.asarray(hashes * _MIX, np.uint64)


class Sample:
    """See the module. most: rows at most, as policies expect it of `Blocks`."""

    def __init__(self, most: int) -> None:
        self.most, self.bits = most, 0
        self.last_used, self.group = np.zeros(1), np.zeros(1, np.uint16)
        self.is_short, self.pins = np.zeros(1, np.bool_), np.zeros(1, np.bool_)
        """is_short: the block is a partial last one. pins: none; policies ask for them."""
        self._name, self._free = np.zeros(1, np.uint64), list[int]()
        self._rows = dict[int, int]()

    def __len__(self) -> int:
        """How many blocks it knows."""
        return len(self._rows)

    def chosen(self, names: Words, bits: int | None = None) -> Ids:
        """Which of these mixed names are in the sample, or in one of another rate."""
        bits = self.bits if bits is None else bits
        return true_rows(names < np.uint64(1 << (64 - bits))) if bits else np.arange(len(names))

    def rows(self, names: Words) -> tuple[Ids, NDArray[np.bool_]]:
        """The rows of names, and which were known before this call or stand further ahead in it."""
        known, found = np.ones(len(names), np.bool_), np.empty(len(names), np.int64)
        for i, name in enumerate(names.tolist()):
            row = self._rows.get(name, 0)
            if not row:
                row, known[i] = self._new_row(name), False
            found[i] = row
        return found, known

    def thin(self) -> Ids:
        """Halves the rate. Returns the rows of the blocks that leave the sample; `drop` them next."""
        self.bits += 1
        rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        return rows[(self._name[rows] >> np.uint64(64 - self.bits)) > 0]

    def drop(self, rows: Ids) -> None:
        """Forgets the blocks of these rows."""
        for row, name in zip(rows.tolist(), self._name[rows].tolist(), strict=True):
            del self._rows[name]
            self._free.append(row)

    def _new_row(self, name: int) -> int:
        if not self._free:
            old = len(self._name)
            for column in (self.last_used, self.group, self.is_short, self.pins, self._name):
                lengthen(column, 2 * old + 64)
            self._free += range(old, 2 * old + 64)
        row = self._rows[name] = self._free.pop()
        self._name[row] = name
        return row
