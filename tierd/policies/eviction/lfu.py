"""LFU with dynamic ageing: evicts the block with the fewest uses; every eviction ages the others.

M. Arlitt, L. Cherkasova, J. Dilley, R. Friedrich, T. Jin, "Evaluating Content Management Techniques
for Web Proxy Caches", HP Laboratories HPL-98-173, 1999 (ACM SIGMETRICS PER 27(4), 2000), the
section on replacement policies. This is LFU with Dynamic Aging (LFU-DA) with equal sizes and costs,
as blocks of one size class have:

    on a use of i:    F_i := F_i + 1;  K_i := F_i + L    (F_i is 0 when i comes)
    to make room:     evict the block with the least K, say j;  L := K_j

Without L, plain LFU never evicts blocks that were popular once. L starts at 0 and never falls.
Ties: the least recently used first.

Differences. (1) `victims` only asks, so L moves when the core forgets blocks. (2) A forgotten block
need not be the coldest: pinned ones are passed over, an operator may name any. L becomes the least
K that was tracked, so dropping a hot block does not age all others at once. If the victim is the
coldest, as in the paper, both are the same.

Blocks of equal K form a level with its own order of uses. A chain's blocks lie on few levels, so a
use costs a few numpy calls.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.order import UseOrder, grown


class AgedLfu:
    """Least frequently used with dynamic ageing. Ignores `now`: age is counted in evictions."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: ignored."""
        self._stamps = np.zeros(0, dtype=np.int64)
        self._uses = np.zeros(0, dtype=np.int64)  # F
        self._keys = np.zeros(0, dtype=np.int64)  # K
        self._age = 0  # L
        self._levels: dict[int, UseOrder] = {}
        self._level_counts: dict[int, int] = {}
        self._ascending: list[int] = []  # keys of the levels
        self._next_stamp = 1
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; the first use of each."""
        if not len(blocks):
            return
        size = int(blocks.max()) + 1
        self._stamps, self._uses, self._keys = (grown(c, size) for c in (self._stamps, self._uses, self._keys))
        self._uses[blocks] = 0
        self._use(blocks)
        self._count += len(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        for key, count in _counted(self._keys[blocks]):
            self._leave_level(key, count)
        self._use(blocks)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted; the others age."""
        for key, count in _counted(self._keys[blocks]):
            self._age = max(self._age, self._ascending[0])
            self._leave_level(key, count)
        self._stamps[blocks] = 0
        self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` of least K that are not pinned, coldest first, or None."""
        if count > self._count:
            return None
        found = [np.zeros(0, dtype=np.int64)]
        missing = count
        for key in self._ascending:
            if not missing:
                break
            found.append(self._levels[key].oldest(missing, self._stamps, pinned))
            missing -= len(found[-1])
        return None if missing else np.concatenate(found)

    def _use(self, blocks: Ids) -> None:
        """Counts a use of each and puts it on its new level, in the order given."""
        self._uses[blocks] += 1
        keys = self._uses[blocks] + self._age
        self._keys[blocks] = keys
        for key, count in _counted(keys):
            on_level = blocks if count == len(blocks) else blocks[keys == key]
            self._stamps[on_level] = np.arange(self._next_stamp, self._next_stamp + count)
            self._enter_level(key, on_level)

    def _enter_level(self, key: int, blocks: Ids) -> None:
        if key not in self._levels:
            self._levels[key] = UseOrder()
            self._level_counts[key] = 0
            insort(self._ascending, key)
        self._levels[key].append(blocks, self._next_stamp, self._stamps)
        self._level_counts[key] += len(blocks)
        self._next_stamp += len(blocks)

    def _leave_level(self, key: int, count: int) -> None:
        self._level_counts[key] -= count
        if not self._level_counts[key]:
            del self._levels[key], self._level_counts[key]
            self._ascending.remove(key)


def _counted(keys: Ids) -> Iterator[tuple[int, int]]:
    """Each key and how often it occurs, ascending."""
    values, counts = np.unique(keys, return_counts=True)
    return zip(values.tolist(), counts.tolist(), strict=True)
