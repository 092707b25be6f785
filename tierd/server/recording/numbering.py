"""Numbers for the blocks of a recording, by first appearance.

The same block gets the same number, which does not reveal the block. Numbers begin at 0 without
gaps. Instead of a block's hash, 8 bytes are kept that depend on it and on secret factors. Each
recording draws new factors. Lines and files are made in recording.py.

The 8 bytes are a multilinear hash of namespace and hash (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014). Two of 8 million blocks share them once in half a million
recordings.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.key_numbers import KeyNumbers
from tierd.core.arrays.table import Keys
from tierd.core.formats.model import HASH_BYTES
from tierd.core.plan import Bytes, Ids

HALVES = HASH_BYTES // 4


class Numbers:
    """The numbered blocks, with their lookups without an acquire since, and the last one's time."""

    def __init__(self, *, limit: int) -> None:
        """limit: blocks that can have a number."""
        self.limit = limit
        self._factors = np.frombuffer(secrets.token_bytes(8 * (HALVES + 1)), np.uint64)
        self._blocks = KeyNumbers(limit)
        self._lookups: NDArray[np.int32] = self._blocks.columns.column(np.int32)
        self._looked_ms: NDArray[np.int64] = self._blocks.columns.column(np.int64)

    @property
    def count(self) -> int:
        """Blocks that have a number."""
        return self._blocks.count

    def of(self, hashes: Bytes, namespaces: NDArray[np.uint32]) -> Ids | None:
        """The numbers of these blocks, int64 [n]. New ones are given in order. At the limit, None
        and no change. hashes: uint8 [n, 32]. namespaces: of each."""
        keys = self._keys(hashes, namespaces)
        ids = self._blocks.find(keys)
        new = np.flatnonzero(ids < 0)
        if len(new):
            fresh, first, which = np.unique(keys[new], return_index=True, return_inverse=True)
            if self.count + len(fresh) > self.limit:
                return None
            order = np.argsort(first)
            numbers = np.empty_like(order)
            numbers[order] = self._blocks.add(fresh[order])
            ids[new] = numbers[which]
        return ids

    def note_lookup(self, ids: Ids, at_ms: int, *, after_ms: int) -> None:
        """Counts a lookup of these blocks. Lookups before after_ms are forgotten."""
        self._lookups[ids] = np.where(self._looked_ms[ids] < after_ms, 1, self._lookups[ids] + 1)
        self._looked_ms[ids] = at_ms

    def take_lookup(self, block: int, *, after_ms: int) -> bool:
        """Consumes one lookup of this block since after_ms. False if there is none."""
        is_there = self._looked_ms[block] >= after_ms and self._lookups[block] > 0
        self._lookups[block] -= is_there
        return bool(is_there)

    def _keys(self, hashes: Bytes, namespaces: NDArray[Any]) -> Keys:
        """The blocks' keys: uint64 [n], modulo 2^64."""
        halves = np.ascontiguousarray(hashes).view("<u4")
        sums = np.einsum("ij,j->i", halves, self._factors[1:]) + namespaces.astype(np.uint64) * self._factors[0]
        return np.asarray(sums, np.uint64)
