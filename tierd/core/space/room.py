"""Room: pages for requests, from free pages, vacant places, or evicted blocks. In this order:

1. a free page of a segment of the right key (domain, class, writer);
2. a vacant place, or that of an empty segment, gets such a segment; with sealed puts, an empty
   segment must be idle for STAY_S;
3. if the coldest block has the right key, it is dropped, and those after it that have the key too;
4. if not, segments of other keys are emptied if at least half is colder than any block of the right
   key;
5. else blocks of the right key are dropped that are among the coldest, as many as fill one segment;
6. else the segment that holds most of the coldest is emptied. A segment with a held page is
   skipped;
7. with sealed puts, a segment idle for less than STAY_S is replaced too. So a session that puts in
   a row gets its previous segment, and the daemon makes no new file for the sealed blocks.

So classes, domains and writers trade memory under pressure. Dropping writes nothing: demotion wrote
ahead. The order is coldest.py's: children before their parents. If the children of all useful
blocks may not go (pinned tails), the coldest blocks are dropped all the same. The chain that a put
adds to is never broken. Emptying a segment can also break another chain; its rest hits again once
the missing block is written again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierd.core.admission import Verdict
from tierd.core.arrays.sets import among, every, kinds, some, true_rows
from tierd.core.formats.model import PageState, Reason
from tierd.core.index.index import Index
from tierd.core.index.pages import SEGMENT_LIMIT
from tierd.core.index.segment import Key
from tierd.core.plan import Bools, Ids
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.space.coldest import MOST_REACH, Coldest

STAY_S = 1.0
"""Longest time between two puts in a row."""
FAR_REACH = 1 << 15
"""Most of the coldest that are searched before there is no room: that takes some 10 ms."""
MANY_PAGES = 1 << 20
"""In a larger tier `_give_up` searches only the MOST_REACH coldest blocks."""


class Room:
    """See the module. domains: of every live session, by id."""

    def __init__(self, index: Index, *, first_segment: int, domains: Mapping[int, int]) -> None:
        self._index = index
        self.coldest = Coldest(index)
        self._domains = domains
        self.next_segment = first_segment

    def reserve(self, tier: int, key: Key, count: int, *, draft: PlanBuilder) -> Ids:
        """Reserves up to `count` pages of the key."""
        self._index.pass_time(draft.now)
        pages_of = self._index.tiers[tier]
        if not (pages_of.serving and pages_of.writable) or key.class_bytes > pages_of.spec.segment_bytes:
            return no_ids()
        count = min(count, self._index.generations_left)
        got = [self._index.set_aside(tier, key, count)]
        missing = count - len(got[0])
        stay_s = STAY_S if pages_of.spec.sealed_puts else 0.0
        while missing:
            has_begun = self._begin(tier, key, draft, idle_s=stay_s)
            if not (has_begun or self._give_up(tier, key, missing, draft)) and not (
                stay_s and self._begin(tier, key, draft, idle_s=0.0)
            ):
                break
            got.append(self._index.set_aside(tier, key, missing))
            missing -= len(got[-1])
        return np.concatenate(got) if len(got) > 1 else got[0]

    def drop(self, tier: int, blocks: Ids, draft: PlanBuilder, *, is_ranked: bool = True) -> None:
        """Frees the blocks' pages: DEMOTED if a farther tier holds them, else EVICTED. Copies in
        farther tiers are touched. So a chain that is dropped in pieces keeps one order there, and
        loses its tail first. is_ranked: the blocks are the coldest, in order."""
        kept, candidates = self._say_farewell(tier, blocks, draft), self._index.going[tier]
        for reason, those in ((Reason.DEMOTED, true_rows(kept)), (Reason.EVICTED, true_rows(~kept))):
            if len(those):
                self._index.vacate(tier, self._index.attached(tier, blocks[those]), reason, draft)
                if is_ranked:
                    draft.rank(those, candidates=candidates)

    def is_right(self, tier: int, victims: Ids, key: Key) -> Bools:
        """Which of the victims lie in segments of the key."""
        places = self._places(tier, victims)
        used = kinds(places)
        right = np.asarray([self._index.tiers[tier].key_of(place) == key for place in used], bool)
        return np.ones(len(places), bool) if every(right) else right[np.searchsorted(used, places)]

    def _begin(self, tier: int, key: Key, draft: PlanBuilder, *, idle_s: float) -> bool:
        """Begins a segment at a vacant place, at one idle for so long, or empty but for bad pages.
        False: there is none."""
        pages_of = self._index.tiers[tier]
        if not ((pages_of.vacant or pages_of.reclaim(idle_s=idle_s)) and self._has_ids(tier, key)):
            return False
        draft.begin(pages_of.begin(key, self.next_segment, dict(self._domains)))
        self.next_segment += 1
        return True

    def _give_up(self, tier: int, key: Key, count: int, draft: PlanBuilder) -> bool:
        """Drops up to `count` cold blocks of the key, or empties segments. False: none may go."""
        pages_of = self._index.tiers[tier]
        victims = self.coldest.find(tier, count, to_drop=True)
        if len(victims) == 0:
            return False
        right = self.is_right(tier, victims, key)
        if right[0]:
            self.drop(tier, victims if every(right) else victims[: int(np.argmin(right))], draft)
            return True
        reach = min(max(count, pages_of.spec.segment_bytes // key.class_bytes), MOST_REACH)
        while True:
            victims = self.coldest.find(tier, reach)
            if self._empty_colder(tier, victims, key, count, draft):
                return True
            if self._drop_right(tier, victims, key, count, draft) or self._empty_coldest(tier, victims, key, draft):
                return True
            if reach >= self._index.going[tier]:
                return self._break_chain(tier, key, count, draft)
            if reach >= FAR_REACH or not self._may_find(tier, key):
                return False
            reach = FAR_REACH

    def _may_find(self, tier: int, key: Key) -> bool:
        """Whether a search beyond the coldest is worth it: some block of the key may be evicted,
        or all of another segment. Not in a tier of many pages, since the search would read them
        all."""
        pages_of, held = self._index.tiers[tier], self._index.held[tier]
        if pages_of.top > MANY_PAGES:
            return False
        pages = true_rows(~among(pages_of.state[: pages_of.top], (PageState.FREE, PageState.QUARANTINED)))
        blocks, places = pages_of.block[pages], pages_of.place[pages]
        stays = (blocks < 0) | (pages_of.doom[pages] > 0) | held[blocks]
        going, staying = (np.bincount(places[rows], minlength=len(pages_of.segments)) > 0 for rows in (~stays, stays))
        has_ids = self._has_ids(tier, key)
        return any(
            pages_of.key_of(place) == key or (has_ids and not staying[place] and not pages_of.is_mostly_bad(place))
            for place in true_rows(going).tolist()
        )

    def _say_farewell(self, tier: int, blocks: Ids, draft: PlanBuilder) -> Bools:
        """Notifies other tiers before a drop. Returns which blocks a farther tier can read."""
        index = self._index
        # Until their next use, blocks that stay nearer are not written here again. Otherwise two
        # full tiers would exchange the same blocks for ever.
        distance = index.tiers[tier].spec.distance
        nearer = [t for t in index.serving() if index.tiers[t].spec.distance < distance]
        if nearer:
            index.blocks.declined[blocks[index.nearest(blocks, nearer) >= 0]] = Verdict.DISPLACED
        kept = index.is_farther(tier, blocks)
        if some(kept):
            for farther in self._index.farther(tier):
                index.touch(farther, blocks[kept], draft.now)
        index.evictions[tier] += len(blocks)
        return kept

    def _empty_colder(self, tier: int, victims: Ids, key: Key, count: int, draft: PlanBuilder) -> bool:
        """Empties segments of other keys of which half or more is colder than any block of the key.
        As many as `count` pages take. False: there is none."""
        if len(victims) == 0 or not self._has_ids(tier, key):
            return False
        right = self.is_right(tier, victims, key)
        colder = victims[: int(np.argmax(np.append(right, True)))]
        places, counts = np.unique(self._places(tier, colder), return_counts=True)
        wanted = emptied = -(-count * key.class_bytes // self._index.tiers[tier].spec.segment_bytes)
        for row in np.argsort(-counts, kind="stable").tolist() if len(places) else ():
            segment = self._index.tiers[tier].segments[int(places[row])]
            if segment is not None and 2 * counts[row] >= segment.pages - segment.spare:
                wanted -= self._empty(tier, int(places[row]), draft)
            if wanted <= 0:
                break
        return wanted < emptied

    def _drop_right(self, tier: int, victims: Ids, key: Key, count: int, draft: PlanBuilder) -> bool:
        """Drops up to `count` of the victims that are in segments of the key. False: none is."""
        mine = victims[self.is_right(tier, victims, key)]
        if len(mine):
            mine = self.coldest.tails_first(tier, mine)[:count]
            self.drop(tier, mine, draft)
        return len(mine) > 0

    def _break_chain(self, tier: int, key: Key, count: int, draft: PlanBuilder) -> bool:
        """Drops blocks whose children may not be evicted, if no other block is of use for the key.
        False: these are of no use either, or a put adds to them."""
        victims = self._index.policies[tier].victims(self._index.going[tier], self._index.held[tier])
        assert victims is not None, "the policy lost count of what it tracks"
        victims = self.coldest.unguarded(victims)
        mine = victims[self.is_right(tier, victims, key)][:count] if len(victims) else victims
        if len(mine):
            self.drop(tier, mine, draft)
        return len(mine) > 0 or self._empty_coldest(tier, victims, key, draft)

    def _empty_coldest(self, tier: int, victims: Ids, key: Key, draft: PlanBuilder) -> bool:
        """Empties the segment of another key that holds most of the victims. False: each holds a
        held page, or there are no ids for a new one."""
        if not self._has_ids(tier, key):
            return False
        places = self._places(tier, victims)
        values, first, counts = np.unique(places, return_index=True, return_counts=True)
        for place in values[np.lexsort((first, -counts))].tolist():
            if self._index.tiers[tier].key_of(place) != key and self._empty(tier, place, draft):
                return True
        return False

    def _has_ids(self, tier: int, key: Key) -> bool:
        return self.next_segment < SEGMENT_LIMIT and self._index.tiers[tier].has_ids(key.class_bytes)

    def _places(self, tier: int, victims: Ids) -> Ids:
        return np.asarray(self._index.tiers[tier].place[self._index.attached(tier, victims)], np.int64)

    def _empty(self, tier: int, place: int, draft: PlanBuilder) -> bool:
        """Drops all blocks of a segment. False, and nothing changed, if it holds a pinned block or
        a put or a get adds to one of its blocks. Also if most of its pages are quarantined."""
        pages_of = self._index.tiers[tier]
        span = pages_of.pages_of(place)
        used = true_rows(~among(pages_of.state[span], (PageState.FREE, PageState.QUARANTINED))) + span.start
        blocks = pages_of.block[used].astype(np.int64)
        is_held = (blocks < 0).any() or pages_of.doom[used].any() or self._index.held[tier][blocks].any()
        if is_held or pages_of.is_mostly_bad(place) or self.coldest.are_needed(tier, blocks):
            return False
        self.drop(tier, blocks, draft, is_ranked=False)
        pages_of.vacate_idle(place)
        return True
