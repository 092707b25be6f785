"""Gets: lookup, acquire, settle, release, prefetch.

Purpose: from a question about groups to pins on readable pages of one kind of tier, in two steps with transfers between them. Non-purpose: how a
transfer or room is made (planner.py, room.py).

acquire: take the greatest token count N that is held anywhere; secure what N needs (a pin within the session's share, a page
near or a flight to one); where that fails, those blocks count as not there, and N is taken again. settle does the same without
flights: what can be read near now. So one failed block shortens the answer and loses nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierd.core.blocks import Names, words
from tierd.core.draft import Draft, no_ids
from tierd.core.eviction import Asked
from tierd.core.groups import Span, block_tokens, check_groups, ends, longest, needed
from tierd.core.leases import Held, Lease, Session, Sessions
from tierd.core.model import EXTENT, Need, PageState, Reason, Wanted
from tierd.core.plan import Acquisition, Bools, Found, GroupQuery, Ids, Plan, Question, Served, ServedGroup
from tierd.core.planner import Planner, Where
from tierd.core.sets import among, distinct, every, in_order, kinds, some, true_rows
from tierd.errors import InvalidArgument, NotFound

Tiers = frozenset[int]
"""Positions of tiers."""
NO_TIERS: Tiers = frozenset()

NO_PLAN = Plan()
ATTEMPTS = 8
"""Shorter token counts tried before a request that does not fit gets nothing; prefixes need two."""

MOST_MASS = 1e30
"""Attention that is kept of a block, at most: policies add and average it as float32."""


@dataclass(slots=True)
class Sight:
    """A question with what is known of its blocks. keys, ids, tier: uint64, int64 and int8 [ranks, n] per group; -1 where nothing can be read. used: blocks that
    count as used by it already. near: pages of those that were wanted last, where nothing has changed since."""

    groups: Sequence[GroupQuery]
    keys: list[NDArray[np.uint64]]
    ids: list[Ids]
    tier: list[NDArray[np.int8]]
    used: tuple[Ids, ...] = ()
    near: Where | None = None

    def there(self, but: Ids | None = None) -> list[Bools]:
        """Per group, which blocks can be read for every rank; not those in `but`."""
        out = []
        for ids in self.ids:
            have = ids >= 0
            if but is not None and len(but):
                have &= ~among(ids, but)
            out.append(have[0] if len(have) == 1 else np.asarray(have.all(axis=0), bool))
        return out

    def spans(self, tokens: int) -> list[Span]:
        """The blocks that each group needs for so many tokens."""
        return [needed(group, tokens) for group in self.groups]

    def wanted(self, spans: Sequence[Span]) -> Ids:
        """Their distinct ids, those that end earlier in the sequence first."""
        if len(self.ids) == 1 and len(self.ids[0]) == 1:
            return in_order(self.ids[0][0, slice(*spans[0])])
        parts, keys = [], []
        for group, ids, (first, stop) in zip(self.groups, self.ids, spans, strict=True):
            part = ids[:, first:stop]
            parts.append(part.ravel())
            keys.append(np.broadcast_to(ends(group)[first:stop], part.shape).ravel())
        order = np.argsort(np.concatenate(keys), kind="stable")
        return in_order(np.concatenate(parts)[order])


class Gets:
    """See the module."""

    def __init__(self, planner: Planner, sessions: Sessions) -> None:
        self._planner, self._index, self._sessions = planner, planner.index, sessions

    def report_attention(
        self, holder: Session, *, lease: int, group: int, mass: NDArray[np.float32], now: float
    ) -> None:
        """As the core's."""
        found = holder.leases.get(lease)
        if found is None:
            raise NotFound(f"lease {lease}: not held by session {holder.id}; report before releasing it")
        blocks = found.held[group].blocks.reshape(-1) if group < len(found.held) else None
        if blocks is None or len(blocks) != len(mass) or not np.isfinite(mass).all() or (mass < 0).any():
            raise InvalidArgument(
                f"attention: {len(mass)} values for group {group} of lease {lease}; send one finite value, 0 or more, for each "
                f"of its {0 if blocks is None else len(blocks)} blocks"
            )
        kept, most = self._index.blocks.attention, np.float32(MOST_MASS)
        np.add.at(kept, blocks, np.minimum(mass, most))
        kept[blocks] = np.minimum(kept[blocks], most)
        for tier in self._index.serving():
            self._index.touch(tier, in_order(blocks)[::-1], now)

    def lookup(self, groups: Sequence[GroupQuery]) -> Found:
        """How much could be served, and from where."""
        sight = self._look(groups, None)
        tokens = longest(groups, sight.there())
        return Found(tokens, sight.tier, self._tier_tokens(sight, tokens))

    def acquire(
        self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, shut: Tiers
    ) -> Acquisition:
        """Pins on pages, readable or being filled, for the longest prefix that fits. shut: tiers that nothing is brought from."""
        holder = self._sessions.get(session)
        sight = self._look(groups, holder.domain)
        self._relax(groups)
        self._tell(sight, now)
        near = self._acquire_near(sight, holder=holder, kind=kind, now=now)
        return near or self._acquire(session, sight, Question(tuple(groups), kind), Draft(now), shut)

    def used(self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float) -> Found:
        """Policies hear of a get of pages near that its client has made by itself, as of any other; what of it can be served now."""
        sight = self._look(groups, self._sessions.get(session).domain)
        self._relax(groups)
        tokens = longest(groups, sight.there())
        self._tell(sight, now)
        self._used(sight.wanted(sight.spans(tokens)), no_ids(), kind=kind, now=now)
        return Found(tokens, sight.tier, self._tier_tokens(sight, tokens))

    def acquire_again(self, session: int, question: Question, *, now: float, shut: Tiers) -> Acquisition:
        """As `acquire`, of a question that was told of already."""
        sight = self._look(question.groups, self._sessions.get(session).domain)
        sight.used = question.used
        return self._acquire(session, sight, question, Draft(now), shut)

    def _acquire(self, session: int, sight: Sight, question: Question, draft: Draft, shut: Tiers) -> Acquisition:
        holder, groups, kind = self._sessions.get(session), question.groups, question.kind
        most, tokens = self._secure(sight, kind=kind, holder=holder, draft=draft, shut=shut)
        tier_tokens = self._tier_tokens(sight, tokens)
        lies_shut = tokens < most and any(among(tier, list(shut)).any() for tier in sight.tier)
        if tokens == 0:
            return Acquisition(0, 0, tier_tokens, draft.plan(), most == 0, lies_shut, question)
        lease = Lease(self._sessions.next_id(), session, kind, groups, self._held(sight, tokens, kind), tokens)
        self._pin(lease, holder)
        for held in lease.held:
            self._planner.wait_for(Where(held.tiers.ravel(), held.pages.ravel()), draft)
        used = (*question.used, *(held.blocks.ravel() for held in lease.held))
        question = Question(question.groups, question.kind, used)
        return Acquisition(lease.id, tokens, tier_tokens, draft.plan(), tokens == most, lies_shut, question)

    def prefetch(self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, shut: Tiers) -> Plan:
        """Transfers for the servable part; nothing is held. shut: as in `acquire`."""
        draft = Draft(now)
        sight = self._look(groups, self._sessions.get(session).domain)
        self._relax(groups)
        self._secure(sight, kind=kind, holder=None, draft=draft, shut=shut)
        return draft.plan()

    def settle(self, lease_id: int, *, now: float) -> Served:
        """Moves the lease's pins to what can be read now."""
        lease = self._sessions.leases.get(lease_id)
        if lease is None:
            return Served(0, [], Plan())
        if not lease.queries:
            raise InvalidArgument(
                f"lease {lease_id}: made by a commit, which is settled from the start; use its handles"
            )
        draft, holder = Draft(now), self._sessions.get(lease.session)
        if not self._is_good(lease):
            self._shorten(lease, holder, draft)
        lease.settled = True
        if lease.tokens == 0:
            self.let_go(holder, [lease], draft)
            return Served(0, [], draft.plan())
        groups = [self._served(query, held) for query, held in zip(lease.queries, lease.held, strict=True)]
        return Served(lease.tokens, groups, draft.plan())

    def let_go(self, holder: Session, leases: Sequence[Lease], draft: Draft) -> None:
        """These leases of a session end: several cost hardly more than one."""
        self._unpin(leases, holder, draft)
        for lease in leases:
            del holder.leases[lease.id], self._sessions.leases[lease.id]

    def hold(self, holder: Session, *, kind: Wanted, where: Where, blocks: Ids, within_share: bool = True) -> int:
        """A lease on readable pages (of a commit, or from before a restart). 0 if that is beyond the session's share and must not be."""
        for tier in kinds(where.tiers) if within_share else ():
            if not self._sessions.room_for_pins(holder, tier, where.pages[where.tiers == tier]).all():
                return 0
        held = Held(0, where.tiers[None], where.pages[None], blocks[None])
        lease = Lease(self._sessions.next_id(), holder.id, kind, (), [held], 0, settled=True)
        self._pin(lease, holder)
        return lease.id

    # -- inside: what is near

    def _acquire_near(self, sight: Sight, *, holder: Session, kind: Wanted, now: float) -> Acquisition | None:
        """What `_acquire` and `settle` come to if the answer is a stretch of one tier, all of which can be read there
        and fits. None, and nothing has changed, if it is not. Without this way views take 1.12 to 1.15 of the time
        and 1.13 to 1.19 of the daemon's processor (in turns; 256 blocks, and one)."""
        group, wanted = sight.groups[0], self._index.serving(kind)
        if len(sight.groups) > 1 or len(sight.ids[0]) > 1 or len(wanted) != 1:
            return None
        tokens = longest(sight.groups, sight.there())
        first, stop = needed(group, tokens)
        blocks, tier, pages_of = sight.ids[0][0, first:stop], wanted[0], self._index.tiers[wanted[0]]
        if len(blocks) == 0 or not every(sight.tier[0][0, first:stop] == tier) or len(distinct(blocks)) < len(blocks):
            return None
        pages = self._index.attached(tier, blocks)
        if not self._fits(pages, holder, tier):
            return None
        held = Held(first, np.full((1, len(blocks)), tier, np.int64), pages[None], blocks[None])
        lease = Lease(self._sessions.next_id(), holder.id, kind, sight.groups, [held], tokens, settled=True)
        holder.leases[lease.id] = self._sessions.leases[lease.id] = lease
        self._index.pin_attached(tier, pages, blocks)
        self._sessions.pin(holder, tier, pages)
        self._used(blocks, no_ids(), kind=kind, now=now)
        covered = block_tokens(group)[first:stop].astype(np.uint32)
        part = ServedGroup(first, len(blocks), pages_of.extents(pages)[None], covered, blocks[None])
        return Acquisition(
            lease.id,
            tokens,
            self._tier_tokens(sight, tokens),
            NO_PLAN,
            whole=True,
            question=Question(tuple(sight.groups), kind, (blocks,)),
            served=Served(tokens, [part], NO_PLAN),
        )

    # -- inside: looking

    def _look(self, groups: Sequence[GroupQuery], domain: int | None) -> Sight:
        """Finds every block. domain: the asker's; blocks of another are not there for it."""
        check_groups(groups)
        serving = self._index.serving()
        sight = Sight(groups, [], [], [])
        for group in groups:
            shape = (len(group.namespaces), len(group.hashes))
            namespaces = np.array(group.namespaces, np.uint32).repeat(shape[1])
            hashes = words(group.hashes)
            names = self._index.blocks.keyed(
                Names(namespaces, hashes if shape[0] == 1 else np.tile(hashes, (shape[0], 1)))
            )
            ids = self._index.blocks.find(names)
            if domain is not None and some(strange := self._index.blocks.domain.take(ids) != domain):
                ids[strange] = -1
            tier = self._index.nearest(ids, serving)
            if some(nowhere := tier < 0):
                ids[nowhere] = -1
            sight.keys.append(self._index.blocks.keys_of(names).reshape(shape))
            sight.ids.append(ids.reshape(shape))
            sight.tier.append(tier.reshape(shape))
        return sight

    def _tier_tokens(self, sight: Sight, tokens: int) -> list[int]:
        group, (first, stop) = sight.groups[0], needed(sight.groups[0], tokens)
        tier = sight.tier[0][0, first:stop]
        out: list[int] = (np.bincount(tier, minlength=len(self._index.tiers)) * group.tokens_per_block).tolist()
        if stop > first:  # the last block may be short
            out[int(tier[-1])] -= max(0, stop * group.tokens_per_block - group.tokens)
        return out

    def _relax(self, groups: Sequence[GroupQuery]) -> None:
        lax = {namespace for group in groups if group.need != Need.PREFIX for namespace in group.namespaces}
        if lax:
            self._index.weigh(self._index.blocks.relax(lax))

    def _tell(self, sight: Sight, now: float) -> None:
        """The listener hears of the question before policies hear of its blocks, which are used from now on, wherever they lie."""
        if self._index.listener is None:
            return
        for ids in sight.ids:
            self._index.blocks.last_used[ids if every(known := ids >= 0) else ids[known]] = now
        tokens = sight.groups[0].tokens if len(sight.groups[0].hashes) else 0
        sizes = [group.tokens_per_block for group in sight.groups]
        kinds_of = np.array([*(tier.spec.kind for tier in self._index.tiers), -1], np.int8)
        nearest = kinds_of[sight.tier[0][0]]
        spread = words(sight.groups[0].hashes)[:, 0]
        self._index.listener.asked(Asked(sight.keys[0][0], sight.ids, sizes, tokens, spread, nearest), now)

    # -- inside: securing

    def _secure(
        self, sight: Sight, *, kind: Wanted, holder: Session | None, draft: Draft, shut: Tiers
    ) -> tuple[int, int]:
        """The greatest token count that is held anywhere, and that of which all is near, flights for what is not begun. holder None: nobody's share, for prefetching."""
        failed, brought, most = no_ids(), no_ids(), 0
        for _ in range(ATTEMPTS):
            tokens = longest(sight.groups, sight.there(failed))
            most = max(most, tokens)
            blocks = sight.wanted(sight.spans(tokens))
            sight.near = self._planner.attached(blocks, self._index.serving(kind))
            over, away = self._apart(blocks, sight.near, kind=kind, holder=holder, shut=shut)
            if len(over) == 0 and len(away):
                sight.near = None
                brought = np.concatenate((brought, away))
                reason = Reason.PREFETCH if holder is None else Reason.DEMAND
                over = self._bring(blocks, away, kind=kind, reason=reason, draft=draft)
            if len(over) == 0:
                if holder is not None:
                    used = _without(blocks, sight.used)
                    self._used(used, brought, kind=kind, now=draft.now)
                return most, tokens
            failed = np.concatenate((failed, over))
        return most, 0

    def _apart(self, blocks: Ids, near: Where, *, kind: Wanted, holder: Session | None, shut: Tiers) -> tuple[Ids, Ids]:
        """Blocks that may not come (no such tier in service, from a shut one, beyond the share), and those that have no page near."""
        serving = self._index.serving(kind)
        if not serving:
            return blocks, no_ids()
        over, away = self._over_share(blocks, near, serving, holder), near.pages < 0
        if shut:
            over |= away & among(self._planner.sources(blocks, kind).tiers, list(shut))
        return blocks[over], blocks[away]

    def _bring(self, blocks: Ids, away: Ids, *, kind: Wanted, reason: Reason, draft: Draft) -> Ids:
        """Flights for those away, while all the blocks are guarded. Which found no room."""
        guarded = self._planner.guard(blocks)
        self._planner.bring(away, kind, reason=reason, draft=draft)
        self._planner.unguard(guarded, draft)
        return away[self._planner.attached(away, self._index.serving(kind)).pages < 0]

    def _over_share(self, blocks: Ids, near: Where, serving: list[int], holder: Session | None) -> Bools:
        """Which blocks, in order, would take the holder beyond its share of the tiers."""
        over = np.zeros(len(blocks), bool)
        if holder is None or len(blocks) == 0:
            return over
        tiers, is_near = near.tiers, near.tiers >= 0
        if not every(is_near):
            tiers = np.where(is_near, tiers, self._index.targets(blocks, serving))
        elif len(serving) == 1 and self._fits(near.pages, holder, serving[0]):
            return over
        for tier in kinds(tiers):
            rows = true_rows(tiers == tier)
            pages_of, mine = self._index.tiers[tier], holder.pinned[tier]
            cost = pages_of.class_bytes(near.pages[rows])  # more than the block takes, if it came shorter than reserved
            if not every(is_near):
                away = true_rows(~is_near[rows])
                cost[away] = pages_of.class_of(self._index.blocks.length[blocks[rows[away]]])
            if int(cost.sum()) <= self._sessions.room_bytes(holder, tier):
                continue  # even if it pins none of them yet
            if mine:
                cost[[page in mine for page in near.pages[rows].tolist()]] = 0
            over[rows] = ~self._sessions.room_for_bytes(holder, tier, cost)
        return over

    def _fits(self, pages: Ids, holder: Session, tier: int) -> bool:
        """Whether the holder may pin these pages even if it pins none of them yet."""
        return int(self._index.tiers[tier].class_bytes(pages).sum()) <= self._sessions.room_bytes(holder, tier)

    def _used(self, blocks: Ids, brought: Ids, *, kind: Wanted, now: float) -> None:
        """Policies of all tiers hear of it, last block first, so that a chain is in one order everywhere; an arrival was tracked just now."""
        serving = self._index.serving(kind)
        stayed = blocks[~among(blocks, brought)] if len(brought) else blocks
        self._index.blocks.touch(blocks, now)  # first, so that policies can tell uses by requests from other touches
        for tier in self._index.serving():
            self._index.touch(tier, (stayed if tier in serving else blocks)[::-1], now)
        self._index.note_use(blocks[::-1], now)

    # -- inside: leases

    def _held(self, sight: Sight, tokens: int, kind: Wanted) -> list[Held]:
        serving, out = self._index.serving(kind), []
        for ids, (first, stop) in zip(sight.ids, sight.spans(tokens), strict=True):
            blocks = ids[:, first:stop]
            near = sight.near
            if near is None or len(sight.ids) > 1 or len(blocks) > 1 or len(near.pages) < blocks.size:
                near = self._planner.attached(blocks.ravel(), serving)
            out.append(Held(first, near.tiers.reshape(blocks.shape), near.pages.reshape(blocks.shape), blocks))
        return out

    def _pin(self, lease: Lease, holder: Session) -> None:
        holder.leases[lease.id] = self._sessions.leases[lease.id] = lease
        for tier in range(len(self._index.tiers)):
            pages = lease.pages_in(tier)
            if len(pages):
                self._index.pin(tier, pages)
                self._sessions.pin(holder, tier, pages)

    def _unpin(self, leases: Sequence[Lease], holder: Session, draft: Draft) -> None:
        for tier in range(len(self._index.tiers)):
            parts = [lease.pages_in(tier) for lease in leases]
            pages = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else no_ids()
            if len(pages):
                self._sessions.unpin(holder, tier, pages)
                self._index.unpin(tier, pages, draft)

    def _is_good(self, lease: Lease) -> bool:
        """Whether its pages can be handed out. Once settled, only wrong bytes take anything away: a lease outlives its epoch."""
        for tier, pages_of in enumerate(self._index.tiers):
            pages = lease.pages_in(tier)
            if len(pages) == 0:
                continue
            doom = pages_of.doom[pages]
            lost = (doom == int(Reason.CORRUPTED)) if lease.settled else (doom > 0)
            if some(lost) or not every(pages_of.state[pages] >= PageState.READY):
                return False
        return True

    def _shorten(self, lease: Lease, holder: Session, draft: Draft) -> None:
        """The lease's pins move to the longest part of it that can be read near now, within the share: not to more, though somebody may have put that meanwhile."""
        sight, near = self._look(lease.queries, holder.domain), self._index.serving(lease.kind)
        for query, ids in zip(lease.queries, sight.ids, strict=True):
            ids[self._index.nearest(ids.ravel(), near).reshape(ids.shape) < 0] = -1
            ids[:, needed(query, lease.tokens).stop :] = -1
        before = replace(lease)
        failed = no_ids()
        while True:
            tokens = longest(lease.queries, sight.there(failed))
            blocks = sight.wanted(sight.spans(tokens))
            over = self._over_share(blocks, self._planner.attached(blocks, near), near, holder)
            if not over.any():
                break
            failed = np.concatenate((failed, blocks[over]))
        lease.hold(self._held(sight, tokens, lease.kind), tokens)
        self._pin(lease, holder)
        self._unpin([before], holder, draft)

    def _served(self, group: GroupQuery, held: Held) -> ServedGroup:
        shape, tiers = held.pages.shape, kinds(held.tiers.ravel())
        if len(tiers) == 1:
            extents = self._index.tiers[tiers[0]].extents(held.pages.ravel()).reshape(shape)
        else:
            extents = np.zeros(shape, EXTENT)
            for tier in tiers:
                here = held.tiers == tier
                extents[here] = self._index.tiers[tier].extents(held.pages[here])
        tokens = block_tokens(group)[held.first : held.first + shape[1]].astype(np.uint32)
        return ServedGroup(held.first, shape[1], extents, tokens, held.blocks)


def _without(blocks: Ids, others: Sequence[Ids]) -> Ids:
    """Those that are not among the others, in their order."""
    return blocks[~among(blocks, np.concatenate(others))] if others else blocks
