"""Priorities that puts give to blocks, and their ends.

A priority is a code, uint8 (priority + 1, or 0 if none was given), and an end, uint32: Unix time in
whole seconds, 0 for never. Without a code, or after its end, PRIORITY_DEFAULT holds for good. Of
two, the greater holds; of equal ones, the one that ends later. So no client can lower a priority
that another gave.

A block's priority also raises up to ABOVE_LIMIT of its ancestors, which it needs, unless its chain
may lose its head. Ancestors farther up stay as long as those do (coldest.py). The policy is
`tierd.policies.eviction.priority`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import in_order, some
from tierd.core.formats.model import PRIORITY_DEFAULT, RETENTION_LIMIT_S, StructArray
from tierd.core.index.blocks import ABOVE_LIMIT, Blocks
from tierd.core.plan import Bools, Bytes, Ids, Lengths
from tierd.core.plan_builder import no_ids

_LAST_S = (1 << 32) - 1
_RANK_BITS = 32
_LONGEST_S = RETENTION_LIMIT_S + 1
_NOTHING = PRIORITY_DEFAULT << _RANK_BITS | _LAST_S
"""Rank of a priority that was not given, or has run out."""
FIRST_LOOK = 16
"""Ancestors whose priorities are read together at first; then four times as many each time."""

Ranks = NDArray[np.int64]
"""The greater rank of two holds: the priority, then the end."""


class Priorities(NamedTuple):
    """A priority for each of n blocks: codes uint8 [n], ends uint32 [n]."""

    codes: Bytes
    until_s: Lengths

    @classmethod
    def nothing(cls, count: int) -> Priorities:
        """None given, for so many blocks."""
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.uint32))

    @classmethod
    def of_metas(cls, metas: StructArray) -> Priorities:
        """Of META [n]."""
        return cls(metas["priority"], metas["until_s"])

    @classmethod
    def of_blocks(cls, blocks: Blocks, ids: Ids) -> Priorities:
        """The current ones of these blocks."""
        return cls(blocks.priority[ids], blocks.until_s[ids])

    def at(self, rows: Ids | slice) -> Priorities:
        """Some of them."""
        return Priorities(self.codes[rows], self.until_s[rows])

    def hold(self, time_s: float) -> Bools:
        """Which were given and have not run out at a Unix time. Ends beyond the longest retention,
        after a clock was set back, count as run out."""
        is_left = (self.until_s > time_s) & (self.until_s <= time_s + _LONGEST_S)
        return np.asarray((self.codes > 0) & ((self.until_s == 0) | is_left), bool)

    def ranks(self, time_s: float) -> Ranks:
        """At a Unix time."""
        ends = np.where(self.until_s > 0, self.until_s.astype(np.int64) - 1, _LAST_S)
        return np.where(self.hold(time_s), (self.codes.astype(np.int64) - 1 << _RANK_BITS) | ends, _NOTHING)

    def priorities(self, time_s: float) -> Bytes:
        """0 to PRIORITY_LIMIT, at a Unix time."""
        return (self.ranks(time_s) >> _RANK_BITS).astype(np.uint8)


def said_by(priorities: Bytes, retention_s: Lengths | None, *, time_s: float) -> Priorities:
    """The priorities of a put at a Unix time. They hold up to a second longer than asked."""
    if retention_s is None:
        return Priorities(priorities + np.uint8(1), np.zeros(len(priorities), np.uint32))
    ends = np.minimum(np.ceil(time_s + retention_s.astype(np.float64)), _LAST_S)
    return Priorities(priorities + np.uint8(1), np.where(retention_s > 0, ends, 0).astype(np.uint32))


def raise_said(blocks: Blocks, ids: Ids, said: Priorities, time_s: float) -> Ids:
    """Writes given priorities of greater rank than the block's; ids may repeat. Returns the blocks
    changed, in their order."""
    ranks = said.ranks(time_s)
    rows = np.flatnonzero((ranks > Priorities.of_blocks(blocks, ids).ranks(time_s)) & (said.codes > 0))
    rows = rows[np.argsort(ranks[rows], kind="stable")]  # if a block occurs twice, the greater is written last
    blocks.priority[ids[rows]], blocks.until_s[ids[rows]] = said.codes[rows], said.until_s[rows]
    return in_order(ids[np.sort(rows)])


def keep_said(blocks: Blocks, ids: Ids, metas: StructArray, time_s: float) -> None:
    """Before META [n] are added: keeps a known name's (not -1) priority if it is not less. If the
    block has no page, it must also be above the default."""
    rows = np.flatnonzero(ids >= 0)
    known, wanted = ids[rows], Priorities.of_metas(metas[rows]).ranks(time_s)
    ranks = Priorities.of_blocks(blocks, known).ranks(time_s)
    stays = (ranks >= wanted) & ((blocks.places[known] > 0) | (ranks > _NOTHING))
    rows, known = rows[stays], known[stays]
    metas["priority"][rows], metas["until_s"][rows] = blocks.priority[known], blocks.until_s[known]


def raise_before(blocks: Blocks, ids: Ids, time_s: float) -> Ids:
    """Raises ancestors of these blocks to their priorities; returns the changed, nearest first."""
    said = blocks.priority[ids] > 0
    if not some(said):
        return no_ids()
    ids = ids[said]
    ids = ids[(blocks.parent[ids] >= 0) & ~blocks.lax[ids] & Priorities.of_blocks(blocks, ids).hold(time_s)]
    ranks = Priorities.of_blocks(blocks, ids).ranks(time_s)
    less = ranks > Priorities.of_blocks(blocks, blocks.parent[ids].astype(np.int64)).ranks(time_s)
    lifted, left = [no_ids()], ABOVE_LIMIT
    # The greatest first: every block is written once, whatever the number of descendants.
    for row in np.flatnonzero(less)[np.argsort(-ranks[less], kind="stable")].tolist():
        lifted += _raise_above(blocks, int(ids[row]), int(ranks[row]), time_s, most=left)
        left = ABOVE_LIMIT - sum(map(len, lifted))
    return in_order(np.concatenate(lifted))  # clients may declare parents in a circle


def _raise_above(blocks: Blocks, start: int, rank: int, time_s: float, *, most: int) -> list[Ids]:
    """Raises ancestors of a block to its rank while theirs are less, at most `most`. Returns them,
    nearest first."""
    above, limit, out = int(blocks.parent[start]), FIRST_LOOK, list[Ids]()
    while above >= 0 and most > 0 and _rank(blocks, above, time_s) < rank:
        part = blocks.upwards(above, min(limit, most))
        more = np.flatnonzero(Priorities.of_blocks(blocks, part).ranks(time_s) >= rank)
        part = part[: more[0]] if len(more) else part
        blocks.priority[part], blocks.until_s[part] = blocks.priority[start], blocks.until_s[start]
        out.append(part)
        most -= len(part)
        above, limit = int(blocks.parent[part[-1]]), 4 * limit
    return out


def _rank(blocks: Blocks, block: int, time_s: float) -> int:
    """As Priorities.ranks, of one block."""
    code, until_s = int(blocks.priority[block]), int(blocks.until_s[block])
    if not code or (until_s and not time_s < until_s <= time_s + _LONGEST_S):
        return _NOTHING
    return code - 1 << _RANK_BITS | (until_s - 1 if until_s else _LAST_S)
