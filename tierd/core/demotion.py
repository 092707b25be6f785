"""Demotion: what leaves a tier before anybody asks for its page.

Purpose: keeps pages free in every tier, so that puts and promotions seldom have to drop a block that no farther tier holds. Non-purpose: room in the
moment of need (room.py). Between its watermarks a tier drains in two measures:
- as a whole: pages in use against its capacity;
- per key (domain, class, writer), because a free page helps nobody whose key is another: pages in use against what the key could use, which is its
  segments and the vacant places.
A measure that passes the high mark drains to the low one. A victim that a farther tier holds is freed at once, others are sent to the next farther
kind; a full far tier drops its coldest; where there is no farther tier, or none that could hold the block, it is freed.
"""

from __future__ import annotations

import numpy as np

from tierd.core.columns import runs
from tierd.core.draft import Draft, no_ids
from tierd.core.model import Reason
from tierd.core.pages import Key, Usage
from tierd.core.plan import Ids
from tierd.core.planner import Planner, Where
from tierd.core.room import MOST_REACH

WHOLE = Key(-1, -1, -1)
"""The measure of a tier as a whole."""


class Demotion:
    """See the module."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._index, self._room = planner, planner.index, planner.room
        self._draining: list[set[Key]] = [set() for _ in planner.index.tiers]

    def run(self, limit: int, draft: Draft) -> None:
        """At most `limit` victims over all tiers, near to far."""
        for tier in self._index.serving():
            while limit > 0:
                victims = self._victims(tier, limit)
                gone = self._push_out(tier, victims, draft) if len(victims) else 0
                if not gone:
                    break
                limit -= gone

    def _victims(self, tier: int, limit: int) -> Ids:
        """One batch: the coldest blocks by which a measure is in excess."""
        pages_of, excess = self._index.tiers[tier], self._excess(tier)
        if not excess:
            return no_ids()
        whole = excess.pop(WHOLE, 0.0)
        victims = self._room.coldest(tier, limit if whole else MOST_REACH)
        sizes = pages_of.class_bytes(self._index.attached(tier, victims))
        if whole:
            return victims[: int(np.searchsorted(np.cumsum(sizes), whole)) + 1]
        chosen = np.zeros(len(victims), bool)
        for key, size in excess.items():
            right = self._room.is_right(tier, victims, key)
            if right[:1].all():
                chosen[np.flatnonzero(right)[: int(-(-size // key.class_bytes))]] = True
            else:  # the coldest leaves, whoever's it is: its segment goes to those who ask
                chosen |= self._room.is_beside(tier, victims, victims[0])
        return self._room.tails_first(tier, victims[chosen])[:limit]

    def _excess(self, tier: int) -> dict[Key, float]:
        """By how many bytes each measure that drains is above its low mark."""
        pages_of, draining = self._index.tiers[tier], self._draining[tier]
        spec, measures = pages_of.spec, pages_of.usage()
        measures[WHOLE] = Usage(pages_of.staying_bytes, spec.capacity_bytes - pages_of.quarantined_bytes)
        draining.intersection_update(measures)
        out = {}
        for key, (used, whole) in measures.items():
            if used > spec.high_watermark * whole:
                draining.add(key)
            if used <= spec.low_watermark * whole:
                draining.discard(key)
            if key in draining:
                out[key] = used - spec.low_watermark * whole
        return out

    def _push_out(self, tier: int, victims: Ids, draft: Draft) -> int:
        """Sends on what has no farther copy and a place to go; drops the rest. How many of the victims that were."""
        sole = victims[~self._room.is_farther(tier, victims)]
        to = self._next_tiers(tier, sole)
        sent = 0
        for rows in runs(to):
            if to[rows[0]] >= 0:
                blocks = sole[rows][::-1]
                where = Where(np.full(len(blocks), tier), self._index.attached(tier, blocks))
                done = self._planner.send(blocks, where, target=int(to[rows[0]]), reason=Reason.DEMOTION, draft=draft)
                self._index.retire(tier, where.pages[done])
                sent += int(np.count_nonzero(done))
        dead = np.concatenate((victims[self._room.is_farther(tier, victims)], sole[to < 0]))
        self._room.drop(tier, dead, draft)
        return sent + len(dead)

    def _next_tiers(self, tier: int, blocks: Ids) -> Ids:
        """Where each block would be demoted to: a tier of the next farther kind that takes new blocks; -1 where none can hold it."""
        kind = self._index.tiers[tier].spec.kind
        farther = [t for t in self._index.writable() if self._index.tiers[t].spec.kind > kind]
        if not farther:
            return np.full(len(blocks), -1, np.int64)
        to = self._index.targets(blocks, self._index.writable(self._index.tiers[farther[0]].spec.kind))
        for target in np.unique(to).tolist():
            pages_of = self._index.tiers[target]
            unfit = pages_of.class_of(self._index.blocks.length[blocks]) > pages_of.spec.segment_bytes
            to[(to == target) & unfit] = -1
        return to
