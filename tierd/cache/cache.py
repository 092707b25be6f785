"""Cache, the conductor: each verb asks the core, carries its plan out, and answers when the bytes are where they should be.

Purpose: the engines' verbs over core, flights and tiers. Non-purpose: messages (server), bookkeeping (core), bytes (mover, tiers).
Invariants: nothing is handed to a client before the holds file says who has it; whatever interrupts a verb, its lease or
reservation is given back; a block is published in the core and in the catalogue in one step without an await.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from tierd.cache.background import Background
from tierd.cache.counting import count_reserved, count_served, count_used
from tierd.cache.directories import Directories
from tierd.cache.events import Event
from tierd.cache.flights import Flights
from tierd.cache.holdings import STEP_PAGES, Holdings
from tierd.cache.lease import NOTHING, Lease
from tierd.cache.nearness import is_near
from tierd.cache.parts import Parts
from tierd.cache.persistence import Persistence
from tierd.cache.publication import CommitQuery, Publication
from tierd.cache.verification import Generations, Verification, without
from tierd.cache.watch import Watch
from tierd.core.block import Namespace, NamespaceSpec
from tierd.core.model import BlockStatus, Durability, Fault, StructArray, TierKind, Wanted
from tierd.core.plan import (
    Acquisition,
    Committed,
    Committing,
    Found,
    GroupQuery,
    Ids,
    Plan,
    PutQuery,
    Reserved,
    ReservedAhead,
    Served,
)
from tierd.core.sets import kinds
from tierd.errors import (
    InvalidArgument,
    NotFound,
    NotPermitted,
    SessionLost,
    StaleHandle,
    TierFailed,
    Unavailable,
    Unsupported,
)
from tierd.failpoint import failpoint
from tierd.tiers.holds import FormerHolder, Holder, HoldKind
from tierd.tiers.tier import SliceTable, is_mapped

log = structlog.get_logger(__name__)

ANSWER_SHARE = 0.8
"""Of a call's time, what may be spent before its answer: so that a slow disk costs a smaller answer, and not the call."""


class Cache:
    """One per daemon; every method runs on its event loop. Sessions are ids; the server knows who is behind them."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.core, self.tiers, self.registry = parts.core, parts.tiers, parts.registry
        self.events, self.metrics, self.clock = parts.events, parts.metrics, parts.clock
        self._holdings = Holdings(parts.holds)
        self.directories = Directories(parts.tiers, domains_of=parts.registry.domains_of)
        for tier in filter(is_mapped, parts.tiers):
            tier.on_published = self.directories.add
        self.flights = Flights(parts, self.directories)
        self.background = Background(parts, self.flights)
        self.persistence = Persistence(parts, self.flights)
        self.health = Watch(parts, self.flights)
        self._tenants: dict[int, str] = {}
        self._commits: set[asyncio.Future[Committed]] = set()
        self._verification = Verification(parts)
        self._publication = Publication(parts, self.flights)
        self._given_back = 0
        self.hear: Callable[[int | None], None] = lambda _session: None
        """Reads what clients have given back already, and what else one of them has said: releases come other ways
        than the calls that count on them."""
        self.is_draining = False

    # -- sessions

    def open_session(
        self, session: int, *, tenant: str, holder: Holder | None = None, is_operator: bool = False
    ) -> None:
        """A client has come in; holder: its process, None for a session of the daemon's own.

        Raises Unavailable while draining, but for operators, who want to see how it goes.
        """
        if self.is_draining and not is_operator:
            raise Unavailable("daemon: draining, no new sessions; connect to another one or try again later")
        if holder is not None:
            self._holdings.begin(holder)
        self._tenants[session] = tenant
        self.core.open_session(session, domain=self.registry.domain_of(tenant))

    def restore_session(self, former: FormerHolder) -> None:
        """A session of a former daemon whose process still lives: its pages stay its own until the process is gone."""
        session, now = former.holder.session, self.clock.now()
        taken = self.core.restore(session, pinned=former.leased, reserved=former.reserved, now=now)
        self._holdings.keep(former, leased=taken.pinned, reserved=taken.reserved)

    def stop_session(self, session: int) -> None:
        """Its socket is closed: nothing more is served to it. What it holds stays until its process is gone."""
        self._tenants.pop(session, None)
        self.events.ring()  # its watchers hear that it has ended

    def leave_session(self, session: int) -> None:
        """Its process lives and uses nothing of it any more: what it held comes back. What it has mapped stays noted until `end_session`."""
        self.stop_session(session)
        if self._holdings.return_some(session, self.release, self.abort):
            asyncio.get_running_loop().call_soon(self.leave_session, session)
        else:
            self._holdings.end(session)

    def end_session(self, session: int, *, into: int = 0) -> None:
        """Its process is gone: everything that it held comes back, in steps if that is much. Safe to call twice.

        into: the process lives and has left both; this other session of it stands for what the two have mapped.
        """
        self.stop_session(session)
        if self._holdings.return_some(session, self.release, self.abort, beyond=STEP_PAGES):
            asyncio.get_running_loop().call_soon(partial(self.end_session, session, into=into))
            return
        failpoint("cache.end.before_return")
        self.flights.start(self.core.end_session(session, now=self.clock.now(), into=into))
        self._holdings.end(session)
        self.background.wake()

    def tenant_of(self, session: int) -> str:
        """Raises SessionLost."""
        tenant = self._tenants.get(session)
        if tenant is None:
            raise SessionLost(f"session {session}: it has ended; open a session again")
        return tenant

    # -- namespaces

    def open_namespace(self, session: int, spec: NamespaceSpec) -> Namespace:
        """The current namespace of the session's tenant for this spec."""
        largest = min((t.spec.segment_bytes - t.spec.slot_overhead_bytes for t in self.tiers), default=0)
        if spec.block_bytes > largest:
            raise InvalidArgument(
                f"namespace.block_bytes: {spec.block_bytes} is above the {largest} that a segment of every tier holds; "
                "use fewer tokens per block, or raise the tiers' segment"
            )
        return self.registry.open(spec, tenant=self.tenant_of(session))[0]

    def namespace_for(self, session: int, namespace_id: int, digest: bytes = b"") -> Namespace:
        """The namespace, if the session may use it now. Raises NotPermitted, StaleHandle, and as the registry."""
        namespace = self.registry.named(namespace_id, digest) if digest else self.registry.get(namespace_id)
        if namespace.tenant != self.tenant_of(session):
            raise NotPermitted(f"namespace {namespace_id}: belongs to another tenant; open your own with OpenNamespace")
        if not self.registry.is_current(namespace):
            raise StaleHandle(f"namespace {namespace_id}: epoch {namespace.epoch} has ended; open the namespace again")
        return namespace

    # -- get

    def lookup(self, session: int, groups: Sequence[GroupQuery]) -> Found:
        """How much could be served, and from where; what lies far begins to come near."""
        self._check_groups(session, groups)
        found = self.core.lookup(groups, now=self.clock.now())
        self.metrics.lookups.inc()
        is_wanted = self.parts.prefetch_on_lookup and not self.clock.is_replay and found.tokens
        if is_wanted and not is_near(self.tiers, groups, found):
            self.prefetch(session, groups, TierKind.HOST)
        return found

    async def acquire(
        self,
        session: int,
        groups: Sequence[GroupQuery],
        *,
        kind: Wanted,
        timeout_s: float,
        doubted: Generations | None = None,
    ) -> Lease:
        """A lease on the longest prefix that can be served in the wanted kind of tier within the time. Raises
        Overloaded for none, and a full queue.

        doubted: the client sums what it copies; generations of pages that it has found bad.
        """
        self._check_groups(session, groups)
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        ask = partial(self.core.acquire, session, groups=groups, kind=kind)
        got, served = await self._bring(session, groups, ask, timeout_s=timeout_s, doubted=doubted)
        if served.tokens < got.tokens and now() < deadline:
            # A page went bad on the way, or the way itself did: there may be a good one farther off, or another way.
            self.health.note_ways()
            self.release(session, [got.lease])
            self.background.note(got.plan)
            second = partial(self.core.acquire_again, session, got.question)
            again, served = await self._bring(session, groups, second, timeout_s=deadline - now(), doubted=doubted)
            got = replace(again, tokens=max(again.tokens, got.tokens))
        asyncio.get_running_loop().call_soon(self._note_served, groups, got, served)  # when the answer is on its way
        if doubted is not None and len(served.blocks):  # so the directory lacked something of it
            self.directories.add_soon(served.extents, self.core.metas(served.blocks))
        if not got.lease:
            return Lease(0, NOTHING, got.tier_tokens, whole=got.whole and not got.tokens)
        if not served.tokens:
            self.release(session, [got.lease])
            return Lease(0, NOTHING, got.tier_tokens, whole=False)
        return Lease(got.lease, served, got.tier_tokens, got.whole and served.tokens == got.tokens)

    async def _bring(
        self,
        session: int,
        groups: Sequence[GroupQuery],
        ask: Callable[..., Acquisition],
        *,
        timeout_s: float,
        doubted: Generations | None = None,
    ) -> tuple[Acquisition, Served]:
        """A lease, and what of it can be served once its transfers have landed or the time is over. Raises Overloaded. ask: the core's verb."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        shut = self.flights.admission.shut(session, timeout_s=timeout_s)
        got = ask(now=self.clock.now(), shut=shut)
        self.flights.start(got.plan, session=session)
        if not got.whole and self._hears_of_room(session):
            self.release(session, [got.lease])
            got = self.core.acquire_again(session, got.question, now=self.clock.now(), shut=shut)
            self.flights.start(got.plan, session=session)
        if not got.lease:
            if got.shut:
                self._note_served(groups, got, NOTHING)
                raise self.flights.admission.refusal(shut)
            return got, NOTHING
        try:
            failpoint("cache.acquire.before_landing")
            await self.flights.landed(got.plan, timeout_s=deadline - asyncio.get_running_loop().time())
            served = await self._settle(got, doubted)
            if served.tokens:
                failpoint("cache.acquire.before_hold")
                self._hold(session, HoldKind.LEASE, {got.lease: served.extents})
        except BaseException:
            self.release(session, [got.lease])
            raise
        return got, served

    def note_used(self, session: int, groups: Sequence[GroupQuery], *, times: int, is_lookup: bool = False) -> None:
        """A session has made a get or a lookup by itself, so often a moment ago (tierd/client/onesided.py). Raises
        what they raise."""
        self._check_groups(session, groups)
        if is_lookup:
            self.metrics.lookups.inc(times)
            return
        found = self.core.used(session, groups=groups, kind=TierKind.HOST, now=self.clock.now())
        count_used(self.metrics, self.tiers, found, times=times)

    def release(self, session: int, leases: Sequence[int]) -> None:
        """Unpins; unknown leases are ignored, so that a release can be repeated, and may come from a session that has
        ended."""
        failpoint("cache.release.before_unpin")
        self._given_back += len(leases)
        with contextlib.suppress(NotFound):
            self.flights.start(self.core.release(session, leases=leases, now=self.clock.now()))
        self._holdings.drop_leases(session, leases)
        self.background.note_release()

    def _hears_of_room(self, session: int) -> bool:
        """Whether clients had given leases back that nobody had read of."""
        before = self._given_back
        self.hear(session)
        return self._given_back > before

    def prefetch(self, session: int, groups: Sequence[GroupQuery], kind: Wanted) -> int:
        """Begins to bring blocks near; gives how many are on their way because of this."""
        self._check_groups(session, groups)
        if self.is_draining:
            return 0
        shut = self.flights.admission.shut(session, timeout_s=math.inf, is_demand=False)
        plan = self.core.prefetch(session, groups=groups, kind=kind, now=self.clock.now(), shut=shut)
        self.flights.start(plan, session=session)
        self.background.note(plan)
        return len(plan.transfers)

    # -- put

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

    def abort(self, session: int, reservation: int) -> None:
        """Frees a reservation's pages as if nothing had been; an unknown one is ignored."""
        with contextlib.suppress(NotFound):  # the session has ended, and everything of it
            self.flights.start(self.core.abort(session, reservation=reservation, now=self.clock.now()))
        self._holdings.drop((session, HoldKind.RESERVATION, reservation))
        self.background.wake()

    # -- what workers tell

    def report_attention(self, session: int, lease: int, group: int, mass: StructArray) -> None:
        """Attention mass per rank and block of a lease's group, added to what the blocks have. Raises NotFound, InvalidArgument."""
        self.tenant_of(session)
        self.core.report_attention(session, lease=lease, group=group, mass=mass, now=self.clock.now())

    def page(self, session: int, kind: HoldKind, number: int, extent: np.void) -> memoryview:
        """The bytes of a page of a lease or a reservation, writable. Good until the next await. Raises StaleHandle.

        For streams, which outlast what they were given: an abort, or the end of the session's process, frees pages under them.
        """
        if (session, kind, number) not in self._holdings:
            raise StaleHandle(f"{kind.name.lower()} {number}: it has ended during the call; begin again")
        tier = self.tiers[int(extent["tier"])]
        assert is_mapped(tier), "streams ask for host pages"
        return tier.view(extent)

    async def watch(self, session: int, *, after: int, sees_all: bool) -> AsyncIterator[list[Event]]:
        """Batches of events until the session stops; of its tenant only, unless it sees all. Raises SessionLost."""
        tenant = self.tenant_of(session)
        sees = None if sees_all else lambda n: self.registry.get(n).tenant == tenant
        async for batch in self.events.follow(after, sees=sees, check=lambda: self.tenant_of(session)):
            yield batch

    # -- inner steps

    def _note_served(self, groups: Sequence[GroupQuery], got: Acquisition, served: Served) -> None:
        """What nobody waits for after a get."""
        count_served(self.metrics, self.tiers, groups=groups, got=got, served=served)
        self.core.catch_up()
        self.background.note(got.plan)

    async def _settle(self, got: Acquisition, doubted: Generations | None) -> Served:
        """Settles a lease, verifying pages that a client could have changed; each round drops at least one bad page. Nothing, if that cannot be done now."""
        first = got.served
        while True:
            served, first = first or self.core.settle(got.lease, now=self.clock.now()), None
            self.flights.start(served.plan)
            bad = await self._verification.find_bad(served.extents, served.blocks, doubted=doubted)
            if bad is None:
                return NOTHING
            if not len(bad):
                return served
            self.flights.condemn(bad, Fault.READ)

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

    def _hold(self, who: int, kind: HoldKind, pages: Mapping[int, StructArray], *, at: Ids | None = None) -> None:
        """Writes into the holds file which session has these pages, before the client learns of them. Raises SessionLost, TierFailed."""
        if self._holdings.is_full(who, more=len(pages), pages=sum(map(len, pages.values()))):
            self.hear(who)  # of what it has given back already; its end may be heard there
        if who not in self._tenants:
            raise SessionLost(f"session {who}: it ended during the call; open a session again")
        self._holdings.add(who, kind, pages, at=at)

    def _check_groups(self, session: int, groups: Sequence[GroupQuery]) -> None:
        """The last look before the core, which knows no tenants. Raises NotFound, NotPermitted, StaleHandle."""
        for namespace in {n for group in groups for n in group.namespaces}:
            self.namespace_for(session, namespace)
