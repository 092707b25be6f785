"""Shadows: simulate LRU and the order by worth on a sample of names, to see which finds more.

They are the leaders of set dueling (M. Qureshi et al., "Adaptive Insertion Policies for High
Performance Caching", ISCA 2007, section 5). They take no space in the tier, as in C. Waldspurger et
al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017. duel.py keeps
the tier's own blocks.

A name is in the sample if its number's first bits are 0; one more bit counts whenever the tier
outgrows SAMPLED. Shadows get all uses. They evict their own victims when they hold more than the
tier would hold of the sample. LRU decides at first. The duel counts how many more blocks the order
that does not decide has found, never below 0 (E. Page, "Continuous Inspection Schemes", Biometrika
41, 1954). When chance cannot explain that lead, that order decides.

Memory is bounded, and work by the sampled names of a call. Equal calls give equal answers, whatever
the seed of the keys.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import lengthen
from tierd.core.arrays.sets import firsts, true_rows
from tierd.core.eviction import Ids
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.reuse_index import ReuseIndex
from tierd.policies.reuse import Traffic

SAMPLED = 4096
"""Names that a shadow holds at most."""
BATCH_PART = 64
"""A shadow works on waiting names when they are 1 in so many of those it holds."""
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)  # spreads names that are plain numbers too
PROOF, LEAST = 2.5, 1 / 64
"""A lead is believed from so many standard deviations on, and this share of a shadow's names."""


NAME = np.dtype(
    [
        ("key", "u8"),
        ("spread", "u8"),
        ("group", "u2"),
        ("stamp", "i8"),
        ("used_s", "f8"),
        ("counts", "?"),
        ("here", "?"),
    ]
)
"""A block's name in a use or request: key, number, current group, the tier's stamp, and time.

counts: it matters whether the tier has it. here: the tier reports its use itself.
"""
Names = NDArray[np.void]


def named(keys: NDArray[np.uint64], **columns: object) -> Names:
    """Names of these keys. columns: the others."""
    names = np.zeros(len(keys), NAME)
    names["key"] = keys
    for column, values in columns.items():
        names[column] = values
    return names


class Shadows:
    """leads: whether the order by worth decides. horizon: LRU would hold all stamps from it on. The
    two policies take it for `Blocks`: columns by row instead of id; row 0 is unused."""

    def __init__(self, traffic: Traffic) -> None:
        self.leads, self.horizon, self.most = False, 0, 0
        self._bits, self._size, self._against, self._squares = 0, 0, 0, 0
        self.last_used, self.group = np.zeros(1), np.zeros(1, np.uint16)
        self._key, self._spread = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        self._stamp, self._busy = np.zeros(1, np.int64), np.zeros(1, np.bool_)
        self._row, self._free = dict[int, int](), list[int]()
        self._uses, self._asks, self._waiting = list[Names](), list[Names](), 0
        blocks = cast(Blocks, self)
        self._lru, self._worth = Lru(blocks), ReuseIndex(blocks, traffic)

    def sampled(self, spread: NDArray[np.uint64], size: int) -> Ids:
        """Which of the names are in the sample, of a tier that has so many blocks."""
        while size >> self._bits > SAMPLED:
            self._bits += 1
            rows = np.fromiter(self._row.values(), np.int64)
            self._drop(rows[(self._spread[rows] * _MIX) >> np.uint64(64 - self._bits) > 0])
        self._size = size >> self._bits
        return true_rows((spread * _MIX) >> np.uint64(64 - self._bits) == 0) if self._bits else np.arange(len(spread))

    def use(self, names: Names, now: float) -> None:
        """Sampled names were used in the tier; last of the sequence first."""
        self._uses.append(names)
        self._work_if_due(len(names), now)

    def ask(self, names: Names, now: float) -> None:
        """A request asks for sampled names."""
        self._asks.append(names)
        self._work_if_due(len(names), now)

    # -- inside

    def _work_if_due(self, count: int, now: float) -> None:
        """So many more names wait. The policies take many at once, which costs the same as one."""
        self._waiting += count
        if self._waiting * BATCH_PART >= self._size:
            asks, uses = self._asks, self._uses
            self._asks, self._uses, self._waiting = [], [], 0
            if asks:
                self._ask(np.concatenate(asks), now)
            if uses:
                self._use(np.concatenate(uses), now)

    def _use(self, names: Names, now: float) -> None:
        rows = np.array([self._row.get(key) or self._new_row(key) for key in names["key"].tolist()], np.int64)
        self._write(rows, names)
        self._spread[rows], rows = names["spread"], firsts(rows[::-1])[::-1]
        self._busy[rows] = True
        for policy in (self._lru, self._worth):
            held = rows[policy.has(rows)]
            self._evict(policy, min(len(policy) + len(rows) - self._size, len(policy)) - len(held))
            policy.forget(held)
            policy.track(rows, now)
        self._busy[rows] = False
        oldest = self._lru.victims(1, self._busy)
        self.horizon = 0 if oldest is None else int(self._stamp[oldest[0]])

    def _ask(self, names: Names, now: float) -> None:
        for policy in (self._lru, self._worth):
            self._evict(policy, len(policy) - self._size)
        rows = np.array([self._row.get(key, 0) for key in names["key"].tolist()], np.int64)
        by_lru, by_worth = self._lru.has(rows), self._worth.has(rows)
        counts, away = names["counts"], ~names["here"] & (rows > 0)
        self._judge(int(np.count_nonzero(by_worth & counts)) - int(np.count_nonzero(by_lru & counts)))
        self._write(rows[away], names[away])
        for policy, has in ((self._lru, by_lru), (self._worth, by_worth)):
            policy.touch(firsts(rows[away & has][::-1])[::-1], now)

    def _judge(self, gain: int) -> None:
        """The order by worth found so many more than LRU."""
        self._against = max(0, self._against + (-gain if self.leads else gain))
        self._squares = self._squares + gain * gain if self._against else 0
        if self._against > max(PROOF * math.sqrt(self._squares), LEAST * self._size):
            self.leads, self._against, self._squares = not self.leads, 0, 0

    def _write(self, rows: Ids, names: Names) -> None:
        self.last_used[rows], self.group[rows], self._stamp[rows] = names["used_s"], names["group"], names["stamp"]

    def _evict(self, policy: Lru | ReuseIndex, count: int) -> None:
        """Evicts so many blocks not in use from one shadow."""
        if count > 0:
            gone = policy.victims(count, self._busy)
            assert gone is not None, "a shadow lost count of what it tracks"
            policy.forget(gone)
            self._drop(gone[~(self._lru.has(gone) | self._worth.has(gone))])

    def _drop(self, rows: Ids) -> None:
        for policy in (self._lru, self._worth):
            policy.forget(rows[policy.has(rows)])
        for row, key in zip(rows.tolist(), self._key[rows].tolist(), strict=True):
            del self._row[key]
            self._free.append(row)

    def _new_row(self, key: int) -> int:
        if not self._free:
            old = len(self._key)
            for column in (self.last_used, self.group, self._key, self._spread, self._stamp, self._busy):
                lengthen(column, 2 * old + 64)
            self._free += range(old, 2 * old + 64)
        row = self._row[key] = self._free.pop()
        self._key[row] = key
        return row
