"""Puts: reserve and commit.

Purpose: each verb asks the core and starts its plan; a commit waits for the writer's sums, or has them made.
Non-purpose: bookkeeping (core/requests/puts.py, core/requests/commits.py), sums and catalogues (commit.py). Invariants: if a verb is
interrupted, its reservation is given back; a block enters the core and the catalogue in one step without an await.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tierd.cache.commit import CommitQuery, Publication
from tierd.cache.counting import count_reserved
from tierd.cache.parts import Parts
from tierd.cache.persistence import Persistence
from tierd.cache.sessions import Sessions
from tierd.cache.verification import without
from tierd.core.arrays.sets import kinds
from tierd.core.formats.model import BlockStatus, Durability, Fault, StructArray, Wanted
from tierd.core.plan import (
    Committed,
    Committing,
    Ids,
    Plan,
    PutQuery,
    Reserved,
    ReservedAhead,
)
from tierd.errors import (
    TierFailed,
    Unavailable,
    Unsupported,
)
from tierd.failpoint import failpoint
from tierd.tiers.arena.holds import HoldKind
from tierd.tiers.tier import SliceTable

ANSWER_SHARE = 0.8
"""Of a call's time, what may be spent before its answer: so that a slow disk costs a smaller answer, and not the call."""


class Puts(Sessions):
    """See the module."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.persistence = Persistence(parts, self.flights)
        self._publication = Publication(parts, self.flights)
        self._commits: set[asyncio.Future[Committed]] = set()

    async def reserve(
        self,
        session: int,
        groups: Sequence[PutQuery],
        *,
        kind: Wanted,
        durability: Durability = Durability.MEMORY,
        timeout_s: float = 0.0,
    ) -> Reserved:
        """Pages for the session to write. Raises Unavailable while draining, TierFailed.

        durability: what the commit will ask for. Blocks that exist have no commit to come: they are made durable here, within timeout_s; those that cannot be are FAILED."""
        for _ in range(2):  # again where there was no memory for a segment: with those that there are
            self._check_puts(session, groups)
            barred = self.flights.barred
            reserved = self.core.reserve(session, groups=groups, kind=kind, now=self.clock.now())
            pages = {reserved.reservation: reserved.pages} if reserved.reservation else {}
            try:
                async with self._given(session, reserved.plan, pages, at=reserved.rows):
                    if durability is Durability.DURABLE:
                        await self.persistence.keep_existing(reserved, groups, timeout_s=timeout_s)
                break
            except TierFailed:
                if self.flights.barred == barred:
                    raise
                reserved = reserved.without_pages()
        count_reserved(self.metrics, reserved)
        return reserved

    async def reserve_ahead(self, session: int, group: PutQuery, *, puts: int, kind: Wanted) -> ReservedAhead:
        """Private pages for so many puts that may come, or for fewer. Raises Unsupported in a replay, as `reserve`
        else."""
        if self.clock.is_replay:
            raise Unsupported("ahead: a replay clock knows no meanwhile; reserve for a put")
        self._check_puts(session, [group])
        reserved = self.core.reserve_ahead(session, group=group, puts=puts, kind=kind, now=self.clock.now())
        async with self._given(session, reserved.plan, dict(zip(reserved.reservations, reserved.extents, strict=True))):
            return reserved

    def _check_puts(self, session: int, groups: Sequence[PutQuery]) -> None:
        """The last look before the core reserves. Raises NotFound, NotPermitted, StaleHandle, Unavailable while draining."""
        self.hear(session)  # first: what is heard there may be the session's end
        for group in groups:
            self.namespace_for(session, group.namespace)
        if self.is_draining:
            raise Unavailable("daemon: draining, no new reservations; connect to another one or try again later")

    @contextlib.asynccontextmanager
    async def _given(
        self, session: int, plan: Plan, pages: Mapping[int, StructArray], *, at: Ids | None = None
    ) -> AsyncIterator[None]:
        """Around what else a Reserve waits for before its handles leave; given back if that fails. pages: EXTENT [n] by reservation. Raises TierFailed."""
        self.flights.start(plan)
        try:
            # Every segment, not only those that begin here: another call may have begun one a moment ago.
            await self.flights.prepared(kinds(plan.reserved["segment"]))
            yield
            if pages:
                failpoint("cache.reserve.before_hold")
                self._hold(session, HoldKind.RESERVATION, pages, at=at)
        except BaseException:
            for reservation in pages:
                self.abort(session, reservation)
            raise
        self.background.wake()

    async def commit(self, session: int, query: CommitQuery, *, deadline: float) -> Committed:
        """Publishes what was written, all of the call's blocks or none. deadline: of the loop's time; what a store
        may take of it counts from when all is written."""
        self.tenant_of(session)
        now = asyncio.get_running_loop().time
        committing = self.core.begin_commit(
            session, reservation=query.reservation, blocks=query.blocks, now=self.clock.now()
        )
        sums = await self._publication.written(committing, query)
        keep_s, finish = now() + ANSWER_SHARE * (deadline - now()), self._finish_commit(committing, query, sums)
        waits = sums is None or query.lease
        committed = await (self._uncut(finish, session) if waits else finish)
        if query.durability is Durability.DURABLE:
            try:
                await self.persistence.keep_committed(committed, committing.metas, timeout_s=keep_s - now())
            except BaseException:
                self.release(session, [committed.lease])
                raise
        self.background.wake()
        return committed

    async def _uncut(self, finish: Coroutine[Any, Any, Committed], session: int) -> Committed:
        """The end of a commit that waits for something: it goes on when its caller has gone, since its pages are
        marked busy until it has ended."""
        work = asyncio.ensure_future(finish)
        self._commits.add(work)
        work.add_done_callback(self._commits.discard)
        try:
            return await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(partial(self._disown, session))
            raise

    async def commits_ended(self) -> None:
        """Waits until nothing is hashed any more: pages, catalogues and session table must outlast every commit."""
        if self._commits:
            await asyncio.wait(self._commits)

    async def _finish_commit(
        self, committing: Committing, query: CommitQuery, sums: list[SliceTable] | None
    ) -> Committed:
        """From sums to publication, and to what the session holds of it."""
        failpoint("cache.commit.before_hash")
        slices = await self._publication.sum(committing, sums)
        failpoint("cache.commit.before_publish")
        committed = self._publication.publish(committing, query, slices)
        self.flights.start(committed.plan)
        held, session = committed.statuses != BlockStatus.FAILED, committing.session
        try:
            if slices is not None:
                self._publication.enter(committed, slices)
            failpoint("cache.commit.before_hold")
            if committed.lease:
                committed = await self._without_bad(committed, session)
            if committed.lease:
                self._hold(session, HoldKind.LEASE, {committed.lease: committed.extents[held]})
        except BaseException:
            self.release(session, [committed.lease])
            raise
        finally:
            rest = committing.indices[held].astype(np.int64) if query.keep_open else None
            self._holdings.drop((session, HoldKind.RESERVATION, committing.reservation), only=rest)
        return committed

    async def _without_bad(self, committed: Committed, session: int) -> Committed:
        """A commit's lease is a hit where a block existed: pages of other writers are verified like those of any
        other. With bad ones there is no lease."""
        exist = np.flatnonzero(committed.statuses == BlockStatus.EXISTS)
        found = await self._verification.find_bad(committed.extents[exist], committed.blocks[exist])
        bad = committed.extents[exist] if found is None else found
        if not len(bad):
            return committed
        if found is not None:
            self.flights.condemn(bad, Fault.READ)
        self.release(session, [committed.lease])
        return without(committed, bad)

    def _disown(self, session: int, work: asyncio.Future[Committed]) -> None:
        """A commit whose caller has gone: its blocks stay, its lease does not."""
        if not work.cancelled() and work.exception() is None and work.result().lease:
            self.release(session, [work.result().lease])
