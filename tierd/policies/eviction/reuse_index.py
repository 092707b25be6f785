"""Reuse index: evicts the block with the least expected use per second of keeping it.

The setting `reuse-index` is duel.py, which uses this order or LRU.

A block's worth follows from its group (features of the request that used it last) and its age since
then, in any tier. Demotion into a tier is no use. The package `tierd.policies.reuse` learns the
table of worths, which all tiers of a core share. A worth is a Gittins index: J. C. Gittins, "Bandit
Processes and Dynamic Allocation Indices", Journal of the Royal Statistical Society B 41(2), 1979.
For a cache it is the hit density of N. Beckmann, H. Chen, A. Cidon, "LHD: Improving Cache Hit Rate
by Maximizing Hit Density", NSDI 2018, section 3, with the best horizon per block.

Blocks of one group that were used and came in the same tick form a run (`runs.py`) and are worth
the same. So some thousand runs are sorted (`ranking.py`), not blocks. The order is that of the last
tick: within a tick only new runs are added. In a run, and between runs worth the same, the oldest
use is evicted first. A run's worth is looked up when its age reaches the next step of the table, or
the table is new. Nothing is ranked before a caller asks.
"""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.ranking import Ranking
from tierd.policies.eviction.runs import FEW, NOWHERE, SOON, Runs
from tierd.policies.reuse import Traffic
from tierd.policies.reuse.traffic import ABOVE, KEPT

TICK_S = 1.0
"""The greatest age of an order of runs."""
_GROUPS = 1 << 16
_SCANNED_RUNS = 16
"""Least number of runs looked at in one numpy step."""
_SORTED_RUNS = 2048
"""Up to so many runs, a full sort is faster than insertions."""
_STEPS = 16
"""Members looked at one by one, before numpy looks at many."""
SERIAL_BITS = 33
"""Of a key; the bits above are the worth as float32, never negative, so bits compare alike."""
_EARLY_S = 1e-3
"""A worth is looked up this long before it changes, so rounding makes it never late."""
_FLOAT, _BITS = struct.Struct("=f"), struct.Struct("=I")


class ReuseIndex:
    """The clock is that of the last call that gave one."""

    def __init__(self, blocks: Blocks, traffic: Traffic, *, is_above: bool = False) -> None:
        """traffic: has put every block into a group, `blocks.group`. is_above: whether the tier is
        above stores that wear."""
        self._blocks, self._traffic, self._is_above = blocks, traffic, is_above
        if is_above:
            traffic.above.append(self._move)
        self._count = 0
        self._runs, self._ranking = Runs(blocks.most), Ranking()
        self._tick_s, self._ranked_s = -np.inf, -np.inf
        self._version = -1

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        if len(blocks):
            self._runs.make_room(1 + (blocks.item() if len(blocks) == 1 else int(blocks.max())))
            self._count += len(blocks)
            self._join(blocks, now)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        if len(blocks):
            self._runs.leave(blocks)
            self._join(blocks, now)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        if len(blocks):
            self._runs.forget(blocks)
            self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` worth least that are not pinned, least first, or None."""
        found = self.some(min(count, self._count), pinned)
        return found if len(found) == count else None

    def some(self, count: int, pinned: Mask) -> Ids:
        """The first `count` of them, or all if there are fewer."""
        if self._runs.begun or self._ranked_s != self._tick_s or self._version != self._traffic.version:
            self._rank()
        found = self._first(count, pinned) if count <= FEW else []
        return np.array(found, np.int64) if len(found) == count else self._search(count, pinned)

    def has(self, blocks: Ids) -> Mask:
        """Which of the blocks are tracked."""
        return self._runs.are_in(blocks)

    def end(self) -> None:
        """Observes stores no more."""
        if self._is_above:
            self._traffic.above.remove(self._move)

    # -- inside

    def _join(self, blocks: Ids, now: float) -> None:
        if now >= self._tick_s + TICK_S:
            self._tick_s = now
            if self._runs.close() >> (SERIAL_BITS - 1):
                self._runs.renumber()
                self._version = -1
        last_used, group = self._blocks.last_used, self._blocks.group
        if self._is_above and self._traffic.thresholds:
            marked = group[blocks] + self._blocks.kept[blocks].astype(np.int64) * KEPT + ABOVE
            self._runs.join(blocks, np.floor(last_used[blocks] / TICK_S).astype(np.int64) * _GROUPS + marked)
        elif len(blocks) <= FEW:
            for block in blocks.tolist():
                kin = math.floor(last_used.item(block) / TICK_S) * _GROUPS + group.item(block)
                self._runs.join_one(block, kin)
        else:
            kins = np.floor(last_used.take(blocks) / TICK_S).astype(np.int64)
            kins *= _GROUPS
            kins += group.take(blocks)
            self._runs.join(blocks, kins)

    def _move(self, blocks: Ids) -> None:
        """A store got or lost these blocks: they are worth less here, or more."""
        if self._traffic.thresholds:
            self.touch(blocks[self._runs.are_in(blocks)][::-1], self._tick_s)

    def _first(self, count: int, pinned: Mask) -> list[int]:
        """The first of the order, if it takes few steps."""
        if count == 1:
            row = self._ranking.first(self._runs.key)
            if row is not None and not pinned.item(block := self._runs.first(row)):
                return [block]
        found: list[int] = []
        walk = itertools.chain.from_iterable(map(self._runs.walk, self._ranking.walk(self._runs.key)))
        for block in itertools.islice(walk, _STEPS if count else 0):
            if block != NOWHERE and not pinned.item(block):
                found.append(block)
                if len(found) == count:
                    break
        return found

    def _search(self, count: int, pinned: Mask) -> Ids:
        runs, found, missing = self._runs, [np.zeros(0, np.int64)], count
        self._ranking.settle(runs.key)
        rows, keys, at, step = self._ranking.rows, self._ranking.keys, 0, _SCANNED_RUNS
        while missing and at < len(rows):
            those = rows[at : at + step]
            live = np.flatnonzero(runs.key[those] == keys[at : at + step])
            enough = int(np.searchsorted(np.cumsum(runs.alive[those[live]]), missing)) + 1
            at, step = at + (int(live[enough - 1]) + 1 if enough <= len(live) else step), 2 * step
            blocks = runs.alive_in(those[live[:enough]])
            found.append(blocks[~pinned[blocks]][:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def _rank(self) -> None:
        """Brings the order up to date."""
        runs, ranking = self._runs, self._ranking
        if self._version != self._traffic.version:
            self._price(rows := np.flatnonzero(runs.alive))
            ranking.renew(rows, runs.key)
        elif self._ranked_s != self._tick_s:
            changed = self._price(np.flatnonzero(runs.due_s <= self._tick_s))
            if len(ranking.rows) > _SORTED_RUNS:
                ranking.insert(changed, runs.key)
            else:
                ranking.renew(np.flatnonzero(runs.alive), runs.key)
        elif len(runs.begun) > FEW:
            ranking.insert(self._price(np.flatnonzero(runs.due_s == SOON)), runs.key)
        else:
            for row in runs.begun:
                if runs.due_s.item(row) == SOON:
                    self._price_one(row)
                    ranking.insert_one(row, runs.key)
        runs.begun.clear()
        self._version, self._ranked_s = self._traffic.version, self._tick_s

    def _price(self, rows: Ids) -> Ids:
        """Writes the keys of runs; returns the rows whose key changed."""
        runs, (ticks, groups) = self._runs, np.divmod(self._runs.kin[rows], _GROUPS)
        used_s = ticks * TICK_S
        worths, changes_s = self._traffic.prices(groups, np.maximum(self._tick_s - used_s, 0.0))
        keys = (worths.view(np.uint32).astype(np.uint64) << np.uint64(SERIAL_BITS)) + runs.serial[rows].view(np.uint64)
        changed: Ids = rows[keys != runs.key[rows]]
        runs.key[rows], runs.due_s[rows] = keys, used_s + changes_s - _EARLY_S
        return changed

    def _price_one(self, row: int) -> None:
        tick, group = divmod(self._runs.kin.item(row), _GROUPS)
        used_s = tick * TICK_S
        worth, changes_s = self._traffic.price(group, max(self._tick_s - used_s, 0.0))
        bits: int = _BITS.unpack(_FLOAT.pack(worth))[0]
        self._runs.key[row] = (bits << SERIAL_BITS) + self._runs.serial.item(row)
        self._runs.due_s[row] = used_s + changes_s - _EARLY_S
