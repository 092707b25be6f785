"""Pins of leases: their pages, whether these are valid and within the session's share.

gets.py decides how much of a question is served; leases.py counts. A page has a pin for each lease
that names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.arrays.sets import every, kinds, some, true_rows
from tierd.core.formats.model import EXTENT, PageState, Reason, Wanted
from tierd.core.plan import Bools, GroupQuery, Ids, ServedGroup
from tierd.core.plan_builder import PlanBuilder, no_ids
from tierd.core.requests.groups import block_tokens
from tierd.core.requests.leases import Held, Holder, Holders, Lease
from tierd.core.requests.lookup import Sight
from tierd.core.space.planner import Planner, Where


class Pins:
    """See the module."""

    def __init__(self, planner: Planner, sessions: Holders) -> None:
        self._planner, self._index, self._sessions = planner, planner.index, sessions

    def over_share(self, blocks: Ids, near: Where, serving: list[int], holder: Holder | None) -> Bools:
        """Which blocks, in order, would exceed the holder's share of the tiers."""
        over = np.zeros(len(blocks), bool)
        if holder is None or len(blocks) == 0:
            return over
        tiers, is_near = near.tiers, near.tiers >= 0
        if not every(is_near):
            tiers = np.where(is_near, tiers, self._index.targets(blocks, serving))
        elif len(serving) == 1 and self.fits(near.pages, holder, serving[0]):
            return over
        for tier in kinds(tiers):
            rows = true_rows(tiers == tier)
            pages_of, mine = self._index.tiers[tier], holder.pinned[tier]
            cost = pages_of.class_bytes(
                near.pages[rows]
            )  # more than the block takes, if it was shortened at its commit
            if not every(is_near):
                away = true_rows(~is_near[rows])
                cost[away] = pages_of.class_of(self._index.blocks.length[blocks[rows[away]]])
            if int(cost.sum()) <= self._sessions.room_bytes(holder, tier):
                continue  # even if it pins none of them yet
            if mine:
                cost[[page in mine for page in near.pages[rows].tolist()]] = 0
            over[rows] = ~self._sessions.room_for_bytes(holder, tier, cost)
        return over

    def too_coarse(self, near: Where, limit: float) -> Bools:
        """Which near pages have a greater error than the limit, filled or being filled."""
        out = np.zeros(len(near.pages), bool)
        for tier, pages_of in enumerate(self._index.tiers):
            if pages_of.has_coarse:
                rows = true_rows(near.tiers == tier)
                out[rows] = pages_of.error[near.pages[rows]] > limit
        return out

    def fits(self, pages: Ids, holder: Holder, tier: int) -> bool:
        """Whether the holder may pin these pages even if it has pinned none of them."""
        return int(self._index.tiers[tier].class_bytes(pages).sum()) <= self._sessions.room_bytes(holder, tier)

    def held(self, sight: Sight, tokens: int, kind: Wanted) -> list[Held]:
        """The near pages needed to serve so many tokens."""
        serving, out = self._index.serving(kind), []
        for ids, (first, stop) in zip(sight.ids, sight.spans(tokens), strict=True):
            blocks = ids[:, first:stop]
            near = sight.near
            if near is None or len(sight.ids) > 1 or len(blocks) > 1 or len(near.pages) < blocks.size:
                near = self._planner.attached(blocks.ravel(), serving)
            out.append(Held(first, near.tiers.reshape(blocks.shape), near.pages.reshape(blocks.shape), blocks))
        return out

    def pin(self, lease: Lease, holder: Holder) -> None:
        """Pins the pages of a lease that begins or has moved."""
        holder.leases[lease.id] = self._sessions.leases[lease.id] = lease
        for tier in range(len(self._index.tiers)):
            pages = lease.pages_in(tier)
            if len(pages):
                self._index.pin(tier, pages)
                self._sessions.pin(holder, tier, pages)

    def unpin(self, leases: Sequence[Lease], holder: Holder, draft: PlanBuilder) -> None:
        """Unpins the leases' pages; several leases cost hardly more than one."""
        for tier in range(len(self._index.tiers)):
            parts = [lease.pages_in(tier) for lease in leases]
            pages = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else no_ids()
            if len(pages):
                self._sessions.unpin(holder, tier, pages)
                self._index.unpin(tier, pages, draft)

    def is_good(self, lease: Lease) -> bool:
        """Whether its pages can be handed out. After settle only wrong bytes make them invalid: a
        lease outlives its epoch."""
        for tier, pages_of in enumerate(self._index.tiers):
            pages = lease.pages_in(tier)
            if len(pages) == 0:
                continue
            doom = pages_of.doom[pages]
            lost = (doom == int(Reason.CORRUPTED)) if lease.settled else (doom > 0)
            if some(lost) or not every(pages_of.state[pages] >= PageState.READY):
                return False
        return True

    def readable(self, lease: Lease) -> Bools:
        """Which of its pages, one group after another, are filled: bool [n]."""
        out = [np.zeros(0, bool)]
        for held in lease.held:
            filled = np.zeros(held.pages.size, bool)
            for tier in kinds(held.tiers.ravel()):
                here, pages_of = held.tiers.ravel() == tier, self._index.tiers[tier]
                pages = held.pages.ravel()[here]
                filled[here] = (pages_of.state[pages] >= PageState.READY) & (pages_of.doom[pages] == 0)
            out.append(filled)
        return np.concatenate(out)

    def served(self, group: GroupQuery, held: Held) -> ServedGroup:
        """The blocks of a group that it holds, with their extents."""
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
