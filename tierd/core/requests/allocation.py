"""Allocation: pages for a reservation's blocks, within the session's share and the tier's room.

puts.py decides which blocks need pages, room.py makes room. In a tier with sealed puts a block gets
two pages. Only the daemon may write the block's own page. The session writes the staging page,
which is freed when the block is published or given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import kinds, some, true_rows
from tierd.core.formats.model import BlockStatus, Reason, Wanted
from tierd.core.index.blocks import words
from tierd.core.index.segment import Key
from tierd.core.plan import Bools, Codes, Ids, Lengths
from tierd.core.plan_builder import PlanBuilder
from tierd.core.requests.leases import Holders, Reservation
from tierd.core.requests.reserved_pages import ReservedPages
from tierd.core.space.planner import Planner


class Allocation:
    """See the module."""

    def __init__(self, planner: Planner, sessions: Holders, reserved_pages: ReservedPages) -> None:
        self._planner, self._index, self._sessions, self._reserved_pages = (
            planner,
            planner.index,
            sessions,
            reserved_pages,
        )

    def give(
        self, wish: Reservation, *, statuses: Codes, counts: Sequence[int], kind: Wanted, draft: PlanBuilder
    ) -> None:
        """Gives pages to rows with NO_ROOM, in order. After the first row without one, its query
        gets no more. counts: blocks in each query."""
        serving, holder = self._index.writable(kind), self._sessions.get(wish.session)
        if not serving:
            return
        free = statuses == BlockStatus.NO_ROOM
        query = np.repeat(np.arange(len(counts)), counts)
        tiers = _striped(wish, serving)
        classes = np.zeros(len(tiers), np.int64)
        fits = free.copy()
        for tier in kinds(tiers):
            rows = true_rows((tiers == tier) & free)
            classes[rows] = self._index.tiers[tier].class_of(wish.lengths[rows])
            fits[rows] = self._sessions.room_for_bytes(
                holder, tier, self._index.tiers[tier].put_bytes(wish.lengths[rows])
            )
        rows = true_rows(free & ~_after_first(free & ~fits, query))
        for part in runs(tiers[rows], classes[rows]):
            at = rows[part]
            wish.tiers[at] = tiers[at]
            self._set_aside(wish, at, int(classes[at[0]]), draft)
        self._reserved_pages.take_back(wish, _after_first(free & (wish.pages < 0), query), Reason.ABORTED, draft)
        for tier in kinds(tiers):
            self._sessions.reserve(holder, tier, wish.pages_in(tier, true_rows(wish.pages >= 0)), step=1)

    def _set_aside(self, wish: Reservation, at: Ids, class_bytes: int, draft: PlanBuilder) -> None:
        """Pages for rows of one tier and class, as far as there is room."""
        tier = int(wish.tiers[at[0]])
        spec, key = self._index.tiers[tier].spec, Key(wish.domain, class_bytes, wish.session)
        if not spec.sealed_puts:
            key = key if spec.writer_owned else key._replace(writer=spec.own_writer)
            pages = self._reserved(tier, key, wish.lengths[at], draft)
            wish.pages[at[: len(pages)]] = pages
            return
        count = len(at)
        while count and len(at):
            given = self._set_aside_two(wish, at[:count], key, draft)
            at = at[given:]
            count = (
                count if given == count else count // 2
            )  # fewer staging pages may leave a segment free for the blocks' own pages

    def _set_aside_two(self, wish: Reservation, at: Ids, key: Key, draft: PlanBuilder) -> int:
        """Gives each row a staging page and its own, as far as there is room; returns how many.
        Staging first, so that empty segments of the session are not used for the others."""
        tier = int(wish.tiers[at[0]])
        staging = self._reserved(tier, key, wish.lengths[at], draft)
        wish.staging[at[: len(staging)]] = staging
        own = key._replace(writer=self._index.tiers[tier].spec.own_writer)
        pages = self._reserved(tier, own, wish.lengths[at[: len(staging)]], draft)
        wish.pages[at[: len(pages)]] = pages
        self._reserved_pages.unstage(wish, at[len(pages) :], Reason.ABORTED, draft)
        return len(pages)

    def _reserved(self, tier: int, key: Key, lengths: Lengths, draft: PlanBuilder) -> Ids:
        """Pages of the key for blocks of these lengths, in order, as far as there is room."""
        pages = self._planner.room.reserve(tier, key, len(lengths), draft=draft)
        self._index.tiers[tier].length[pages] = lengths[: len(pages)]
        draft.reserve(self._index.tiers[tier].extents(pages))
        return pages


def _after_first(wrong: Bools, query: Ids) -> Bools:
    """Rows that are wrong, or come after one that is in the same query."""
    if not some(wrong):
        return wrong
    count = np.cumsum(wrong)
    starts = np.searchsorted(query, query)
    return np.asarray(count - (count[starts] - wrong[starts]) > 0, bool)


def _striped(wish: Reservation, serving: Sequence[int]) -> Ids:
    """The tier for each row: by the first 8 bytes of the hash, private pages in turn."""
    if len(serving) == 1:
        return np.full(len(wish.hash), serving[0], np.int64)
    stripe = np.where(wish.hash.any(axis=1), words(wish.hash)[:, 0], wish.positions.astype(np.uint64))
    tiers: Ids = np.asarray(serving, np.int64)[(stripe % np.uint64(len(serving))).astype(np.int64)]
    return tiers
