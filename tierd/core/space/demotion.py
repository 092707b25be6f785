"""Demotion: the coldest blocks of a tier are written to the next one before their pages are needed.

So a request for room finds, coldest first, blocks that a farther tier holds too, and loses nothing
by dropping them. A written block stays, clean, until its page is needed. Writing ahead thus costs
no hits, and the farthest tier drops nothing before it must. Room at the moment of need is room.py.

A tier has two measures, each with a high and a low mark:
- the whole tier: pages in use against its capacity;
- per key (domain, class, writer): pages in use against those possible, in its segments and the
  vacant places. A clean page serves its own key only.
Blocks above the low mark shall be clean, coldest first, unless the store's admission declines them.
Writing begins when one above the high mark is not, and ends at the low mark. Of each measure the
MOST_REACH coldest are searched; unsaved.py finds those beyond them in a larger tier. A full far
tier drops its coldest. Blocks that no far tier could hold stay until room.py drops them.

A tier with headroom also drops its coldest until the headroom is free for the next request. So a
request's own blocks may go first, if they are worth less than the older ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import kinds, true_rows
from tierd.core.formats.model import Reason, TierKind
from tierd.core.index.segment import Key, Usage
from tierd.core.plan import Bools, Ids
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.space.coldest import MOST_REACH
from tierd.core.space.planner import Planner, Where
from tierd.core.space.unsaved import Unsaved

WHOLE = Key(-1, -1, -1)
"""The measure of a tier as a whole."""
PLAN_BYTES = 256 << 20
"""Pages in one plan: a disk writes them in tens of milliseconds, and idles briefly before the next
plan."""


class Excess(NamedTuple):
    """Bytes in use above a measure's marks."""

    high: float
    low: float


@dataclass(slots=True)
class Allowance:
    """Blocks and page bytes that a plan may still send; always one block, of any size."""

    blocks: int
    bytes: int
    is_fresh: bool = True

    def of(self, sizes: Ids) -> int:
        """How many of these, in order, it allows."""
        sizes = sizes[: self.blocks]
        fit = int(np.searchsorted(np.cumsum(sizes), self.bytes, side="right"))
        return max(fit, min(1, len(sizes))) if self.is_fresh else fit

    def take(self, sizes: Ids) -> None:
        """Subtracts blocks that were sent."""
        self.blocks -= len(sizes)
        self.bytes -= int(sizes.sum())
        self.is_fresh &= len(sizes) == 0


class Demotion:
    """See the module."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._index, self._room = planner, planner.index, planner.room
        self._unsaved = Unsaved(planner.index, self._has_place)
        self._draining: list[set[Key]] = [set() for _ in planner.index.tiers]

    def run(self, limit: int, draft: PlanBuilder) -> None:
        """Plans at most `limit` transfers and PLAN_BYTES for each tier, near to far. With one limit for
        all, constant puts would leave nothing for a store's blocks, which are lost then."""
        self._index.pass_time(draft.now)
        for tier in self._index.serving():
            if self._index.farther(tier):
                self._drain(tier, Allowance(limit, PLAN_BYTES), draft)
            self._clear(tier, draft)

    def save(self, tier: int, blocks: Ids, draft: PlanBuilder) -> None:
        """Sends the blocks that no farther tier has, as far as they deserve a write and there is
        room. blocks: from cold to hot."""
        dirty = self._unsaved.is_dirty(tier, blocks)
        dirty[dirty] = self._has_place(tier, blocks[dirty])
        self._send(tier, self._worthy(tier, blocks[dirty], draft.now), draft)

    def _clear(self, tier: int, draft: PlanBuilder) -> None:
        """Drops the coldest blocks that fill the headroom. Blocks still to be written stay, and no
        others go in their place."""
        pages_of = self._index.tiers[tier]
        over = pages_of.staying_bytes - self._rest_bytes(tier)
        if not pages_of.spec.headroom_bytes or over <= 0 or self._going(tier)[WHOLE]:
            return
        victims = self._room.coldest.find(tier, self._count(tier, over))
        sizes = np.cumsum(self._sizes(tier, victims))
        victims = victims[: int(np.searchsorted(sizes, over)) + 1]
        safe = ~self._unsaved.is_dirty(tier, victims) | ~self._has_place(tier, victims)
        self._room.drop(tier, self._room.coldest.tails_first(tier, victims[safe]), draft)

    def _drain(self, tier: int, allowance: Allowance, draft: PlanBuilder) -> None:
        """Sends victims that deserve a write, as many as are allowed; skips the others."""
        at, victims = 0, self._victims(tier)
        sizes = self._sizes(tier, victims)
        while count := allowance.of(sizes[at:]):
            sent = self._send(tier, self._worthy(tier, victims[at : at + count], draft.now), draft)
            allowance.take(self._sizes(tier, sent))
            at += count

    def _worthy(self, tier: int, victims: Ids, now: float) -> Ids:
        """Those that the admission of their target tier lets through."""
        to = self._next_tiers(tier, victims)
        worthy = np.ones(len(victims), bool)
        for rows in runs(to):
            if to[rows[0]] >= 0:
                worthy[rows] = self._index.admitted(int(to[rows[0]]), victims[rows], now)
        return victims[worthy]

    def _victims(self, tier: int) -> Ids:
        """The coldest blocks that should be clean by now and are not, without those declined since
        their last use."""
        excess = self._excess(tier)
        if not excess:
            return no_ids()
        victims = self._room.coldest.find(tier, self._reach(tier, excess))
        sizes, dirty = self._sizes(tier, victims), self._unsaved.is_dirty(tier, victims)
        dirty[dirty] = self._has_place(tier, victims[dirty])
        wanted = np.zeros(len(victims), bool)
        for key, over in excess.items():
            rows = np.arange(len(victims)) if key == WHOLE else true_rows(self._room.is_right(tier, victims, key))
            wanted[rows] |= self._is_due(tier, key, over, sizes=sizes[rows], dirty=dirty[rows])
        return victims[wanted] if wanted.any() else self._unsaved.coldest(tier, self._rest_bytes(tier))

    def _is_due(self, tier: int, key: Key, over: Excess, *, sizes: Ids, dirty: Bools) -> Bools:
        """Of a measure's coldest, those to write: all dirty ones above the low mark, if one is
        above the high mark or writing has begun."""
        before = np.cumsum(sizes) - sizes
        due: Bools = dirty & (before < over.low)
        draining = self._draining[tier]
        if (due & (before < over.high)).any():
            draining.add(key)
        elif not due.any():
            draining.discard(key)
        return due if key in draining else np.zeros(len(due), bool)

    def _excess(self, tier: int) -> dict[Key, Excess]:
        """Measures above the low mark that are above the high mark or being drained. Blocks in
        flight count as clean."""
        pages_of, draining = self._index.tiers[tier], self._draining[tier]
        spec, measures = pages_of.spec, pages_of.usage()
        measures[WHOLE] = Usage(pages_of.staying_bytes, self._rest_bytes(tier))
        draining.intersection_update(measures)
        out, going = {}, self._going(tier)
        for key, (used, whole) in measures.items():
            dirty = used - going.get(key, 0)
            over = Excess(dirty - spec.high_watermark * whole, dirty - spec.low_watermark * whole)
            if over.low > 0 and (over.high > 0 or key in draining):
                out[key] = over
            else:
                draining.discard(key)
        return out

    def _going(self, tier: int) -> dict[Key, int]:
        """Bytes being written to a farther tier, by measure."""
        pages_of = self._index.tiers[tier]
        pages = self._planner.inflight.sources(tier, Reason.DEMOTION)
        out = {WHOLE: int(pages_of.class_bytes(pages).sum())}
        for place, count in zip(*np.unique(pages_of.place[pages], return_counts=True), strict=True):
            key = pages_of.key_of(int(place))
            out[key] = out.get(key, 0) + int(count) * key.class_bytes
        return out

    def _reach(self, tier: int, excess: dict[Key, Excess]) -> int:
        """How many of the coldest to search: enough for the whole tier; those of a single key may
        be anywhere."""
        if excess.keys() != {WHOLE}:
            return MOST_REACH
        return self._count(tier, excess[WHOLE].low)

    def _count(self, tier: int, size_bytes: float) -> int:
        """Most blocks of the tier that so many bytes hold, at most MOST_REACH."""
        least = min(self._index.tiers[tier].usage(), default=WHOLE, key=lambda key: key.class_bytes).class_bytes
        return min(MOST_REACH, int(size_bytes // max(least, 1)) + 1)

    def _rest_bytes(self, tier: int) -> int:
        """Most bytes in use between requests."""
        pages_of = self._index.tiers[tier]
        return pages_of.spec.capacity_bytes - pages_of.spec.headroom_bytes - pages_of.quarantined_bytes

    def _sizes(self, tier: int, blocks: Ids) -> Ids:
        """Bytes of the blocks' pages in a tier."""
        return self._index.tiers[tier].class_bytes(self._index.attached(tier, blocks))

    def _send(self, tier: int, victims: Ids, draft: PlanBuilder) -> Ids:
        """Writes blocks to the next tier, as far as it has room; returns those sent."""
        sent, to = [no_ids()], self._next_tiers(tier, victims)
        for rows in runs(to):
            if to[rows[0]] >= 0:
                blocks = victims[rows][::-1]
                done = self._planner.send(
                    blocks, self._where(tier, blocks), target=int(to[rows[0]]), reason=Reason.DEMOTION, draft=draft
                )
                sent.append(blocks[done])
        return np.concatenate(sent)

    def _where(self, tier: int, blocks: Ids) -> Where:
        """The pages to copy: for coarse pages of a store those in host memory, if there are any. The
        block's digest is of their bytes."""
        where, index = Where(np.full(len(blocks), tier), self._index.attached(tier, blocks)), self._index
        if not index.tiers[tier].has_coarse:
            return where
        coarse = index.tiers[tier].error[where.pages] > 0
        for host in index.serving(TierKind.HOST):
            pages = index.readable(host, blocks)
            here = coarse & (pages >= 0)
            where.tiers[here], where.pages[here] = host, pages[here]
        return where

    def _has_place(self, tier: int, blocks: Ids) -> Bools:
        """Which blocks a farther tier could hold."""
        return np.asarray(self._next_tiers(tier, blocks) >= 0, bool)

    def _next_tiers(self, tier: int, blocks: Ids) -> Ids:
        """The demotion target of each block: one of the next tiers that take new blocks; -1 if none
        can hold it."""
        following = self._index.next(tier)
        if not following:
            return np.full(len(blocks), -1, np.int64)
        to = self._index.targets(blocks, following)
        for target in kinds(to):
            pages_of = self._index.tiers[target]
            unfit = pages_of.class_of(self._index.stored_lengths(target, blocks)) > pages_of.spec.segment_bytes
            to[(to == target) & unfit] = -1
        return to
