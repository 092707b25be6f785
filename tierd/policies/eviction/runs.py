"""Runs: blocks that were used in the same tick and are of one group, in the order of their use.

Some thousand runs are sorted instead of millions of blocks. reuse_index.py writes a run's worth as
its `key` here; ranking.py finds the least. A run has a row in columns, and a *kin*: tick and group
as one number. It takes blocks of its kin while it is open. A full run is closed and another begins,
so no step looks at more than RUN_BLOCKS. It ends with its last block.

Calls with a few blocks use plain numbers through memoryviews of the columns: a numpy call on one
number costs more than all of it.

A block is in one run at most. A member is alive while its block names this run and place, so at
most one is; `alive` counts them. The `key` of a row without a run is 0. While a run is open, its
members keep their places.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import Columns, rows_for
from tierd.core.arrays.sets import every
from tierd.core.eviction import Ids, Mask

FEW = 8
"""So many blocks, or fewer, are treated one by one."""
RUN_BLOCKS = 2048
SLACK = 64
"""Dead members that a closed run may have, beside as many as are alive."""
NOWHERE = -1
SOON, NEVER = -np.inf, np.inf
"""When a row's key is due: of a run without a key yet, and of a row without a run."""
_FIRST_RUNS = 64
_KIN_COST = 5
"""Blocks that can be put one by one in the time that one kin's blocks take together."""


class Runs:
    """By row: alive, size (members), kin, serial (ascending, over all that began), key, due_s.
    due_s: when to make the key anew. begun: rows without a key yet, all or more than FEW."""

    def __init__(self, most: int) -> None:
        """most: how many block ids are expected."""
        self.begun: list[int] = []
        self.alive, self.size = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.kin, self.serial = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.key, self.due_s = np.zeros(0, np.uint64), np.zeros(0)
        self._heads: list[int] = []  # by row: no member before it is alive
        self._members: list[array[int]] = []
        self._free: list[int] = []
        self._open: dict[int, int] = {}  # kin -> the run that takes such blocks
        self._next_serial = 1
        self._add_rows(_FIRST_RUNS)
        self._columns = Columns(most)  # by block id
        self._run = self._columns.column(np.int32, fill=NOWHERE)
        self._place = self._columns.column(np.int32)
        self._run_at, self._place_at = self._run.data, self._place.data

    def make_room(self, size: int) -> None:
        """Ids below `size` may come."""
        if size > self._columns.rows:
            self._run_at.release()
            self._place_at.release()
            self._columns.lengthen(rows_for(self._columns.rows, size))
            self._run_at, self._place_at = self._run.data, self._place.data

    def are_in(self, blocks: Ids) -> Mask:
        """Which of the blocks are in a run."""
        known = blocks < self._columns.rows
        known[known] = self._run[blocks[known]] != NOWHERE
        return np.asarray(known, np.bool_)

    def close(self) -> int:
        """Closes all runs; returns the serial of the next."""
        self._open.clear()
        return self._next_serial

    def renumber(self) -> None:
        """Serials begin at 1 anew, in the same order."""
        rows = np.flatnonzero(self.alive)
        self._next_serial = 1 + len(rows)
        self.serial[rows[np.argsort(self.serial[rows])]] = np.arange(1, self._next_serial)

    def leave(self, blocks: Ids) -> None:
        """The blocks leave their runs; they are forgotten next, or join others."""
        if len(blocks) <= FEW:
            for block in blocks.tolist():
                self._leave_one(self._run_at[block])
            return
        runs = self._run.take(blocks).astype(np.int64)
        if every(runs == runs[0]):
            self._leave_one(runs.item(0), len(blocks))
            return
        np.subtract.at(self.alive, runs, 1)
        alive = self.alive[runs]
        for row in dict.fromkeys(runs[alive == 0].tolist()):
            self._end(row)
        for row in dict.fromkeys(runs[(alive > 0) & (2 * alive + SLACK < self.size[runs])].tolist()):
            self._pack(row)

    def forget(self, blocks: Ids) -> None:
        """Removes the blocks from their runs for good."""
        if len(blocks) <= FEW:
            for block in blocks.tolist():
                self._leave_one(self._run_at[block])
                self._run_at[block] = NOWHERE
        else:
            self.leave(blocks)
            self._run[blocks] = NOWHERE

    def join(self, blocks: Ids, kins: NDArray[np.int64]) -> None:
        """Blocks that are in no run join those of their kin, int64 [n], in this order."""
        for start in range(0, len(blocks), RUN_BLOCKS):
            self._join(blocks[start : start + RUN_BLOCKS], kins[start : start + RUN_BLOCKS])

    def join_one(self, block: int, kin: int) -> None:
        """One block joins the run of its kin."""
        row = self._open.get(kin)
        if row is None:
            row = self._begin(kin)
        place = self._size_at[row]
        self._members[row].append(block)
        self._run_at[block], self._place_at[block] = row, place
        self._size_at[row] = place + 1
        self._alive_at[row] += 1
        if place + 1 >= RUN_BLOCKS:
            del self._open[kin]

    def first(self, row: int) -> int:
        """The block that was used longest ago in a run."""
        members, head, run_at, place_at = self._members[row], self._heads[row], self._run_at, self._place_at
        while run_at[members[head]] != row or place_at[members[head]] != head:
            head += 1
        self._heads[row] = head
        return members[head]

    def walk(self, row: int) -> Iterator[int]:
        """The members of a run from its first alive one on; NOWHERE for dead ones."""
        self.first(row)
        members, run_at, place_at = self._members[row], self._run_at, self._place_at
        for place in range(self._heads[row], len(members)):
            block = members[place]
            yield block if run_at[block] == row and place_at[block] == place else NOWHERE

    def alive_in(self, rows: NDArray[np.int64]) -> Ids:
        """The blocks of these runs, run by run."""
        sizes = self.size[rows]
        blocks = np.frombuffer(b"".join([self._members[row] for row in rows.tolist()]), np.int32)
        if self.alive[rows].sum() == len(blocks):
            return blocks.astype(np.int64)
        places = np.arange(len(blocks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        alive = (self._run[blocks] == np.repeat(rows, sizes)) & (self._place[blocks] == places)
        return np.asarray(blocks[alive], np.int64)

    # -- inside

    def _join(self, blocks: Ids, kins: NDArray[np.int64]) -> None:
        if every(kins == kins[0]):
            self._join_kin(blocks, kins.item(0))
            return
        each = kins.tolist()
        distinct = dict.fromkeys(each)
        if len(distinct) * _KIN_COST > len(blocks):
            for block, kin in zip(blocks.tolist(), each, strict=True):
                self.join_one(block, kin)
            return
        for kin in distinct:
            self._join_kin(blocks[kins == kin], kin)

    def _join_kin(self, blocks: Ids, kin: int) -> None:
        row = self._open.get(kin)
        if row is None:
            row = self._begin(kin)
        size = self._size_at[row]
        self._members[row].frombytes(blocks.astype(np.int32).tobytes())
        self._run[blocks] = row
        self._place[blocks] = np.arange(size, size + len(blocks))
        self._size_at[row] = size + len(blocks)
        self._alive_at[row] += len(blocks)
        if size + len(blocks) >= RUN_BLOCKS:
            del self._open[kin]

    def _leave_one(self, row: int, count: int = 1) -> None:
        """So many blocks leave one run."""
        alive = self._alive_at[row] - count
        self._alive_at[row] = alive
        if not alive:
            self._end(row)
        elif 2 * alive + SLACK < self._size_at[row]:
            self._pack(row)

    def _begin(self, kin: int) -> int:
        if not self._free:
            self._add_rows(len(self.alive))
        row = self._free.pop()
        self._open[kin], self._kin_at[row] = row, kin
        self.serial[row], self.due_s[row] = self._next_serial, SOON
        self._next_serial += 1
        if len(self.begun) <= FEW:
            self.begun.append(row)
        return row

    def _end(self, row: int) -> None:
        kin = self._kin_at[row]
        if self._open.get(kin) == row:
            del self._open[kin]
        self._members[row], self._heads[row], self._size_at[row] = array("i"), 0, 0
        self.key[row], self.due_s[row] = 0, NEVER
        self._free.append(row)

    def _pack(self, row: int) -> None:
        """Drops dead members; the order of the others stays."""
        if self._open.get(self._kin_at[row]) == row:
            return
        blocks = np.frombuffer(self._members[row], np.int32)
        blocks = blocks[(self._run[blocks] == row) & (self._place[blocks] == np.arange(len(blocks)))]
        self._members[row], self._heads[row] = array("i", blocks.tobytes()), 0
        self._place[blocks] = np.arange(len(blocks))
        self.size[row] = len(blocks)

    def _add_rows(self, count: int) -> None:
        old = len(self.alive)
        zeros = np.zeros(count, np.int64)
        self.alive, self.size = np.append(self.alive, zeros), np.append(self.size, zeros)
        self.kin = np.append(self.kin, zeros)
        self.serial, self.key = np.append(self.serial, zeros), np.append(self.key, zeros.astype(np.uint64))
        self.due_s = np.append(self.due_s, np.full(count, NEVER))
        self._alive_at, self._size_at, self._kin_at = self.alive.data, self.size.data, self.kin.data
        self._heads += [0] * count
        self._members += [array("i") for _ in range(count)]
        self._free = list(range(old, old + count))[::-1]
