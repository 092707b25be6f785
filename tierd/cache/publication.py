"""What a commit does to bytes and catalogues: sums of what was written, entries of what is new.

Purpose: what of a commit touches tiers. Non-purpose: its order, its lease (cache.py), hashing itself (sealing.py, ahead.py, mover.py). Invariants: whatever fails,
the commit goes on to its end, so that no page stays busy; entries are made in the step in which the core publishes; what is answered before that step ends is what the
core says in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from tierd.cache.ahead import Ahead
from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.cache.sealing import Sealing
from tierd.core.meta import picked
from tierd.core.model import BlockStatus, Durability, Reason, StructArray
from tierd.core.plan import Committed, Committing, Plan
from tierd.core.sets import kinds, true_rows
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.tier import SliceTable, is_shared

log = structlog.get_logger(__name__)

Foresee = Callable[[Committed], Callable[[], None]]
"""Takes what a commit is going to answer, but for the blocks' ids, and gives what answers so."""


@dataclass(frozen=True, slots=True)
class CommitQuery:
    """What is to be committed. blocks: COMMIT_BLOCK [n], or None for all as they were named in Reserve. lease: whether to pin it. keep_open: other blocks of the reservation
    stay reserved. unwritten: not before all of it is written, as `Ahead` finds out. word: of the session's board, from 1, on which it says how far it is; 0: none."""

    reservation: int
    blocks: StructArray | None = None
    durability: Durability = Durability.MEMORY
    lease: bool = False
    keep_open: bool = False
    unwritten: bool = False
    word: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A commit whose pages are written. is_followed: they were hashed behind their writer, as far as that could be. answer: answers it, where what it comes to can be known.
    is_at_once: nothing is left of it that waits."""

    is_followed: bool
    answer: Callable[[], None] | None
    is_at_once: bool


class Publication:
    """See the module."""

    def __init__(self, parts: Parts, ahead: Ahead, flights: Flights) -> None:
        self._parts, self._ahead, self._flights = parts, ahead, flights
        self._sealing = Sealing(parts.mover, ahead)

    async def await_written(self, committing: Committing, query: CommitQuery, foresee: Foresee | None) -> Written:
        """When this returns what is committed is written: all of it was hashed behind its writer, or its session has said so. If neither comes, the commit is as if it had not begun."""
        try:
            is_followed = query.unwritten and self._ahead.follow(committing, word=query.word)
            answer = self._prepared(committing, query, foresee, is_followed=is_followed)
            if query.unwritten:
                await self._ahead.await_written(committing)
        except BaseException:
            self._ahead.give_up(committing)
            self._flights.start(self._parts.core.withdraw_commit(committing, now=self._parts.clock.now()))
            raise
        is_at_once = self._ahead.has_hashed(committing) and not query.lease
        return Written(is_followed, answer, is_at_once)

    def _prepared(
        self, committing: Committing, query: CommitQuery, foresee: Foresee | None, *, is_followed: bool
    ) -> Callable[[], None] | None:
        """What needs no sums, while the client writes: so that little is left for when all is hashed."""
        metas, registry, core = committing.metas, self._parts.registry, self._parts.core
        metas["layers"] = registry.layers_of(metas["namespace"])
        metas["epoch"] = registry.epochs_of(metas["namespace"])
        metas["time_ms"] = self._parts.clock.wall_ms()
        is_plain = query.durability is Durability.MEMORY and not query.lease
        if not core.is_new(committing) or not is_plain or foresee is None:
            return None
        return foresee(_foreseen(committing, is_followed=is_followed))

    async def hash(self, committing: Committing) -> list[SliceTable] | None:
        """Fills in what metas lack; the blocks' slice tables, or None if their bytes cannot be had."""
        metas = committing.metas
        try:
            hashed = await self._sealing.hash(committing)
        except Exception as error:  # whatever it is, the pages must not stay busy
            self._ahead.give_up(committing)
            is_news = not isinstance(error, TierFailed)  # a GPU's process has ended
            log.exception("commit failed", reservation=committing.reservation, reason=str(error), exc_info=is_news)
            return None
        metas["digest"], metas["slices"] = hashed.digests, [*map(len, hashed.slices)]
        return hashed.slices

    def publish(
        self,
        committing: Committing,
        query: CommitQuery,
        slices: Sequence[SliceTable] | None,
        written: Written,
    ) -> Committed:
        """In core and catalogue, in one step. Where the core will say READY of all, entries and answer come first: what it does takes longer than both, and nobody can look meanwhile."""
        core = self._parts.core
        core.catch_up()  # a policy that fails does so before anything is answered
        is_foreseen = slices is not None and core.is_new(committing)
        try:
            if slices is not None and is_foreseen:
                self._enter(_foreseen(committing), slices)
                if written.answer is not None:
                    written.answer()
                failpoint("cache.commit.before_books")
        finally:
            committed = core.finish_commit(
                committing,
                digests=committing.metas["digest"],
                ok=np.full(len(committing.metas), slices is not None),
                lease=query.lease,
                keep_open=query.keep_open,
                now=self._parts.clock.now(),
            )
        if slices is not None and not is_foreseen:
            self._enter(committed, slices)
        self._announce(committed)
        return replace(committed, is_followed=written.is_followed)

    def _enter(self, committed: Committed, slices: Sequence[SliceTable]) -> None:
        """Catalogue entries of what is new."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        extents, metas, tiers = committed.extents, committed.metas, committed.extents["tier"][new]
        for tier in filter(is_shared, self._parts.tiers):
            rows = new[tiers == tier.position]
            if len(rows):
                tier.publish(picked(extents, rows), picked(metas, rows), [slices[i] for i in rows.tolist()])

    def _announce(self, committed: Committed) -> None:
        """Tells watchers and metrics of what is new."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        tiers, reasons = committed.extents["tier"][new], np.full(len(new), Reason.NONE, dtype=np.uint16)
        for position in kinds(tiers):
            name = self._parts.tiers[position].spec.name
            self._parts.metrics.blocks_committed.labels(tier=name).inc(int(np.count_nonzero(tiers == position)))
        self._flights.announce(picked(committed.metas, new), tiers, reasons)


def _foreseen(committing: Committing, *, is_followed: bool = False) -> Committed:
    """What becomes of a commit all of which is new, but for its ids."""
    count = len(committing.metas)
    statuses, ids = np.full(count, BlockStatus.READY, np.uint16), np.full(count, -1, np.int64)
    return Committed(statuses, committing.extents, ids, committing.metas, 0, Plan(), is_followed)
