"""Ghosts: the names of evicted blocks, in lists from the oldest to the newest.

They let a policy recognize blocks that return. A name is `Blocks.keys`, 64 bits of a keyed hash:
ids are reused, keys are not. Among ten million names two collide once in ten thousand runs of a
daemon; a new block then counts as returned. A key is in one list at most.
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.columns import lengthen, rows_for
from tierd.core.arrays.table import Keys, Table
from tierd.core.eviction import Ids
from tierd.policies.eviction.queues import Queues


class Ghosts:
    """See the module. The policy numbers the lists."""

    def __init__(self) -> None:
        self._keys = np.zeros(0, dtype=np.uint64)
        self._free = np.zeros(0, dtype=np.int64)
        self._free_count = 0
        self._rows = 0
        self._lengthen(1)
        self._table = Table()
        self._lists = Queues()

    def size(self, number: int = 0) -> int:
        """How many keys are in a list."""
        return self._lists.size(number)

    def remember(self, keys: Keys, number: int = 0) -> None:
        """Distinct keys become the newest of a list, in this order."""
        if not len(keys):
            return
        self.recall(keys)
        rows = self._new_rows(len(keys))
        self._keys[rows] = keys
        self._table.insert(rows, keys)
        self._lists.put(rows, number)

    def recall(self, keys: Keys) -> Ids:
        """The number of each key's list, -1 if it is in none; removes the keys from their lists."""
        rows = self._table.find(keys, lambda asked, found: np.asarray(keys[asked] == self._keys[found], np.bool_))
        out = np.full(len(keys), -1, dtype=np.int64)
        known = rows >= 0
        out[known] = self._lists.queue[rows[known]]
        self._drop(rows[known])
        return out

    def trim(self, limit: int, number: int = 0) -> None:
        """Forgets the oldest of a list until `limit` are left."""
        extra = self.size(number) - max(0, limit)
        found: list[Ids] = []
        for rows in self._lists.walk(number) if extra > 0 else ():
            found.append(rows[:extra])
            extra -= len(found[-1])
            if not extra:
                break
        for rows in found:
            self._drop(rows)

    def _drop(self, rows: Ids) -> None:
        if len(rows):
            self._table.remove(rows, self._keys[rows])
            self._lists.remove(rows)
            self._free[self._free_count : self._free_count + len(rows)] = rows
            self._free_count += len(rows)

    def _new_rows(self, count: int) -> Ids:
        reused = min(count, self._free_count)
        self._free_count -= reused
        old = self._free[self._free_count : self._free_count + reused].copy()
        self._lengthen(self._rows + count - reused)
        fresh = np.arange(self._rows, self._rows + count - reused)
        self._rows += count - reused
        return np.concatenate((old, fresh))

    def _lengthen(self, wanted: int) -> None:
        if wanted > len(self._keys):
            rows = rows_for(len(self._keys), wanted)
            lengthen(self._keys, rows)
            lengthen(self._free, rows)
