"""Open-addressing table from 64-bit keys to dense ids, in numpy, vectorised over batches, grown in small steps.

Purpose: where is the id with this key. Non-purpose: what makes two keys the same thing; the caller compares in full. A slot holds
0 (never used), -1 (used once, removed) or id + 1; probing steps 1, 2, 3, ... slots on, which meets every slot. Growth makes a second array and moves some thousand
slots with each change, so no call pays for the whole; meanwhile both are searched.

Invariants: an id is in one of the two arrays, once; on the way from its home slot to its slot no slot is 0; `keys[id]` does not change
while the id is in the table; at most half of the slots of the array that takes inserts are not 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]
Same = Callable[[Ids, Ids], NDArray[np.bool_]]
"""(rows of the question, candidate ids) -> whether they are the same in full."""

LEAST_SLOTS = 1024
MOVED_AT_LEAST = 2048
MOVED_PER_CHANGE = 8
_SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)


class _Slots:
    """One array of slots; its length is a power of two."""

    def __init__(self, count: int) -> None:
        self.ids = np.zeros(count, dtype=np.int32)
        self.mask = np.int64(count - 1)
        self.shift = np.uint64(64 - (count - 1).bit_length())
        self.used = 0

    def homes(self, keys: Keys) -> Ids:
        return ((keys * _SPREAD) >> self.shift).astype(np.int64)

    def put(self, ids: Ids, keys: Keys) -> None:
        """Places distinct absent ids. Two that meet at one slot: the later writer stays, the other goes on."""
        slots = self.homes(keys)
        marks = (ids + 1).astype(np.int32)
        step = 0
        while len(marks):
            step += 1
            there = self.ids[slots]
            open_ = np.flatnonzero(there <= 0)
            at = slots[open_]
            self.ids[at] = marks[open_]
            won = self.ids[at] == marks[open_]
            self.used += int(np.count_nonzero(won & (there[open_] == 0)))
            left = np.ones(len(marks), dtype=bool)
            left[open_[won]] = False
            marks = marks[left]
            slots = (slots[left] + step) & self.mask

    def remove(self, ids: Ids, keys: Keys) -> NDArray[np.bool_]:
        """Which of the ids were here; they are no more."""
        found = np.zeros(len(ids), dtype=bool)
        rows = np.arange(len(ids))
        slots = self.homes(keys)
        step = 0
        while len(rows):
            step += 1
            there = self.ids[slots]
            hit = there == ids[rows] + 1
            self.ids[slots[hit]] = -1
            found[rows[hit]] = True
            on = ~hit & (there != 0)
            rows = rows[on]
            slots = (slots[on] + step) & self.mask
        return found


class Table:
    """See the module. `keys` is the caller's column: keys[id] is the key of an id."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._slots = _Slots(LEAST_SLOTS)
        self._old: _Slots | None = None
        self._moved = 0
        self.count = 0

    def find(self, keys: Keys, same: Same) -> Ids:
        """The id with each key for which `same` holds, else -1."""
        out = np.full(len(keys), -1, dtype=np.int64)
        self._search(self._slots, keys, same, out)
        if self._old is not None:
            self._search(self._old, keys, same, out)
        return out

    def insert(self, ids: Ids) -> None:
        """Adds distinct absent ids, whose keys are in the column already."""
        if len(ids) == 0:
            return
        self._make_room(len(ids))
        self._slots.put(ids, self._keys[ids])
        self.count += len(ids)
        self._move(max(MOVED_AT_LEAST, MOVED_PER_CHANGE * len(ids)))

    def remove(self, ids: Ids) -> None:
        """Removes present ids."""
        keys = self._keys[ids]
        found = self._slots.remove(ids, keys)
        if self._old is not None and not found.all():
            found[~found] = self._old.remove(ids[~found], keys[~found])
        assert found.all(), "an id to remove is not in the table"
        self.count -= len(ids)
        self._move(max(MOVED_AT_LEAST, MOVED_PER_CHANGE * len(ids)))

    def ids(self) -> Ids:
        """Every id in the table, ascending."""
        parts = [slots.ids[slots.ids > 0] for slots in (self._slots, self._old) if slots is not None]
        return np.sort(np.concatenate(parts).astype(np.int64) - 1)

    def _search(self, slots: _Slots, keys: Keys, same: Same, out: Ids) -> None:
        rows = np.flatnonzero(out < 0)
        wanted = keys[rows]
        at = slots.homes(wanted)
        step = 0
        while len(rows):
            step += 1
            there = slots.ids[at]
            likely = np.flatnonzero((self._keys[there - 1] == wanted) & (there > 0))
            on = there != 0
            if len(likely):
                ids = there[likely].astype(np.int64) - 1
                hit = same(rows[likely], ids)
                out[rows[likely[hit]]] = ids[hit]
                on[likely[hit]] = False
            rows, wanted = rows[on], wanted[on]
            at = (at[on] + step) & slots.mask

    def _make_room(self, count: int) -> None:
        if (self._slots.used + count) * 2 <= len(self._slots.ids):
            return
        self._move(None)
        wanted = max(LEAST_SLOTS, 3 * (self.count + count), len(self._slots.ids) // 2)
        self._old, self._moved = self._slots, 0
        self._slots = _Slots(1 << (wanted - 1).bit_length())

    def _move(self, limit: int | None) -> None:
        """Moves up to `limit` slots of the old array to the new one; None: all that are left."""
        if self._old is None:
            return
        stop = len(self._old.ids) if limit is None else min(self._moved + limit, len(self._old.ids))
        window = self._old.ids[self._moved : stop]
        ids = window[window > 0].astype(np.int64) - 1
        window[window > 0] = -1
        self._slots.put(ids, self._keys[ids])
        self._moved = stop
        if stop == len(self._old.ids):
            self._old = None
