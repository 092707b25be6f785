"""Numbers for the blocks of a recording, by first appearance.

Purpose: the same block, the same number; what a block is cannot be told from it. Non-purpose: lines and files (recording.py). Invariants: numbers
begin at 0 and follow one another; a block's hash is not kept, only 8 bytes that depend on it and on secret factors, drawn anew for each recording.

The 8 bytes are the upper halves of two multilinear hashes, each strongly universal in that half (Lemire and Kaser, "Strongly universal string
hashing is fast", 2014): two blocks share them with a chance of 2^-64, whoever chose their hashes; among 8 million blocks, once in half a million recordings.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.columns import lengthen, rows_for
from tierd.core.model import HASH_BYTES
from tierd.core.plan import Bytes, Ids
from tierd.core.table import Table

HALVES = HASH_BYTES // 4
UPPER = np.uint64(0xFFFF_FFFF_0000_0000)


class Numbers:
    """The blocks that have a number; and of each, how often it was looked up and not acquired since, and when last."""

    def __init__(self, *, limit: int) -> None:
        """limit: blocks that can have a number."""
        self.limit = limit
        self.count = 0
        self._lookups: NDArray[np.int32] = np.zeros(1, np.int32)
        self._looked_ms: NDArray[np.int64] = np.zeros(1, np.int64)
        self._keys: NDArray[np.uint64] = np.zeros(1, np.uint64)
        self._table = Table(self._keys)
        self._factors = np.frombuffer(secrets.token_bytes(16 * (HALVES + 2)), np.uint64).reshape(2, HALVES + 2)

    def of(self, hashes: Bytes, namespaces: NDArray[np.uint32]) -> Ids | None:
        """The numbers of these blocks: int64 [n]; new ones are given in order. None where they would be too many, and nothing is changed.

        hashes: uint8 [n, 32]. namespaces: of each.
        """
        keys = self._key(hashes, namespaces)
        ids = self._table.find(keys, lambda rows, _: np.ones(len(rows), np.bool_))
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

    def _key(self, hashes: Bytes, namespaces: NDArray[Any]) -> NDArray[np.uint64]:
        halves = np.ascontiguousarray(hashes).view("<u4")
        high, low = (
            np.einsum("ij,j->i", halves, factors[2:], dtype=np.uint64, casting="unsafe")
            + namespaces.astype(np.uint64) * factors[1]
            + factors[0]
            for factors in self._factors
        )
        keys: NDArray[np.uint64] = (high & UPPER) | (low >> np.uint64(32))
        return keys

    def _add(self, keys: NDArray[np.uint64]) -> None:
        start, self.count = self.count, self.count + len(keys)
        if self.count > len(self._keys):
            rows = rows_for(len(self._keys), self.count)
            for column in (self._keys, self._lookups, self._looked_ms):
                lengthen(column, rows)
        self._keys[start : self.count] = keys
        self._table.insert(np.arange(start, self.count))
