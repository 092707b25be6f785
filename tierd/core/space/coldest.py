"""Coldest: which blocks of a tier may be evicted now, coldest first, children before their parents.

A policy knows no chains. So `find` asks it
1. for the coldest of all, and for four times as many while too few of them may go, up to
   MOST_REACH. Those whose children are among them are taken, each after its children;
2. if that gives too few (a pinned tail holds its whole chain back), for the coldest *tips*: blocks
   without children in the tier. With a tip go its ancestors that were not used after it.

If all blocks wait for pinned ones, `find` breaks a chain. It never breaks one that a put is adding
to: that put finds no room.

One search reads as many blocks as it returns, and MOST_REACH more; to break a chain it reads
MOST_ABOVE. In step 2 the policy passes over blocks that wait for a pinned one, a few nanoseconds
each. The length of chains does not matter: `count` blocks are found if so many may go.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from tierd.core.arrays.sets import among, every, some
from tierd.core.formats.model import NO_PAGE
from tierd.core.index.index import Index
from tierd.core.plan import Ids
from tierd.core.plan_builder import no_ids

MOST_REACH = 4096
"""Coldest blocks that are searched for evictable ones, before the tips are."""
MOST_ABOVE = 1 << 16
"""Most ancestors that are followed to find a put's chain: that takes some 10 ms."""
TIP_SHARE = 8
"""One block in so many is asked for as a tip at first: most chains are longer."""


class Coldest:
    """See the module."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._guarded = no_ids()
        self._preceding: tuple[set[int], bool] | None = None

    def guard(self, blocks: Ids) -> None:
        """Protects the blocks that a put or a get adds to, until the next call."""
        self._guarded, self._preceding = blocks, None

    def find(self, tier: int, count: int, *, to_drop: bool = False) -> Ids:
        """`count` blocks that may be evicted now, or all that may, in order.

        If all blocks that are not pinned have pinned ones below them, returns the coldest of those.
        to_drop: then heads that a farther tier has, if any; else blocks without a guarded
        descendant.
        """
        index = self._index
        count = min(count, index.going[tier])
        ready = found = no_ids()
        for asked in self._asked(tier, count):
            found = self._victims(tier, asked)
            ready = self.tails_first(tier, found)[:count]
            if 2 * len(ready) >= count:
                return ready
        rest = self._from_tips(tier, count)
        if len(rest) == 0:
            return (self._breaking_least(tier, found) if to_drop else found)[:count]
        return np.concatenate((ready, rest[~among(rest, ready)]))[:count] if len(ready) else rest

    def unguarded(self, those: Ids) -> Ids:
        """Those without a guarded descendant; none, if the guarded exceed MOST_ABOVE ancestors."""
        above, are_all = self._above_guarded()
        if not are_all:
            return no_ids()
        return those[~among(those, np.fromiter(above, np.int64))] if above else those

    def are_needed(self, tier: int, those: Ids) -> bool:
        """Whether one of them that no farther tier has is an ancestor of a guarded block. Only the
        MOST_ABOVE nearest ancestors of guarded blocks count."""
        above, _ = self._above_guarded()
        needed = [block for block in those.tolist() if block in above]
        return bool(needed) and not every(self._index.is_farther(tier, np.asarray(needed, np.int64)))

    def tails_first(self, tier: int, victims: Ids) -> Ids:
        """Those victims whose tracked children are all victims that qualify too: in their order,
        but each right after its children."""
        blocks = self._index.blocks
        children = self._index.children[tier][victims]
        strict = (children > 0) & ~blocks.lax[victims]
        if not some(strict):
            return victims
        parents = blocks.parent[victims]
        if not strict[0] and every(((parents[:-1] == victims[1:]) & (children[1:] == 1)) | ~strict[1:]):
            return victims  # each follows its only child at once, the usual order of a policy by use
        order, rows = np.argsort(victims), np.arange(len(victims))
        at = order[np.minimum(np.searchsorted(victims, parents, sorter=order), len(victims) - 1)]
        kin = victims[at] == parents
        waits = np.append(strict & (np.bincount(at[kin], minlength=len(victims)) != children), True)
        above = np.append(np.where(kin & strict[at], at, len(victims)), len(victims))
        leap = above
        while not waits[
            above[waits]
        ].all():  # a block that waits keeps its ancestors waiting: 1 step up, then 2, 4, 8, ...
            waits[leap[waits]] = True
            leap = leap[leap]
        if (above[:-1] < rows).any():
            rows = np.lexsort((-blocks.position[victims].astype(np.int64), _turns(above)))
        return np.asarray(victims[rows[~waits[rows]]], np.int64)

    # -- inside

    def _above_guarded(self) -> tuple[set[int], bool]:
        """The guarded blocks and their ancestors, at most MOST_ABOVE, and whether these are all.
        Computed once for each `guard`."""
        if self._preceding is None:
            parent, above, left = self._index.blocks.parent.data, set[int](), MOST_ABOVE
            for guarded in self._guarded.tolist():
                block = guarded
                while left and block >= 0 and block not in above:
                    above.add(block)
                    block, left = parent[block], left - 1
            self._preceding = above, left > 0
        return self._preceding

    def _victims(self, tier: int, count: int) -> Ids:
        found = self._index.policies[tier].victims(count, self._index.held[tier])
        assert found is not None and len(found) == count, "the policy lost count of what it tracks"
        return found

    def _asked(self, tier: int, count: int) -> Iterator[int]:
        """Counts to ask for: `count`, then more, since some blocks wait for children worth more."""
        most = min(max(count, MOST_REACH), self._index.going[tier])
        while 0 < count < most:
            yield count
            count *= 4
        yield min(count, most)

    def _from_tips(self, tier: int, count: int) -> Ids:
        """`count` blocks that wait for no pinned one, or all of those; coldest tips first."""
        index, found = self._index, no_ids()
        for asked in (max(1, count // TIP_SHARE), count):
            tips = index.policies[tier].victims(min(asked, index.tips[tier]), index.barred[tier])
            assert tips is not None, "the policy lost count of what it tracks"
            is_last = len(tips) in (count, index.tips[tier])
            found = self._with_parents(tier, tips, count, all_above=is_last)
            if is_last or len(found) == count:
                break
        return found

    def _breaking_least(self, tier: int, coldest: Ids) -> Ids:
        """The blocks to drop, if all wait for pinned ones; see `find`."""
        if len(kept := self._kept_farther(tier, coldest)):
            return kept
        others = self.unguarded(coldest)
        if not len(others) and len(coldest) < (going := min(MOST_ABOVE, self._index.going[tier])):
            others = self.unguarded(self._victims(tier, going))
        return others

    def _kept_farther(self, tier: int, those: Ids) -> Ids:
        """Those that a farther tier has, each after all its ancestors: no drop makes a tip."""
        index, blocks = self._index, self._index.blocks
        kept = those[index.is_farther(tier, those)]
        kept = kept[np.argsort(blocks.position[kept], kind="stable")]
        above = blocks.parent[kept]
        heads, out = (above < 0) | (index.page[tier][above] == NO_PAGE), dict[int, None]()
        for block, parent, is_head in zip(kept.tolist(), above.tolist(), heads.tolist(), strict=True):
            if is_head or parent in out:
                out[block] = None
        return np.fromiter(out, np.int64)

    def _with_parents(self, tier: int, tips: Ids, count: int, *, all_above: bool) -> Ids:
        """At most `count`: each tip, then its ancestors that wait for no other block and were not
        used later. If all_above, then the other ancestors that wait for none, by use."""
        index, blocks = self._index, self._index.blocks
        parent, used, children = blocks.parent.data, blocks.last_used.data, index.children[tier].data
        held, barred = index.held[tier].data, index.barred[tier].data
        out: list[int] = []
        waits: dict[int, int] = {}
        later: list[tuple[float, int]] = []

        def climb(block: int) -> None:
            limit_s = used[block]
            while len(out) < count:
                out.append(block)
                block = parent[block]
                if block < 0 or held[block] or not barred[block]:
                    return
                waits[block] = waits.get(block, children[block]) - 1
                if waits[block]:
                    return
                if used[block] > limit_s:
                    heappush(later, (used[block], block))
                    return

        for tip in tips.tolist():
            climb(tip)
        while later and all_above and len(out) < count:
            climb(heappop(later)[1])
        return np.asarray(out, np.int64)


def _turns(above: Ids) -> Ids:
    """Of each row of a forest and its descendants, the greatest number. above: rows of the parents.
    A row without a parent has the number of rows."""
    turns, leap = np.append(np.arange(len(above) - 1), -1), above
    for _ in range(len(above).bit_length()):
        np.maximum.at(turns, leap, turns.copy())
        leap = leap[leap]
        if (leap == len(above) - 1).all():
            break
    return turns[:-1]
