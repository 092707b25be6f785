"""Hash table from 64-bit keys to dense ids: numpy, vectorised over batches, growing in steps.

Callers compare keys in full; the table compares their upper 33 bits. A bucket is one cache line of
8 words. A word is those 33 bits above id + 1. It is 0 if its slot was never used; its lower 31 bits
are 0 if the id was removed. The uppermost bits of a key name its home bucket. If that is full,
probing steps 1, 2, 3, ... buckets on and reaches every bucket. A word knows its home in any size of
the table, so growth reads no key. The memory of a larger array is touched ahead of need. Later
changes each move some entries, so no call pays for all; meanwhile both arrays are searched.

An id is in one of the two arrays, once. No bucket on the way from its home to its own has a slot
that is 0. In a bucket, no slot after a 0 is used. At most 3 in 4 slots of the array that takes
inserts are not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import every, some, true_rows

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]
Same = Callable[[Ids, Ids], NDArray[np.bool_]]
"""(rows of the question, candidate ids) -> whether they are equal in full."""

WIDTH_BITS = 3
WIDTH = 1 << WIDTH_BITS
"""Slots of a bucket."""
LEAST_SLOTS = 1024
FULL = 3 / 4
"""The share of slots in use at which a larger array takes over."""
AHEAD = 5 / 8
"""The share at which the larger array's memory begins to be touched."""
STEP_AT_LEAST = 2048
MOVED_PER_CHANGE = 8
MADE_PER_CHANGE = 24
"""Slots moved per id inserted or removed; slots touched per id inserted.

The least that suffices: 1 / FULL / FULL, and 2 / (FULL - AHEAD) = 16.
"""
_ID_BITS = np.uint64(31)
_ID = np.uint64((1 << 31) - 1)
_TAG = ~_ID
_REMOVED = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class _Search:
    """A question: tags and out (ids found, else -1) of all its rows."""

    tags: Keys
    same: Same
    out: Ids

    def note(self, rows: Ids, which: Ids, ids: Ids, on: NDArray[np.bool_]) -> None:
        """Compares the candidates `ids` of `rows[which]` in full. Matching rows stop searching."""
        hit = self.same(rows.take(which), ids)
        found = which[hit]
        self.out[rows[found]] = ids[hit]
        on[found] = False


class _Slots:
    """One array of slots; their number is a power of two."""

    def __init__(self, words: Keys) -> None:
        """words: all 0, from `_words_for`."""
        self.words = words
        self.mask = np.int64(len(self.words) - 1)
        self.shift = np.uint64(64 - (len(self.words) - 1).bit_length())
        self.used = 0

    def homes(self, keys: Keys) -> Ids:
        return (keys >> self.shift).astype(np.int64)

    def put(self, marks: Keys) -> None:
        """Inserts distinct absent words. If two meet at one slot, the loser tries again."""
        flat, at = self.words.reshape(-1), self.homes(marks)
        step = np.zeros(len(marks), np.int64)
        while True:
            slots = at * WIDTH + ((self.words.take(at, axis=0) & _ID) == 0).argmax(axis=1)
            old = flat.take(slots)
            is_open = (old & _ID) == 0
            flat[slots[is_open]] = marks[is_open]
            won = is_open & (flat.take(slots) == marks)
            self.used += int(np.count_nonzero(won & (old == 0)))
            if every(won):
                return
            step += ~is_open
            at = (at + step * ~is_open) & self.mask
            marks, at, step = marks[~won], at[~won], step[~won]

    def find(self, keys: Keys, same: Same) -> Ids:
        """The ids, -1 for absent keys. Fast if all are in their home buckets, once."""
        tags = keys & _TAG
        at = self.homes(tags)
        there = self._candidates(at, tags)
        flat = there.ravel()
        likely = true_rows(flat < _ID)
        ids, which = flat.take(likely).astype(np.int64), likely >> WIDTH_BITS
        if len(which) == len(keys) and every(same(which, ids)):  # no row twice: each row has one candidate
            return ids
        search = _Search(tags, same, np.full(len(keys), -1, dtype=np.int64))
        on = there[:, -1] + np.uint64(1) != tags
        if len(which):
            search.note(np.arange(len(keys)), which, ids, on)
        rows = true_rows(on)
        self._walk(search, rows, (at.take(rows) + 1) & self.mask, step=1)
        return search.out

    def find_more(self, keys: Keys, same: Same, rows: Ids, out: Ids) -> None:
        """Writes the ids of these rows to `out`, if they are in this array."""
        tags = keys & _TAG
        self._walk(_Search(tags, same, out), rows, self.homes(tags.take(rows)), step=0)

    def _walk(self, search: _Search, rows: Ids, at: Ids, *, step: int) -> None:
        """Searches bucket after bucket. step: how many full buckets the rows have passed."""
        tags = search.tags.take(rows)
        while len(rows):
            step += 1
            there = self._candidates(at, tags)
            on = there[:, -1] + np.uint64(1) != tags
            flat = there.ravel()
            likely = true_rows(flat < _ID)
            if len(likely):
                search.note(rows, likely >> WIDTH_BITS, flat.take(likely).astype(np.int64), on)
            if not some(on):
                return
            rows, tags = rows[on], tags[on]
            at = (at[on] + step) & self.mask

    def _candidates(self, at: Ids, tags: Keys) -> Keys:
        """The words of these buckets: a word with the tag becomes its id, any other is greater."""
        there: Keys = self.words.take(at, axis=0)
        there ^= tags[:, None]
        there -= np.uint64(1)
        return there

    def remove(self, marks: Keys) -> NDArray[np.bool_]:
        """Removes the words. Returns which of them were present."""
        found = np.zeros(len(marks), dtype=bool)
        rows, at, step = np.arange(len(marks)), self.homes(marks), 0
        while len(rows):
            step += 1
            there = self.words.take(at, axis=0)
            hits = true_rows((there == marks[rows, None]).ravel())
            which = hits // WIDTH
            self.words[at[which], hits % WIDTH] = _REMOVED
            found[rows[which]] = True
            on = there[:, -1] != 0
            on[which] = False
            rows = rows[on]
            at = (at[on] + step) & self.mask
        return found


class Table:
    """See the module."""

    def __init__(self) -> None:
        self._slots = _Slots(_words_for(LEAST_SLOTS))
        self._old: _Slots | None = None
        self._moved = 0
        self._next: Keys | None = None
        self._made = 0
        self.count = 0

    def find(self, keys: Keys, same: Same) -> Ids:
        """The id with each key for which `same` holds, else -1. Candidates share 33 bits."""
        out = self._slots.find(keys, same)
        if self._old is not None:
            self._old.find_more(keys, same, true_rows(out < 0), out)
        return out

    def insert(self, ids: Ids, keys: Keys) -> None:
        """Adds distinct absent ids, below 2^31 - 1."""
        if len(ids) == 0:
            return
        self._make_room(len(ids))
        self._slots.put(_marks(ids, keys))
        self.count += len(ids)
        self._move(len(ids))

    def expect(self, count: int) -> None:
        """Makes the array for so many more ids now, at startup."""
        slots = 1 << int((self.count + count) / AHEAD).bit_length()
        if slots > self._slots.words.size:
            self._move(None)
            self._old, self._moved, self._next = self._slots, 0, None
            self._slots = _Slots(_words_for(slots))
            self._move(None)

    def remove(self, ids: Ids, keys: Keys) -> None:
        """Removes present ids, which were inserted with these keys."""
        marks = _marks(ids, keys)
        found = self._slots.remove(marks)
        if self._old is not None and not found.all():
            found[~found] = self._old.remove(marks[~found])
        assert found.all(), "an id to remove is not in the table"
        self.count -= len(ids)
        self._move(len(ids))

    def ids(self) -> Ids:
        """Every id in the table, ascending."""
        parts = [slots.words.ravel() & _ID for slots in (self._slots, self._old) if slots is not None]
        marks = np.concatenate(parts).astype(np.int64)
        return np.sort(marks[marks > 0] - 1)

    def _make_room(self, count: int) -> None:
        """Before so many are added: touches some of the next array, or switches to it."""
        used, size = self._slots.used + count, self._slots.words.size
        if used <= AHEAD * size:
            return
        wanted = max(LEAST_SLOTS, 2 * (self.count + count))
        if self._next is None or 2 * self._next.size < 3 * (
            self.count + count
        ):  # it was made for fewer ids than have been added since
            self._next, self._made = _words_for(1 << (wanted - 1).bit_length()), 0
        if used > FULL * size:
            self._move(None)
            self._old, self._moved = self._slots, 0
            self._slots, self._next = _Slots(self._next), None
        else:
            step = max(STEP_AT_LEAST, MADE_PER_CHANGE * count) // WIDTH
            self._next[self._made : self._made + step] = 0  # the kernel gives the memory at its first touch
            self._made += step

    def _move(self, count: int | None) -> None:
        """Moves some of the old array to the new one, by the number of ids changed; None: all."""
        if self._old is None:
            return
        words = self._old.words
        step = len(words) if count is None else max(STEP_AT_LEAST, MOVED_PER_CHANGE * count) // WIDTH
        window = words[self._moved : self._moved + step]
        is_there = (window & _ID) > 0
        self._slots.put(window[is_there])
        window[is_there] = _REMOVED
        self._moved += step
        if self._moved >= len(words):
            self._old = None


def _marks(ids: Ids, keys: Keys) -> Keys:
    """The words of these ids and keys."""
    return (keys & _TAG) | (ids + 1).astype(np.uint64)


def _words_for(slots: int) -> Keys:
    """Zeros for so many slots, uint64 [slots / 8, 8]; each bucket is one cache line."""
    words = np.zeros(slots + WIDTH, np.uint64)
    skip = (-words.ctypes.data // words.itemsize) % WIDTH
    return words[skip : skip + slots].reshape(-1, WIDTH)
