"""Puts: reserve and commit.

Each verb asks the core and starts its plan. A commit waits for the client's sums, or has them
computed. Bookkeeping is in core/requests/puts.py and core/requests/commits.py, sums and catalogues
in commit.py. If a verb is interrupted, its reservation is released. A block enters the core and the
catalogue in one step without an await.
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
from tierd.tracing import NO_SPAN, span

ANSWER_SHARE = 0.8
"""Share of a call's time for making blocks durable. So a slow disk fails blocks, not the call."""


class Puts(Sessions):
    """The verbs of puts."""

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

        durability: as in the later commit. Existing blocks get no commit, so they are made durable
        here within timeout_s. Those that cannot be are FAILED."""
        for _ in range(2):  # if a segment got no memory, retry with the segments that exist
            self._check_puts(session, groups)
            barred = self.flights.barred
            reserved = self._reserved(session, groups, kind)
            pages = {reserved.reservation: reserved.pages} if reserved.reservation else {}
            try:
                wanted = groups[0].blocks["hash"][:1].tobytes()
                async with self._given(session, reserved.plan, pages, at=reserved.rows, wanted=wanted):
                    if durability is Durability.DURABLE:
                        await self.persistence.keep_existing(reserved, groups, timeout_s=timeout_s)
                break
            except TierFailed:
                if self.flights.barred == barred:
                    raise
                reserved = reserved.without_pages()
        count_reserved(self.metrics, reserved)
        return reserved

    def _reserved(self, session: int, groups: Sequence[PutQuery], kind: Wanted) -> Reserved:
        """The core's answer; without room, once more after prefetches gave up the pages they keep."""
        reserve = partial(self.core.reserve, session, groups=groups, kind=kind)
        with span("plan"):
            reserved = reserve(now=self.clock.now())
        lacks_room = any((statuses == BlockStatus.NO_ROOM).any() for statuses in reserved.statuses)
        if not lacks_room or not self.flights.prefetches.yield_room():
            return reserved
        self.flights.start(reserved.plan)
        self.flights.start(self.core.abort(session, reservation=reserved.reservation, now=self.clock.now()))
        return reserve(now=self.clock.now())

    async def reserve_ahead(self, session: int, group: PutQuery, *, puts: int, kind: Wanted) -> ReservedAhead:
        """Private pages for up to `puts` later puts. Raises Unsupported in a replay, and as
        `reserve`."""
        if self.clock.is_replay:
            raise Unsupported('ahead: not supported with server.clock = "replay"; reserve for each put')
        self._check_puts(session, [group])
        reserved = self.core.reserve_ahead(session, group=group, puts=puts, kind=kind, now=self.clock.now())
        async with self._given(session, reserved.plan, dict(zip(reserved.reservations, reserved.extents, strict=True))):
            return reserved

    def _check_puts(self, session: int, groups: Sequence[PutQuery]) -> None:
        """The last check before the core reserves. Raises NotFound, NotPermitted, StaleHandle,
        Unavailable while draining."""
        self.process_notices(session)  # first, since it may report the session's end
        for group in groups:
            self.namespace_for(session, group.namespace)
        if self.is_draining:
            raise Unavailable("daemon: draining, no new reservations; connect to another one or try again later")

    @contextlib.asynccontextmanager
    async def _given(
        self,
        session: int,
        plan: Plan,
        pages: Mapping[int, StructArray],
        *,
        at: Ids | None = None,
        wanted: bytes = b"",
    ) -> AsyncIterator[None]:
        """Surrounds other waits of a Reserve before its handles are sent. If they fail, releases
        its pages. pages: EXTENT [n] by reservation. wanted: the first block. Raises TierFailed."""
        self.flights.start(plan, session=session, wanted=wanted)
        try:
            # All segments, since another call may have begun one a moment ago.
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
        """Publishes all of the call's blocks or none. deadline: in the loop's time. The time that a
        store may use counts from the end of the writes."""
        self.tenant_of(session)
        now = asyncio.get_running_loop().time
        committing = self.core.begin_commit(
            session, reservation=query.reservation, blocks=query.blocks, now=self.clock.now()
        )
        with span("writes") if query.written is not None else NO_SPAN:
            sums = await self._publication.written(committing, query)
        keep_s, finish = now() + ANSWER_SHARE * (deadline - now()), self._finish_commit(committing, query, sums)
        waits = sums is None or query.lease
        committed = await (self._uncut(finish, session) if waits else finish)
        if query.durability is Durability.DURABLE:
            try:
                with span("persist"):
                    await self.persistence.keep_committed(committed, committing.metas, timeout_s=keep_s - now())
            except BaseException:
                self.release(session, [committed.lease])
                raise
        self.background.wake()
        return committed

    async def _uncut(self, finish: Coroutine[Any, Any, Committed], session: int) -> Committed:
        """Finishes a commit that has to wait. Continues if its caller is cancelled, since its pages
        are busy until it ends."""
        work = asyncio.ensure_future(finish)
        self._commits.add(work)
        work.add_done_callback(self._commits.discard)
        try:
            return await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(partial(self._disown, session))
            raise

    async def commits_ended(self) -> None:
        """Waits for all commits. Pages, catalogues and session table must outlast them."""
        if self._commits:
            await asyncio.wait(self._commits)

    async def _finish_commit(
        self, committing: Committing, query: CommitQuery, sums: list[SliceTable] | None
    ) -> Committed:
        """Computes sums, publishes, and records the session's lease."""
        failpoint("cache.commit.before_hash")
        with span("commit", blocks=len(committing.metas)) as step:
            if step:
                step.set_attribute("tierd.bytes", int(committing.lengths.sum()))
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
        """Verifies existing blocks of a commit's lease, as for any hit. No lease if some are bad."""
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
        """Releases the lease of a commit whose caller has gone. Its blocks stay."""
        if not work.cancelled() and work.exception() is None and work.result().lease:
            self.release(session, [work.result().lease])
