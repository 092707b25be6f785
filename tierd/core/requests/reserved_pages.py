"""Pages reserved for a session: where they are, and how they are freed.

Puts and commits share these functions. Pages are subtracted from their session's share before they
are freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import kinds, true_rows
from tierd.core.formats.model import EXTENT, NO_PAGE, Reason, StructArray
from tierd.core.index.index import Index
from tierd.core.index.priorities import Priorities
from tierd.core.plan import Bools, Ids
from tierd.core.plan_builder import PlanBuilder
from tierd.core.requests.leases import GONE, Holders, Reservation
from tierd.core.space.planner import Where


class ReservedPages:
    """See the module."""

    def __init__(self, index: Index, sessions: Holders) -> None:
        self._index, self._sessions = index, sessions

    def say(self, ids: Ids, said: Priorities, now: float) -> None:
        """Gives held blocks (-1: not held) the priorities of a put, its first block first."""
        rows = true_rows((said.codes > 0) & (ids >= 0))[::-1]
        if len(rows):
            self._index.say(ids[rows], said.at(rows), now)

    def take_back(self, held: Reservation, rows: Bools, reason: Reason, draft: PlanBuilder) -> None:
        """reserved -> free for rows that have a page."""
        at = true_rows(rows & (held.pages >= 0))
        if len(at) == 0:
            return
        self.count_off(held, at)
        self.unstage(held, at, reason, draft)
        for part in runs(held.tiers[at]):
            self._index.discard(int(held.tiers[at[part[0]]]), held.pages[at[part]], reason, draft)
        held.state[at] = GONE
        held.pages[at] = NO_PAGE

    def unstage(self, held: Reservation, rows: Ids, reason: Reason, draft: PlanBuilder) -> None:
        """reserved -> free for the staging pages of rows. SEALED: their contents are published, so
        their memory exists and stays the writer's."""
        at = rows[held.staging[rows] >= 0]
        if not len(at):
            return
        for part in runs(held.tiers[at]):
            tier, pages = int(held.tiers[at[part[0]]]), held.staging[at[part]]
            if reason is Reason.SEALED:
                self._index.tiers[tier].prove(pages)
            self._index.discard(tier, pages, reason, draft)
        held.staging[at] = NO_PAGE

    def count_off(self, held: Reservation, rows: Ids) -> None:
        """The rows' pages no longer count against their session's share."""
        holder = self._sessions.open.get(held.session)
        if holder is None or held.id == 0:
            return
        for tier in kinds(held.tiers[rows]):
            self._sessions.reserve(holder, tier, held.pages_in(tier, rows), step=-1)

    def nearest(self, ids: Ids, *, besides: Sequence[int] = ()) -> Where:
        """Each block's nearest readable page in service, else its page in the tiers besides. Pages
        too coarse for their namespace do not count."""
        serving = self._index.serving()
        limits = self._index.error_limits(ids)
        every_tier = [*serving, *(t for t in besides if t not in serving)]
        tiers = self._index.nearest(ids, every_tier, error_limit=limits).astype(np.int64)
        pages = np.full(len(ids), NO_PAGE, np.int64)
        for tier in kinds(tiers[tiers >= 0]):
            pages[tiers == tier] = self._index.attached(tier, ids[tiers == tier])
        return Where(tiers, pages)

    def extents(self, where: Where) -> StructArray:
        """EXTENT of each; page -1 for none."""
        tiers = kinds(where.tiers[where.pages >= 0])
        if len(tiers) == 1:
            return self._index.tiers[tiers[0]].extents(where.pages)
        out = np.zeros(len(where.pages), EXTENT)
        out["page"] = NO_PAGE
        for tier in tiers:
            here = (where.tiers == tier) & (where.pages >= 0)
            out[here] = self._index.tiers[tier].extents(where.pages[here])
        return out
