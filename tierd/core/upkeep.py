"""Upkeep: changes of state outside gets and puts.

Ends of sessions, the start after a restart, results of verification, epochs, operators' commands.
Pinned pages are never freed: they are detached, so that no lookup finds them, and their last unpin
frees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import among, every, in_order, kinds, some, span, true_rows
from tierd.core.formats.meta import duplicate
from tierd.core.formats.model import (
    CODED,
    DAEMON,
    NOBODY,
    SEALED,
    UNVERIFIED,
    Fault,
    PageState,
    Reason,
    SegmentAssignment,
    StructArray,
    TierKind,
)
from tierd.core.index.blocks import Names, names_of, words
from tierd.core.index.priorities import keep_said
from tierd.core.plan import Bools, Ids, Restored
from tierd.core.plan_builder import PlanBuilder
from tierd.core.requests.gets import Gets
from tierd.core.requests.leases import Holder, Holders
from tierd.core.requests.puts import Puts
from tierd.core.space.planner import Planner, Where
from tierd.errors import InvalidArgument


class Upkeep:
    """See the module."""

    def __init__(self, planner: Planner, sessions: Holders, gets: Gets, puts: Puts) -> None:
        self._planner, self._index, self._sessions, self._gets, self._puts = (
            planner,
            planner.index,
            sessions,
            gets,
            puts,
        )

    # -- sessions

    def end_session(self, session: int, into: int, draft: PlanBuilder) -> None:
        """Releases everything that the session held. Its segments become the daemon's, or those of
        the session `into`."""
        holder = self._sessions.open.get(session)
        if holder is None:
            return
        if into != DAEMON and (into == session or self._sessions.get(into).domain != holder.domain):
            raise InvalidArgument(
                f"session {session}: its holds cannot pass to session {into}; give another one of its domain"
            )
        self._gets.let_go(holder, list(holder.leases.values()), draft)
        for reservation in list(holder.reservations):
            self._puts.abort(holder, reservation, reason=Reason.SESSION_ENDED, draft=draft)
        self._sessions.end(session)
        for tier in self._index.tiers:
            tier.hand_over(session, to=into)

    def note_attached(self, session: int, tier: int, segment: int) -> None:
        """The session has the segment's descriptor."""
        self._index.tiers[tier].note_attached(self._sessions.get(session).id, segment)

    # -- start

    def adopt(
        self, tier: int, *, segments: Sequence[SegmentAssignment], extents: StructArray, metas: StructArray, now: float
    ) -> Bools:
        """Takes segments, then the blocks in them."""
        pages_of = self._index.tiers[tier]
        for given in segments:
            is_kept = given.writer in (NOBODY, SEALED) or given.writer in self._sessions.domains
            pages_of.adopt_segment(given, given.writer if is_kept else DAEMON)
        pages = pages_of.find(extents)
        names = names_of(metas)
        good, known = self._is_sound(tier, extents, metas, pages, names)
        self._index.generation = max(self._index.generation, 1 + int(extents["generation"].max(initial=0)))
        if not every(good):
            extents, metas, pages, known, names = (
                extents[good],
                metas[good],
                pages[good],
                known[good],
                names.at(true_rows(good)),
            )
        ids = self._add(self._as_near(metas, extents, known), known, names, now)
        pages_of.adopt(pages, extents["generation"])
        at = span(pages)
        pages_of.length[at] = metas["stored_length"]
        pages_of.flags[at] = extents["flags"] & (UNVERIFIED | CODED)
        self._index.set_errors(tier, pages, metas["error"])
        self._index.attach(tier, pages, ids, now)
        self._index.publish(tier, pages)
        self._index.link(ids, metas["parent"], now)
        self._index.say_before(ids[self._index.blocks.priority[ids] > 0], now)
        self._planner.room.next_segment = max(
            [self._planner.room.next_segment, *(given.segment + 1 for given in segments)]
        )
        return good

    def restore(self, holder: Holder, *, pinned: StructArray, reserved: StructArray) -> Restored:
        """Pins and reservations of a session of the previous run, whatever its share is now: its
        process uses them already. A page without a block (being written, epoch bumped, entry torn)
        is withheld until all holders release it."""
        held = np.concatenate((pinned, reserved))
        self._keep_blank(held)
        where, kept = self._find(held, PageState.RETIRING)
        readable = self._find(pinned, PageState.READY)[1]
        kept[: len(pinned)] |= readable
        lease = 0
        if kept.any():
            where = where.at(kept)
            lease = self._gets.hold(
                holder, kind=TierKind.HOST, where=where, blocks=self._owners(where), within_share=False
            )
        return Restored(lease, kept[: len(pinned)], kept[len(pinned) :])

    def begin_loading(self, tier: int) -> None:
        """More of its blocks follow while requests run."""
        self._index.tiers[tier].is_loading = True

    def bar(self, tier: int, segment: int | None) -> None:
        """See `Core.bar`."""
        pages = self._index.tiers[tier]
        if segment is None:
            pages.vacant |= pages.barred
            pages.barred.clear()
            return
        virgin = {place for place in pages.vacant if pages.last_id[place] is None}
        pages.vacant, pages.barred = pages.vacant - virgin, pages.barred | virgin
        for place in [place for place, own in enumerate(pages.segments) if own is not None and own.id == segment]:
            pages.failing.add(place)
            pages.vacate_idle(place)

    def close_empty(self, tier: int) -> None:
        """Vacates segments without blocks and holders."""
        self._index.tiers[tier].is_loading = False
        self._index.tiers[tier].close_empty()

    # -- verdicts

    def verified(self, extents: StructArray) -> None:
        """Clears UNVERIFIED of unchanged pages; never in a segment of NOBODY, which an unknown
        process may write at any time."""
        for rows in runs(extents["tier"]):
            pages_of = self._index.tiers[int(extents["tier"][rows[0]])]
            pages = _still(pages_of.generation, extents[rows])
            pages = pages[~pages_of.is_nobodys(pages)]
            pages_of.flags[pages] &= np.uint8(~UNVERIFIED & 0xFF)

    def are_held(self, extents: StructArray) -> Bools:
        """Which pages are unchanged, readable and not doomed."""
        held = np.zeros(len(extents), bool)
        for rows in runs(extents["tier"]):
            pages_of = self._index.tiers[int(extents["tier"][rows[0]])]
            pages = extents["page"][rows]
            held[rows] = np.isin(pages_of.state[pages], (PageState.READY, PageState.RETIRING))
            held[rows] &= (pages_of.doom[pages] == 0) & (pages_of.generation[pages] == extents["generation"][rows])
        return held

    def condemn(self, extents: StructArray, fault: Fault, draft: PlanBuilder) -> None:
        """Quarantines unchanged pages, findable or not; leases on them become invalid."""
        for rows in runs(extents["tier"]):
            tier = int(extents["tier"][rows[0]])
            pages_of = self._index.tiers[tier]
            pages = np.unique(_still(pages_of.generation, extents[rows]))
            readable = np.isin(pages_of.state[pages], (PageState.READY, PageState.RETIRING))
            pages = pages[readable & (pages_of.doom[pages] != Reason.CORRUPTED)]
            if len(pages):
                self._index.condemn(tier, pages, fault, draft)

    def lose(self, extents: StructArray, draft: PlanBuilder) -> None:
        """Detaches unchanged pages, ready or being filled."""
        for rows in runs(extents["tier"]):
            tier = int(extents["tier"][rows[0]])
            pages_of, found = self._index.tiers[tier], extents[rows]
            found["page"] = pages_of.find(found)
            pages = np.unique(_still(pages_of.generation, found))
            self._index.doom(
                tier, pages[(pages_of.block[pages] >= 0) & (pages_of.doom[pages] == 0)], Reason.FAILED, draft
            )

    # -- operators

    def live(self, blocks: Ids) -> Ids:
        """Those of the ids that are findable blocks with a readable page, each once."""
        blocks = in_order(np.asarray(blocks, np.int64))
        blocks = blocks[blocks < self._index.blocks.top]
        blocks = blocks[self._index.blocks.named[blocks]]
        return blocks[self._index.nearest(blocks, range(len(self._index.tiers))) >= 0]

    def forget_namespaces(self, namespaces: set[int], draft: PlanBuilder) -> int:
        """Their blocks miss from now on, and transfers to them end unpublished. Returns how many
        had pages, which they keep until `free_forgotten`."""
        blocks = self._index.blocks
        self._puts.dead |= namespaces
        count = blocks.forget(np.asarray(list(namespaces), np.int64))
        tiers, pages = self._planner.inflight.pages()[1]
        for tier in kinds(tiers):
            pages_of, targets = self._index.tiers[tier], pages[tiers == tier]
            targets = targets[(pages_of.doom[targets] == 0) & blocks.forgotten[pages_of.block[targets]]]
            if len(targets):
                self._index.doom(tier, targets, Reason.EPOCH_BUMPED, draft)
        return count

    def free_forgotten(self, blocks: Ids, namespaces: Sequence[int], draft: PlanBuilder) -> None:
        """Frees the pages of those of the ids that were forgotten with these namespaces."""
        those = blocks[self._index.blocks.forgotten[blocks]]
        those = those[among(self._index.blocks.namespace[those], namespaces)]
        self._index.blocks.unname(those)
        for tier in range(len(self._index.tiers)):
            self._doom_all(tier, those, Reason.EPOCH_BUMPED, draft)

    def evict(self, blocks: Ids, tier: int | None, draft: PlanBuilder) -> None:
        """Frees pages that are not pinned."""
        blocks = self.live(blocks)
        for position in range(len(self._index.tiers)) if tier is None else [tier]:
            pages = self._index.readable(position, blocks)
            there = (pages >= 0) & ~self._index.blocks.pinned[blocks]
            pages = pages[there]
            pages = pages[self._index.tiers[position].pins[pages] == 0]
            if len(pages):
                self._index.vacate(position, pages, Reason.ADMIN, draft)

    def pin_blocks(self, blocks: Ids) -> int:
        """Returns how many are newly pinned."""
        return self._set_pinned(blocks, pinned=True)

    def unpin_blocks(self, blocks: Ids) -> int:
        """Returns how many were pinned."""
        return self._set_pinned(blocks, pinned=False)

    # -- inside

    def _as_near(self, metas: StructArray, extents: StructArray, known: Ids) -> StructArray:
        """The metas of the blocks as they are outside of stores. An encoded page tells neither
        length nor digest of its decoded block. known: ids of held blocks, -1: none."""
        coded = true_rows(extents["flags"] & CODED > 0)
        if not len(coded):
            return metas
        metas = duplicate(metas)
        metas["stored_length"][coded] = metas["logical_length"][coded]
        metas["digest"][coded] = metas["origin"][coded]
        metas["digest"][coded[metas["error"][coded] > 0]] = 0  # not known before it is decoded
        held = coded[known[coded] >= 0]
        held = held[self._index.blocks.places[known[held]] > 0]
        metas["digest"][held] = self._index.blocks.digest[known[held]].view(np.uint8)
        return metas

    def _add(self, metas: StructArray, known: Ids, names: Names, now: float) -> Ids:
        """Adds blocks; of two tiers' priorities for one, the greater holds. known: ids of these
        names, else -1."""
        blocks = self._index.blocks
        if some(blocks.priority[known[known >= 0]]):
            metas = metas.copy()
            keep_said(blocks, known, metas, blocks.unix_s + now)
        return blocks.add(metas, now, known=known, names=names)

    def _set_pinned(self, blocks: Ids, *, pinned: bool) -> int:
        blocks = self.live(blocks)
        blocks = blocks[self._index.blocks.pinned[blocks] != pinned]
        self._index.blocks.pinned[blocks] = pinned
        self._index.weigh(blocks)
        return len(blocks)

    def _doom_all(self, tier: int, blocks: Ids, reason: Reason, draft: PlanBuilder) -> None:
        pages = self._index.attached(tier, blocks)
        pages = pages[pages >= 0]
        if len(pages):
            self._index.doom(tier, pages, reason, draft)

    def _is_sound(
        self, tier: int, extents: StructArray, metas: StructArray, pages: Ids, names: Names
    ) -> tuple[Bools, Ids]:
        """Which survivors can be taken: a free page of a known segment, once; a new name here; no
        contradiction. Also the ids of their names, -1: none."""
        pages_of, blocks = self._index.tiers[tier], self._index.blocks
        good = pages >= 0
        good[good] = pages_of.state[pages[good]] == PageState.FREE
        lengths = metas["stored_length"][good] + pages_of.spec.slot_overhead_bytes
        good[good] = lengths <= pages_of.class_bytes(pages[good])
        for once in (_firsts(pages, good), names.firsts()):
            good &= once
        good &= ~among(metas["namespace"], list(self._puts.dead))
        ids = blocks.find(names)
        is_known = ids >= 0
        if some(is_known):
            good &= ~is_known | (self._index.attached(tier, ids) < 0)
            is_held = is_known & (blocks.places[ids] > 0)
            good &= ~is_held | self._agrees(extents, metas, ids)
        return np.asarray(good, bool), ids

    def _agrees(self, extents: StructArray, metas: StructArray, ids: Ids) -> Bools:
        """Which pages may hold the same block as those of the ids. An encoded page names the block
        that was encoded; a coarse page near has other bytes than that."""
        own = self._index.blocks.digest[ids]
        is_coded = extents["flags"] & CODED > 0
        wanted = words(np.where(is_coded[:, None], metas["origin"], metas["digest"]))
        agrees = (own == wanted).all(axis=1) | ~own.any(axis=1)
        if some(is_coded):
            agrees |= is_coded & (self._index.nearest_error(ids) > 0)
        return np.asarray(agrees, bool)

    def _find(self, extents: StructArray, state: int) -> tuple[Where, Bools]:
        """Pages by place, and which have this state. A used one must have this generation, a free
        one must be unique."""
        pages = np.full(len(extents), -1, np.int64)
        good = np.zeros(len(extents), bool)
        for rows in runs(extents["tier"]):
            tier = int(extents["tier"][rows[0]])
            if tier >= len(self._index.tiers):
                continue
            pages_of = self._index.tiers[tier]
            pages[rows] = found = pages_of.find(extents[rows])
            good[rows] = found >= 0
            at, found = rows[found >= 0], found[found >= 0]
            good[at] = pages_of.state[found] == state
            if state != PageState.FREE:
                good[at] &= pages_of.generation[found] == extents["generation"][at]
            else:
                good[rows] &= _firsts(pages[rows], good[rows])
        return Where(extents["tier"].astype(np.int64), pages), good

    def _keep_blank(self, extents: StructArray) -> None:
        """Dooms those pages that are free, as if a block had been there: holders pin them, the last
        unpin frees them."""
        where, free = self._find(extents, PageState.FREE)
        for tier, page, generation in zip(*where.at(free), extents["generation"][free].tolist(), strict=True):
            pages_of, pages = self._index.tiers[tier], np.asarray([page], np.int64)
            pages_of.take_exactly(page, generation)
            pages_of.move(pages, PageState.RESERVED, PageState.RETIRING)
            pages_of.doom[page], pages_of.length[page] = Reason.SESSION_ENDED, 1
            self._index.generation = max(self._index.generation, generation + 1)

    def _owners(self, where: Where) -> Ids:
        blocks = [self._index.tiers[t].block[p] for t, p in zip(where.tiers, where.pages, strict=True)]
        return np.asarray(blocks, np.int64)


def _firsts(pages: Ids, good: Bools) -> Bools:
    """Which good rows are the first with their page."""
    if every(pages[1:] > pages[:-1]):
        return good
    out = np.zeros(len(pages), bool)
    rows = np.flatnonzero(good)
    out[rows[np.unique(pages[rows], return_index=True)[1]]] = True
    return out


def _still(generation: Ids, extents: StructArray) -> Ids:
    """Pages that still have the extents' generations."""
    pages = extents["page"]
    pages, wanted = pages[(pages >= 0) & (pages < len(generation))], extents["generation"]
    wanted = wanted[(extents["page"] >= 0) & (extents["page"] < len(generation))]
    return np.asarray(pages[generation[pages] == wanted], np.int64)
