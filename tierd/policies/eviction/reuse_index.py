"""Reuse index: the block of which the least use can be expected per second of keeping it leaves first.

What a block is worth follows from its group (what is known of the request that used it last) and its age since then, wherever it lies: coming into a
tier by demotion is no use. The table of worths is learned by
`tierd.policies.reuse`, which all tiers of a core share, and is a Gittins index: J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", Journal of
the Royal Statistical Society B 41(2), 1979; for a cache, the hit density of N. Beckmann, H. Chen, A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit
Density", NSDI 2018, section 3, with the best horizon in place of one that the whole cache shares.

Blocks of one group that were used in the same tick, and came so, form a run, and are worth the same; so what is sorted is runs, some thousand, and not blocks. The order is
that at the last tick: within a tick nothing but new runs is put into it. In a run, and between runs worth the same, what was used
longest ago leaves first. Runs that have lost most of their blocks are packed when they are met.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.blocks import Blocks
from tierd.core.columns import lengthen, rows_for
from tierd.core.eviction import Ids, Mask
from tierd.policies.reuse import Traffic

TICK_S = 1.0
"""How old an order of runs may become."""
_GROUPS = 1 << 16
_FIRST_MEMBERS = 16
_FIRST_RUNS = 64
_SCANNED_RUNS = 16
"""Least number of runs looked at in one numpy step."""
NOWHERE = -1
Column = NDArray[Any]


@dataclass(slots=True)
class Members:
    """Blocks in the order of their use, int32; some may have gone since."""

    blocks: NDArray[np.int32] = field(default_factory=lambda: np.zeros(_FIRST_MEMBERS, np.int32))
    size: int = 0

    def append(self, blocks: Ids) -> Ids:
        """Adds them; their places."""
        stop = self.size + len(blocks)
        if stop > len(self.blocks):
            self.blocks = np.resize(self.blocks, max(stop, 2 * len(self.blocks)))
        self.blocks[self.size : stop] = blocks
        places = np.arange(self.size, stop)
        self.size = stop
        return places


class ReuseIndex:
    """See the module. The clock is that of the last call that told one."""

    def __init__(self, blocks: Blocks, traffic: Traffic) -> None:
        """traffic: the learner that has put every block into a group, `blocks.group`."""
        self._blocks, self._traffic = blocks, traffic
        self._count = 0
        self._run: Column = np.zeros(0, np.int32)  # by block id: its run, and its place among the members
        self._place: Column = np.zeros(0, np.int32)
        self._members: list[Members | None] = [None] * _FIRST_RUNS
        self._kin = np.zeros(_FIRST_RUNS, np.int64)  # by run: when its blocks were used, in ticks, and their group
        self._serial = np.zeros(_FIRST_RUNS, np.int64)
        self._alive = np.zeros(_FIRST_RUNS, np.int64)
        self._free = list(range(_FIRST_RUNS))[::-1]
        self._next_serial = 1
        self._open: dict[int, int] = {}  # kin -> the run that takes such blocks in this tick
        self._tick_s = -np.inf
        self._order: NDArray[np.int64] | None = None
        self._serials: Ids = np.zeros(0, np.int64)  # of the runs in order: a row may have begun anew since
        self._worths: NDArray[np.float32] = np.zeros(0, np.float32)
        self._version = -1

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        if not len(blocks):
            return
        size = int(blocks.max()) + 1
        if size > len(self._run):
            rows = rows_for(len(self._run), size)
            lengthen(self._run, rows, NOWHERE)
            lengthen(self._place, rows)
        self._count += len(blocks)
        self._join(blocks, now)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        if len(blocks):
            self._leave(blocks)
            self._join(blocks, now)

    def forget(self, blocks: Ids) -> None:
        """The blocks have left."""
        if len(blocks):
            self._leave(blocks)
            self._run[blocks] = NOWHERE
            self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` worth least that are not pinned, least first, or None."""
        if count > self._count:
            return None
        found, missing = [np.zeros(0, np.int64)], count
        order, at, step = self._sorted(), 0, _SCANNED_RUNS
        while missing and at < len(order):
            rows = order[at : at + step]
            live = np.flatnonzero((self._alive[rows] > 0) & (self._serial[rows] == self._serials[at : at + step]))
            enough = int(np.searchsorted(np.cumsum(self._alive[rows[live]]), missing)) + 1
            at, step = at + (int(live[enough - 1]) + 1 if enough <= len(live) else step), 2 * step
            blocks = self._alive_in(rows[live[:enough]])
            found.append(blocks[~pinned[blocks]][:missing])
            missing -= len(found[-1])
        return None if missing else np.concatenate(found)

    # -- runs

    def _leave(self, blocks: Ids) -> None:
        runs = self._run[blocks]
        rows, counts = (runs[:1], len(runs)) if (runs == runs[0]).all() else np.unique(runs, return_counts=True)
        self._alive[rows] -= counts
        for row in rows[self._alive[rows] == 0].tolist():
            self._end(row)

    def _end(self, row: int) -> None:
        self._members[row] = None
        self._free.append(row)
        if self._open.get(int(self._kin[row])) == row:
            del self._open[int(self._kin[row])]

    def _join(self, blocks: Ids, now: float) -> None:
        if now >= self._tick_s + TICK_S:
            self._tick_s, self._order = now, None
            self._open.clear()
        kins = (self._blocks.last_used[blocks] // TICK_S).astype(np.int64) * _GROUPS + self._blocks.group[blocks]
        alike = bool((kins == kins[0]).all())
        for kin in kins[:1].tolist() if alike else dict.fromkeys(kins.tolist()):
            mine = blocks if alike else blocks[kins == kin]
            row = self._open.get(kin)
            row = self._begin(kin) if row is None else row
            members = self._members[row]
            assert members is not None
            self._place[mine] = members.append(mine)
            self._run[mine] = row
            self._alive[row] += len(mine)

    def _begin(self, kin: int) -> int:
        if not self._free:
            self._lengthen()
        row = self._free.pop()
        self._members[row] = Members()
        self._kin[row], self._serial[row], self._alive[row] = kin, self._next_serial, 0
        self._next_serial += 1
        self._open[kin] = row
        self._insert(row)
        return row

    def _lengthen(self) -> None:
        old = len(self._kin)
        self._kin, self._serial = np.resize(self._kin, 2 * old), np.resize(self._serial, 2 * old)
        self._alive = np.resize(self._alive, 2 * old)
        self._alive[old:] = 0
        self._members += [None] * old
        self._free = list(range(old, 2 * old))[::-1]

    # -- order

    def _sorted(self) -> NDArray[np.int64]:
        """Runs from the least worth to the most, at the last tick."""
        if self._order is None or self._version != self._traffic.version:
            rows = np.flatnonzero(self._alive)
            worths = self._worth(rows)
            by_worth = np.lexsort((self._serial[rows], worths))
            self._order, self._worths = rows[by_worth], worths[by_worth]
            self._serials = self._serial[self._order]
            self._version = self._traffic.version
        return self._order

    def _insert(self, row: int) -> None:
        """Puts a run that has begun in this tick into the order, after those worth as much."""
        if self._order is not None and self._version == self._traffic.version:
            worth = self._worth(np.array([row]))[0]
            at = int(np.searchsorted(self._worths, worth, side="right"))
            self._order, self._worths = np.insert(self._order, at, row), np.insert(self._worths, at, worth)
            self._serials = np.insert(self._serials, at, self._serial[row])

    def _worth(self, rows: Ids) -> NDArray[np.float32]:
        ticks, groups = np.divmod(self._kin[rows], _GROUPS)
        return self._traffic.worth(groups, np.maximum(self._tick_s - ticks * TICK_S, 0.0))

    def _alive_in(self, rows: NDArray[np.int64]) -> Ids:
        """The blocks of these runs, run by run."""
        parts = [self._members[row] for row in rows.tolist()]
        if not parts:
            return np.zeros(0, np.int64)
        blocks = np.concatenate([p.blocks[: p.size] for p in parts if p]).astype(np.int64)
        sizes = np.array([p.size for p in parts if p])
        places = np.arange(len(blocks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        alive = (self._run[blocks] == np.repeat(rows, sizes)) & (self._place[blocks] == places)
        for row in rows[2 * self._alive[rows] < sizes].tolist():
            self._pack(row)
        return np.asarray(blocks[alive], np.int64)

    def _pack(self, row: int) -> None:
        """Drops the members that have gone; the order of the others stays."""
        members = self._members[row]
        assert members is not None
        blocks = members.blocks[: members.size]
        blocks = blocks[(self._run[blocks] == row) & (self._place[blocks] == np.arange(members.size))]
        members.blocks, members.size = blocks.copy(), len(blocks)
        self._place[blocks] = np.arange(len(blocks))
