"""Commits: from written pages to findable blocks.

They end what `Puts.begin_commit` began; hashing happens in between. The blocks of one commit become
findable together or not at all. Of several reservations of one name the first commit wins. Only a
commit's end frees a busy page.
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.columns import runs
from tierd.core.arrays.sets import every, firsts, kinds, some, true_rows
from tierd.core.formats.meta import picked
from tierd.core.formats.model import UNVERIFIED, BlockStatus, Reason
from tierd.core.index.blocks import names_of, words
from tierd.core.index.index import Index
from tierd.core.index.priorities import Priorities, keep_said
from tierd.core.plan import Bools, Bytes, Codes, Committed, Committing, Ids
from tierd.core.plan_builder import PlanBuilder
from tierd.core.requests.gets import Gets
from tierd.core.requests.leases import BUSY, GONE, OPEN, Commit, Holders, Reservation
from tierd.core.requests.reserved_pages import ReservedPages
from tierd.core.space.planner import Where
from tierd.errors import InvalidArgument, NotFound


class Commits:
    """See the module. dead: namespaces whose epoch has ended."""

    def __init__(
        self, index: Index, sessions: Holders, gets: Gets, reserved_pages: ReservedPages, *, dead: set[int]
    ) -> None:
        self._index, self._sessions, self._gets, self._reserved_pages, self._dead = (
            index,
            sessions,
            gets,
            reserved_pages,
            dead,
        )

    def finish(
        self, committing: Committing, *, digests: Bytes, ok: Bools, lease: bool, keep_open: bool, now: float
    ) -> Committed:
        """Publishes all blocks, or none."""
        commit = self._sessions.commits.get(committing.id)
        if commit is None:
            raise NotFound(f"commit {committing.id}: not in progress; pass the result of begin_commit")
        count = len(commit.rows)
        if digests.shape != (count, 16) or ok.shape != (count,):
            raise InvalidArgument(
                f"commit {commit.id}: digests {digests.shape}, ok {ok.shape} for {count} blocks; give one each"
            )
        del self._sessions.commits[commit.id]
        draft, held = PlanBuilder(now), commit.reservation
        where = Where(held.tiers[commit.rows], held.pages[commit.rows])
        if every(ok) and not self._is_dead(commit):
            commit.metas["digest"] = digests
            ids, statuses = self._publish(commit, where, draft=draft)
            if held.session in self._sessions.open:
                self._sessions.open[held.session].brought = ids
        else:
            ids, statuses = np.full(count, -1, np.int64), np.full(count, BlockStatus.FAILED, np.uint16)
        self._close(commit, failed=some(ids < 0), keep_open=keep_open, draft=draft)
        is_own = every(statuses == BlockStatus.READY)
        found = where if is_own else self._reserved_pages.nearest(ids, besides=kinds(where.tiers))
        number = self._lease(held, found, ids, now) if lease and count else 0
        return Committed(statuses, self._reserved_pages.extents(found), ids, commit.metas, number, draft.plan())

    def _publish(self, commit: Commit, where: Where, *, draft: PlanBuilder) -> tuple[Ids, Codes]:
        """Attaches pages to new names; returns the ids of all names, and READY or EXISTS of each. A
        commit also touches the ancestors, up to ABOVE_LIMIT, as a get of the whole chain would."""
        metas = commit.metas
        names = self._index.blocks.keyed(names_of(metas))
        known, new = self._index.blocks.find(names), names.firsts()
        if some(is_known := known >= 0):
            new &= self._reserved_pages.nearest(known).pages < 0
        rows = true_rows(new)
        if some(is_known):
            self._make_way(known[rows], where.at(rows), metas["digest"][rows], draft)
            self._reserved_pages.say(known, Priorities.of_metas(metas), draft.now)
            keep_said(self._index.blocks, known, metas, self._index.blocks.unix_s + draft.now)
        none = known[rows] if not some(is_known[rows]) else None
        added, its = picked(metas, rows), names if len(rows) == len(metas) else names.at(rows)
        known[rows] = ids = self._index.blocks.add(added, draft.now, known=none, names=its)
        self._index.link(ids, added["parent"], draft.now)
        self._index.say_before(ids, draft.now)
        if self._index.listener is not None:
            self._index.listener.stored(ids, draft.now)
        for part in runs(where.tiers[rows]):
            tier, pages = int(where.tiers[rows[part[0]]]), where.pages[rows[part]]
            if self._index.tiers[tier].spec.writer_owned and not self._index.tiers[tier].spec.sealed_puts:
                self._index.tiers[tier].flags[pages] = UNVERIFIED
            self._index.attach(tier, pages[::-1], ids[part][::-1], draft.now)
            self._index.publish(tier, pages)
        self._index.note_use(ids[::-1], draft.now)
        before = self._index.blocks.ancestors(ids)
        for tier in self._index.serving():
            self._index.touch(tier, before, draft.now)
        self._reserved_pages.count_off(commit.reservation, commit.rows[rows])
        self._reserved_pages.unstage(commit.reservation, commit.rows[rows], Reason.SEALED, draft)
        commit.reservation.state[commit.rows[rows]] = GONE
        statuses = np.full(len(new), BlockStatus.READY, np.uint16)
        if some(is_known) and len(held := firsts(known[is_known & ~new][::-1])):
            self._index.use(held, draft.now)
        if len(again := true_rows(~new)):  # names that came twice; a doomed block's may have had another id
            statuses[again] = BlockStatus.EXISTS
            known[again] = self._index.blocks.find(names.at(again))
        return known, statuses

    def _is_dead(self, commit: Commit) -> bool:
        """Whether the epoch of one of its namespaces has ended meanwhile."""
        return bool(self._dead and self._dead & set(commit.reservation.namespaces[commit.rows].tolist()))

    def _make_way(self, ids: Ids, where: Where, digests: Bytes, draft: PlanBuilder) -> None:
        """Dooms unreadable pages of those blocks (tier out of service, transfer in flight) that
        differ or are in the same tier."""
        same = (self._index.blocks.digest[ids] == words(digests)).all(axis=1)
        for tier in range(len(self._index.tiers)):
            pages = self._index.attached(tier, ids)
            pages = pages[(pages >= 0) & (~same | (where.tiers == tier))]
            if len(pages):
                self._index.doom(tier, pages, Reason.DUPLICATE, draft)

    def _close(self, commit: Commit, *, failed: bool, keep_open: bool, draft: PlanBuilder) -> None:
        """Keeps the rest of the reservation open, or frees it."""
        held = commit.reservation
        held.closing |= not keep_open
        is_over = every(held.state == GONE)
        if not is_over:
            busy = np.zeros(len(held.state), bool)
            busy[commit.rows] = held.state[commit.rows] == BUSY
            if failed and not held.closing:
                held.state[busy] = OPEN
            else:
                self._reserved_pages.take_back(held, busy, Reason.FAILED if failed else Reason.DUPLICATE, draft)
            if not keep_open:
                self._reserved_pages.take_back(held, held.state == OPEN, Reason.ABORTED, draft)
        holder = self._sessions.open.get(held.session)
        if holder is not None and (is_over or held.closing or every(held.state == GONE)):
            holder.reservations.pop(held.id, None)

    def _lease(self, held: Reservation, where: Where, ids: Ids, now: float) -> int:
        """A lease on the committed blocks, if its session lives and can hold and map them all."""
        holder = self._sessions.open.get(held.session)
        if holder is None or (where.pages < 0).any():
            return 0
        tiers = kinds(where.tiers)
        if not all(self._index.tiers[tier].spec.writer_owned for tier in tiers):
            return 0  # a block existed only on a store, which clients cannot map
        if some(self._index.nearest_error(ids) > 0):
            return 0  # an existing block is coarse; the writer may accept no error
        kind = self._index.tiers[int(where.tiers[0])].spec.kind
        return self._gets.hold(holder, kind=kind, where=where, blocks=ids)
