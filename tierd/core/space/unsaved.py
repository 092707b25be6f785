"""Unsaved blocks of a tier, held by no farther one, if it has more blocks than demotion searches.

If more is unsaved than the watermarks allow, it gives the coldest; demotion.py decides on their
writes. A sample of pages spread over the tier gives the estimate. A search for the coldest skips
saved blocks: 10 ms for a tier of a million blocks and 80 for one of eight. So one search serves
many plans, 1/LOOKS of the tier. The next search comes when those are written, or when enough blocks
have come, or left the farther tiers, to pass the high mark.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierd.core.admission import Verdict
from tierd.core.formats.model import NO_PAGE
from tierd.core.index.index import Index
from tierd.core.plan import Bools, Ids
from tierd.core.plan_builder import no_ids
from tierd.core.space.coldest import MOST_REACH

SAMPLE = 4096
"""Pages sampled to estimate the unsaved share of a tier, to two hundredths."""
LOOKS = 64
"""Searches that would find all of a tier."""


class Unsaved:
    """See the module. has_place: which blocks of a tier a farther one could hold."""

    def __init__(self, index: Index, has_place: Callable[[int, Ids], Bools]) -> None:
        self._index, self._has_place = index, has_place
        self._found = [no_ids() for _ in index.tiers]  # coldest first
        self._is_draining = [False for _ in index.tiers]
        self._look_at = [0 for _ in index.tiers]  # search again once so many blocks are new here, or gone farther away
        self._seen: list[list[int]] = [[] for _ in index.tiers]  # farther tiers that were in service then
        self._looks = 0

    def is_dirty(self, tier: int, at: Ids | slice) -> Bools:
        """Which blocks no farther tier holds, gets, or has declined since their last use. Without
        forgotten ones, which no lookup finds. A store in memory gets those of disks too."""
        index, following = self._index, self._index.next(tier)
        is_memory = bool(following) and index.tiers[following[0]].spec.is_in_memory
        dirty = index.blocks.named[at].copy()
        for other in following if is_memory else index.farther(tier):
            dirty &= index.page[other][at] == NO_PAGE
        verdicts = index.blocks.declined[at]
        is_worn = bool(following) and following[0] in index.admissions
        dirty &= (verdicts == Verdict.WRITE) if is_worn else (verdicts != Verdict.DISPLACED)
        return np.asarray(dirty, bool)

    def coldest(self, tier: int, rest_bytes: int) -> Ids:
        """Up to MOST_REACH blocks to write, if more of these bytes is unsaved than the high mark
        allows. Once it has begun, down to the low mark."""
        index, farther = self._index, self._index.farther(tier)
        # Asked for many blocks at once, a wear budget declines most until their next use.
        if index.going[tier] <= MOST_REACH or any(index.tiers[t].spec.wear_bytes_per_s for t in farther):
            return no_ids()
        # Blocks of a store now out of service are unsaved; those of one back in service are saved.
        if farther != self._seen[tier]:
            self._seen[tier], self._found[tier], self._look_at[tier] = farther, no_ids(), 0
        found = self._next(tier)
        if not len(found) and (self._is_draining[tier] or self._changes(tier) >= self._look_at[tier]):
            self._look(tier, rest_bytes)
            found = self._next(tier)
        return found

    def _next(self, tier: int) -> Ids:
        """The first found blocks that are still to be written; drops those before them."""
        index, found = self._index, self._found[tier]
        first = no_ids()
        while len(found) and not len(first):
            first, found = found[:MOST_REACH], found[MOST_REACH:]
            is_there = (index.page[tier][first] != NO_PAGE) & ~index.held[tier][first]
            first = first[is_there & self.is_dirty(tier, first)]
        self._found[tier] = np.concatenate((first, found))
        return first

    def _look(self, tier: int, rest_bytes: int) -> None:
        spec, (unsaved_bytes, each_bytes) = self._index.tiers[tier].spec, self._estimate(tier)
        high, low = spec.high_watermark * rest_bytes, spec.low_watermark * rest_bytes
        if unsaved_bytes > (low if self._is_draining[tier] else high):
            self._found[tier] = self._search(
                tier, unsaved_bytes - low, count=1 + int((unsaved_bytes - low) / each_bytes)
            )
        self._is_draining[tier] = len(self._found[tier]) > 0
        if not self._is_draining[tier]:
            room = int(max(0.0, high - unsaved_bytes) / each_bytes)
            self._look_at[tier] = self._changes(tier) + max(room, MOST_REACH)

    def _changes(self, tier: int) -> int:
        """Blocks that may have become unsaved so far."""
        distance = self._index.tiers[tier].spec.distance
        left = sum(self._index.left[t.position] for t in self._index.tiers if t.spec.distance > distance)
        return self._index.came[tier] + left

    def _estimate(self, tier: int) -> tuple[float, float]:
        """Unsaved bytes, and the mean bytes of a page."""
        index, pages_of = self._index, self._index.tiers[tier]
        step = max(1, pages_of.top // SAMPLE)
        self._looks += 1
        pages = np.arange(self._looks % step, pages_of.top, step)
        blocks = pages_of.block[pages].astype(np.int64)
        is_there = blocks >= 0
        is_there[is_there] = index.page[tier][blocks[is_there]] == pages[is_there]
        sizes = pages_of.class_bytes(pages[is_there])
        if not len(sizes):
            return 0.0, 1.0
        share = sizes[self.is_dirty(tier, blocks[is_there])].sum() / sizes.sum()
        return float(share * pages_of.staying_bytes), float(sizes.mean())

    def _search(self, tier: int, over_bytes: float, *, count: int) -> Ids:
        """The coldest unsaved blocks that may be evicted and have a target: about `count`, at most
        so many bytes, at least one block."""
        index = self._index
        every_id = slice(0, index.blocks.top)
        passed = index.held[tier][every_id] | ~self.is_dirty(tier, every_id)
        most = max(MOST_REACH, index.going[tier] // LOOKS)
        count = min(count, most, len(passed) - int(np.count_nonzero(passed)))
        victims = index.policies[tier].victims(count, passed) if count > 0 else no_ids()
        assert victims is not None, "the policy lost count of what it tracks"
        victims = victims[self._has_place(tier, victims)]
        sizes = index.tiers[tier].class_bytes(index.attached(tier, victims))
        return victims[: int(np.searchsorted(np.cumsum(sizes), over_bytes)) + 1]
