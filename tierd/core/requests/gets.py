"""Gets: lookup, acquire, settle, release, prefetch.

They pin readable pages of one kind of tier, in two steps with transfers between. Blocks are found
by lookup.py, pins kept by pins.py, transfers and room made by planner.py and room.py.

acquire takes the greatest token count N that is held anywhere. It secures the blocks that N needs:
a pin within the session's share, and a page near or a transfer to one. Blocks that fail count as
missing, and N is taken again. settle does the same without transfers, with pages that can be read
near now. So a failed block shortens the answer and loses nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tierd.core.arrays.sets import among, distinct, every, kinds
from tierd.core.eviction import SequenceRequest
from tierd.core.formats.model import Need, Reason, Wanted
from tierd.core.index.blocks import words
from tierd.core.plan import Acquisition, Allowance, GroupQuery, Ids, LookupResult, Plan, Question, Served, ServedGroup
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.requests.groups import block_tokens, longest, needed
from tierd.core.requests.leases import Held, Holder, Holders, Lease
from tierd.core.requests.lookup import Sight, look
from tierd.core.requests.pins import Pins
from tierd.core.space.planner import Planner, Where
from tierd.errors import InvalidArgument

Tiers = frozenset[int]
"""Positions of tiers."""
NO_TIERS: Tiers = frozenset()

NO_PLAN = Plan()
ATTEMPTS = 8
"""Shorter token counts tried before a request that does not fit gets nothing; prefixes need two."""


class Gets:
    """See the module."""

    def __init__(self, planner: Planner, sessions: Holders) -> None:
        self._planner, self._index, self._sessions = planner, planner.index, sessions
        self._pins = Pins(planner, sessions)

    def lookup(self, groups: Sequence[GroupQuery]) -> LookupResult:
        """How many tokens could be served, and from which tiers."""
        sight = look(self._index, groups, None)
        tokens = longest(groups, sight.there())
        return LookupResult(tokens, sight.tier, sight.tier_tokens(tokens))

    def acquire(
        self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, shut: Tiers
    ) -> Acquisition:
        """Pins pages, readable or being filled, for the longest prefix that fits."""
        holder = self._sessions.get(session)
        sight = look(self._index, groups, holder.domain)
        self._relax(groups)
        self._notify_listener(sight, now)
        near = self._acquire_near(sight, holder=holder, kind=kind, now=now)
        return near or self._acquire(session, sight, Question(tuple(groups), kind), PlanBuilder(now), shut)

    def used(self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float) -> LookupResult:
        """Counts a get that a client made without a call; returns the servable part."""
        sight = look(self._index, groups, self._sessions.get(session).domain)
        self._relax(groups)
        tokens = longest(groups, sight.there())
        self._notify_listener(sight, now)
        self._used(sight.wanted(tokens), no_ids(), kind=kind, now=now)
        return LookupResult(tokens, sight.tier, sight.tier_tokens(tokens))

    def acquire_again(self, session: int, question: Question, *, now: float, shut: Tiers) -> Acquisition:
        """As `acquire`, for a question whose use was counted."""
        sight = look(self._index, question.groups, self._sessions.get(session).domain)
        sight.used = question.used
        return self._acquire(session, sight, question, PlanBuilder(now), shut)

    def _acquire(self, session: int, sight: Sight, question: Question, draft: PlanBuilder, shut: Tiers) -> Acquisition:
        holder, groups, kind = self._sessions.get(session), question.groups, question.kind
        most, tokens = self._secure(sight, kind=kind, holder=holder, draft=draft, shut=shut)
        tier_tokens, nearest = sight.tier_tokens(tokens), sight.tier[0][0]
        lies_shut = tokens < most and any(among(tier, list(shut)).any() for tier in sight.tier)
        if tokens == 0:
            return Acquisition(0, 0, tier_tokens, draft.plan(), most == 0, lies_shut, question, None, nearest)
        lease = Lease(self._sessions.next_id(), session, kind, groups, self._pins.held(sight, tokens, kind), tokens)
        self._pins.pin(lease, holder)
        for held in lease.held:
            self._planner.wait_for(Where(held.tiers.ravel(), held.pages.ravel()), draft)
        used = (*question.used, *(held.blocks.ravel() for held in lease.held))
        question = Question(question.groups, question.kind, used)
        return Acquisition(
            lease.id, tokens, tier_tokens, draft.plan(), tokens == most, lies_shut, question, None, nearest
        )

    def prefetch(
        self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, allowance: Allowance
    ) -> Plan:
        """Transfers for what the allowance permits of the servable part; pins nothing. Waits for
        those that others began."""
        draft = PlanBuilder(now, allowance.bytes)
        sight = look(self._index, groups, self._sessions.get(session).domain)
        self._relax(groups)
        _, tokens = self._secure(sight, kind=kind, holder=None, draft=draft, shut=allowance.shut)
        self._planner.wait_for(self._planner.attached(sight.wanted(tokens), self._index.serving(kind)), draft)
        return draft.plan()

    def keep(self, holder: Holder, blocks: Ids, kind: Wanted) -> int:
        """A lease on the near pages of these blocks, filled or being filled. 0 if there are none, or if
        they exceed the session's share."""
        blocks = distinct(blocks)
        where = self._planner.attached(blocks, self._index.serving(kind))
        is_near = where.pages >= 0
        if not is_near.any():
            return 0
        return self.hold(holder, kind=kind, where=where.at(is_near), blocks=blocks[is_near])

    def promised(self, lease_id: int) -> Served:
        """The answer of `settle` if every transfer succeeds. The lease keeps its pins."""
        lease = self._sessions.leases[lease_id]
        groups = [self._pins.served(query, held) for query, held in zip(lease.queries, lease.held, strict=True)]
        return Served(lease.tokens, groups, NO_PLAN, pending=~self._pins.readable(lease))

    def settle(self, lease_id: int, *, now: float) -> Served:
        """Moves the lease's pins to pages that can be read now."""
        lease = self._sessions.leases.get(lease_id)
        if lease is None:
            return Served(0, [], Plan())
        if not lease.queries:
            raise InvalidArgument(f"lease {lease_id}: a commit's lease is already settled; use its handles")
        draft, holder = PlanBuilder(now), self._sessions.get(lease.session)
        if not self._pins.is_good(lease):
            self._shorten(lease, holder, draft)
        lease.settled = True
        if lease.tokens == 0:
            self.let_go(holder, [lease], draft)
            return Served(0, [], draft.plan())
        groups = [self._pins.served(query, held) for query, held in zip(lease.queries, lease.held, strict=True)]
        return Served(lease.tokens, groups, draft.plan())

    def let_go(self, holder: Holder, leases: Sequence[Lease], draft: PlanBuilder) -> None:
        """Ends leases of a session; several cost hardly more than one."""
        self._pins.unpin(leases, holder, draft)
        for lease in leases:
            del holder.leases[lease.id], self._sessions.leases[lease.id]

    def hold(self, holder: Holder, *, kind: Wanted, where: Where, blocks: Ids, within_share: bool = True) -> int:
        """A lease on readable pages (of a commit, or from before a restart). 0 if it exceeds the
        session's share, unless within_share is False."""
        for tier in kinds(where.tiers) if within_share else ():
            if not self._sessions.room_for_pins(holder, tier, where.pages[where.tiers == tier]).all():
                return 0
        held = Held(0, where.tiers[None], where.pages[None], blocks[None])
        lease = Lease(self._sessions.next_id(), holder.id, kind, (), [held], 0, settled=True)
        self._pins.pin(lease, holder)
        return lease.id

    # -- inside: near pages

    def _acquire_near(self, sight: Sight, *, holder: Holder, kind: Wanted, now: float) -> Acquisition | None:
        """The answer of `_acquire` and `settle` if one tier can read all blocks and they fit. Else
        None, and nothing has changed. Without this fast path views take 1.12 to 1.15 of the time,
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
        if not self._pins.fits(pages, holder, tier):
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
            sight.tier_tokens(tokens),
            NO_PLAN,
            whole=True,
            question=Question(tuple(sight.groups), kind, (blocks,)),
            served=Served(tokens, [part], NO_PLAN),
            nearest=sight.tier[0][0],
        )

    def _relax(self, groups: Sequence[GroupQuery]) -> None:
        lax = {namespace for group in groups if group.need != Need.PREFIX for namespace in group.namespaces}
        if lax:
            self._index.weigh(self._index.blocks.relax(lax))

    def _notify_listener(self, sight: Sight, now: float) -> None:
        """Tells the listener of the question, before policies see its blocks. These count as used
        in any tier."""
        if self._index.listener is None:
            return
        for ids in sight.ids:
            self._index.blocks.last_used[ids if every(known := ids >= 0) else ids[known]] = now
        tokens = sight.groups[0].tokens if len(sight.groups[0].hashes) else 0
        sizes = [group.tokens_per_block for group in sight.groups]
        kinds_of = np.array([*(tier.spec.kind for tier in self._index.tiers), -1], np.int8)
        nearest = kinds_of[sight.tier[0][0]]
        spread = words(sight.groups[0].hashes)[:, 0]
        self._index.listener.asked(SequenceRequest(sight.keys[0][0], sight.ids, sizes, tokens, spread, nearest), now)

    # -- inside: securing

    def _secure(
        self, sight: Sight, *, kind: Wanted, holder: Holder | None, draft: PlanBuilder, shut: Tiers
    ) -> tuple[int, int]:
        """The greatest token count held anywhere, and the greatest that is near or in transfer;
        plans those transfers. holder None: a prefetch, without a share."""
        failed, brought, most = no_ids(), no_ids(), 0
        for _ in range(ATTEMPTS):
            tokens = longest(sight.groups, sight.there(failed))
            most = max(most, tokens)
            blocks = sight.wanted(tokens)
            sight.near = self._planner.attached(blocks, self._index.serving(kind))
            over, away = self._apart(blocks, sight, kind=kind, holder=holder, shut=shut)
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

    def _apart(self, blocks: Ids, sight: Sight, *, kind: Wanted, holder: Holder | None, shut: Tiers) -> tuple[Ids, Ids]:
        """Blocks that cannot come near, and blocks without a page there. The former have no tier in
        service, lie in a shut one, exceed the share, or are near but too coarse."""
        near, limit = sight.near, min(group.error_limit for group in sight.groups)
        assert near is not None, "the pages near were looked up"
        serving = self._index.serving(kind)
        if not serving:
            return blocks, no_ids()
        over, away = self._pins.over_share(blocks, near, serving, holder), near.pages < 0
        over |= self._pins.too_coarse(near, limit)
        if shut:
            over |= away & among(self._planner.sources(blocks, kind).tiers, list(shut))
        return blocks[over], blocks[away]

    def _bring(self, blocks: Ids, away: Ids, *, kind: Wanted, reason: Reason, draft: PlanBuilder) -> Ids:
        """Transfers for the blocks away, while all are guarded. Returns those without room."""
        lengths = self._index.blocks.length[away]
        guarded = self._planner.guard(blocks)
        self._planner.bring(away[: draft.allowed(lengths)], kind, reason=reason, draft=draft)
        self._planner.unguard(guarded, draft)
        is_there = self._planner.attached(away, self._index.serving(kind)).pages >= 0
        draft.take(lengths[is_there])
        return away[~is_there]

    def _used(self, blocks: Ids, brought: Ids, *, kind: Wanted, now: float) -> None:
        """Counts a use in policies of all tiers, last block first, so that all have a chain in one
        order. Blocks just brought are tracked already."""
        serving = self._index.serving(kind)
        stayed = blocks[~among(blocks, brought)] if len(brought) else blocks
        self._index.blocks.touch(blocks, now)  # first, so that policies can tell requests from other touches
        for tier in self._index.serving():
            self._index.touch(tier, (stayed if tier in serving else blocks)[::-1], now)
        self._index.note_use(blocks[::-1], now)

    def _shorten(self, lease: Lease, holder: Holder, draft: PlanBuilder) -> None:
        """Moves the lease's pins to its longest part that can be read near now, within the share.
        It gets no more, even if blocks were put meanwhile."""
        sight, near = look(self._index, lease.queries, holder.domain), self._index.serving(lease.kind)
        for query, ids in zip(lease.queries, sight.ids, strict=True):
            is_there = self._index.nearest(ids.ravel(), near, error_limit=query.error_limit) >= 0
            ids[~is_there.reshape(ids.shape)] = -1
            ids[:, needed(query, lease.tokens).stop :] = -1
        before = replace(lease)
        failed = no_ids()
        while True:
            tokens = longest(lease.queries, sight.there(failed))
            blocks = sight.wanted(tokens)
            over = self._pins.over_share(blocks, self._planner.attached(blocks, near), near, holder)
            if not over.any():
                break
            failed = np.concatenate((failed, blocks[over]))
        lease.hold(self._pins.held(sight, tokens, lease.kind), tokens)
        self._pins.pin(lease, holder)
        self._pins.unpin([before], holder, draft)


def _without(blocks: Ids, others: Sequence[Ids]) -> Ids:
    """The blocks without the others, in order."""
    return blocks[~among(blocks, np.concatenate(others))] if others else blocks
