"""Numbers for the blocks of a recording, by first appearance.

Purpose: the same block, the same number; what a block is cannot be told from it. Non-purpose: lines and files (recording.py). Invariants: numbers
begin at 0 and follow one another; a block's hash is not kept, only 8 bytes that depend on it and on secret factors, drawn anew for each recording.

The 8 bytes are a multilinear hash of namespace and hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014), and they stand for the block:
two of 8 million share them once in half a million recordings. They lie in an open-addressing table, at most half full, probed slot by slot.
Nobody may wait long for the interpreter, so no step takes more than STEP_ROWS rows.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import HASH_BYTES
from tierd.core.plan import Bytes, Ids

HALVES = HASH_BYTES // 4
LEAST_SLOTS = 1 << 12
STEP_ROWS = 1 << 12

Keys = NDArray[np.uint64]


class Numbers:
    """The blocks that have a number; and of each, how often it was looked up and not acquired since, and when last."""

    def __init__(self, *, limit: int) -> None:
        """limit: blocks that can have a number."""
        self.limit = limit
        self.count = 0
        self._factors = np.frombuffer(secrets.token_bytes(8 * (HALVES + 1)), np.uint64)
        self._slots = _Slots(LEAST_SLOTS)
        self._lookups: NDArray[np.int32] = np.zeros(LEAST_SLOTS // 2, np.int32)
        self._looked_ms: NDArray[np.int64] = np.zeros(LEAST_SLOTS // 2, np.int64)

    def of(self, hashes: Bytes, namespaces: NDArray[np.uint32]) -> Ids | None:
        """The numbers of these blocks: int64 [n]; new ones are given in order. None where they would be too many, and nothing is changed.

        hashes: uint8 [n, 32]. namespaces: of each.
        """
        keys = self._keys(hashes, namespaces)
        ids = self._slots.find(keys)
        new = np.flatnonzero(ids < 0)
        if len(new):
            fresh, first, which = np.unique(keys[new], return_index=True, return_inverse=True)
            if self.count + len(fresh) > self.limit:
                return None
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            ids[new] = self.count + rank[which]
            self._add(fresh[order])
        return ids

    def note_lookup(self, ids: Ids, at_ms: int, *, after_ms: int) -> None:
        """These blocks were looked up; what was before after_ms is forgotten."""
        self._lookups[ids] = np.where(self._looked_ms[ids] < after_ms, 1, self._lookups[ids] + 1)
        self._looked_ms[ids] = at_ms

    def take_lookup(self, block: int, *, after_ms: int) -> bool:
        """Whether there is a lookup of this block since after_ms that was not taken yet; it is taken."""
        is_there = self._looked_ms[block] >= after_ms and self._lookups[block] > 0
        self._lookups[block] -= is_there
        return bool(is_there)

    def _keys(self, hashes: Bytes, namespaces: NDArray[Any]) -> Keys:
        """Of blocks: uint64 [n], modulo 2^64; never 0."""
        halves = np.ascontiguousarray(hashes).view("<u4")
        sums = np.einsum("ij,j->i", halves, self._factors[1:]) + namespaces.astype(np.uint64) * self._factors[0]
        return np.asarray(sums | np.uint64(1), np.uint64)

    def _add(self, keys: Keys) -> None:
        """Gives new keys the next numbers."""
        start, self.count = self.count, self.count + len(keys)
        slots = len(self._slots.keys)
        while self.count * 2 > slots:
            slots *= 2
        if slots > len(self._slots.keys):
            self._slots = self._slots.copied(slots)
            self._lookups, self._looked_ms = (lengthened(c, slots // 2) for c in (self._lookups, self._looked_ms))
        self._slots.put(keys, np.arange(start, self.count, dtype=np.int32))


class _Slots:
    """keys uint64 [slots], 0: free; ids int32 [slots]. Their number is a power of two."""

    def __init__(self, count: int) -> None:
        self.keys: Keys = np.zeros(count, np.uint64)
        self.ids: NDArray[np.int32] = np.zeros(count, np.int32)
        self._mask = count - 1
        self._shift = np.uint64(64 - (count - 1).bit_length())

    def find(self, keys: Keys) -> Ids:
        """The id with each key, else -1: int64 [n]."""
        at = self._homes(keys)
        there, out = self.keys.take(at), self.ids.take(at).astype(np.int64)
        rows = np.flatnonzero(there != keys)  # most keys are in their first slot
        while len(rows):
            out[rows] = -1
            rows = rows[there[rows] != 0]
            at[rows] = (at[rows] + 1) & self._mask
            there[rows] = self.keys[at[rows]]
            is_hit = there[rows] == keys[rows]
            out[rows[is_hit]] = self.ids[at[rows[is_hit]]]
            rows = rows[~is_hit]
        return out

    def put(self, keys: Keys, ids: NDArray[np.int32]) -> None:
        """Places distinct absent keys. Of two that meet in a slot one stays, the other goes on."""
        at = self._homes(keys)
        while len(keys):
            is_free = self.keys[at] == 0
            self.keys[at[is_free]] = keys[is_free]
            has_won = self.keys[at] == keys
            self.ids[at[has_won]] = ids[has_won]
            keys, ids, at = keys[~has_won], ids[~has_won], (at[~has_won] + 1) & self._mask

    def copied(self, count: int) -> _Slots:
        """The same in more slots."""
        more = _Slots(count)
        for start in range(0, len(self.keys), STEP_ROWS):
            part = slice(start, start + STEP_ROWS)
            used = np.flatnonzero(self.keys[part])
            more.put(self.keys[part][used], self.ids[part][used])
        return more

    def _homes(self, keys: Keys) -> Ids:
        return (keys >> self._shift).astype(np.int64)


def lengthened(column: NDArray[Any], rows: int) -> NDArray[Any]:
    """A copy with so many rows, new ones 0; memory that nobody writes to is not taken."""
    longer = np.zeros(rows, column.dtype)
    for start in range(0, len(column), STEP_ROWS):
        part = slice(start, start + STEP_ROWS)
        if column[part].any():
            longer[part][: len(column[part])] = column[part]
    return longer
