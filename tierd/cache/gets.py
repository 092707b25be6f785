"""Gets: lookup, acquire, prefetch, and reports of one-sided gets.

Each verb asks the core, starts its plan, waits for the transfers, and settles what can be served.
Bookkeeping is in core/requests/gets.py; mover.py and tiers handle the bytes. If a verb is
interrupted, its lease is released.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import structlog

from tierd.cache.acquire_reply import NOTHING, AcquireReply
from tierd.cache.counting import count_looked_up, count_served, count_used, served_by_tier
from tierd.cache.nearness import is_near
from tierd.cache.parts import Parts
from tierd.cache.prefetcher import Prefetcher
from tierd.cache.prefetches import Order, Started
from tierd.cache.sessions import Sessions
from tierd.cache.verification import Generations
from tierd.core.arrays.sets import kinds
from tierd.core.formats.model import Fault, TierKind, Wanted
from tierd.core.plan import (
    Acquisition,
    Allowance,
    GroupQuery,
    LookupResult,
    Plan,
    Served,
)
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.arena.holds import HoldKind
from tierd.tracing import span

log = structlog.get_logger(__name__)

LATE_S = 60.0
"""Pages that have not come after this time are taken from a lease that was given early."""


class Intent(Enum):
    """Whether the caller of a lookup will load the blocks. DEFAULT: it does not tell."""

    DEFAULT = 0
    NONE = 1
    LOAD = 2


FROM_LOOKUP, ANY_ORDER = Order("lookup"), Order()


class Gets(Sessions):
    """The verbs of gets."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._decisions = parts.decisions
        self._settling: set[asyncio.Task[None]] = set()
        self.flights.prefetches.let_go = lambda session, lease: self.release(session, [lease])
        self._prefetcher = Prefetcher(
            self.core,
            self.flights.prefetches,
            allow=self._allowed,
            carry_out=self._begin_prefetch,
            now=self.clock.now,
        )

    def lookup(self, session: int, groups: Sequence[GroupQuery], *, intent: Intent = Intent.DEFAULT) -> LookupResult:
        """How much could be served, and from which tiers. Starts a prefetch from lower tiers if the
        caller will load the blocks, or if it does not tell and `prefetch_on_lookup` is set."""
        self._check_groups(session, groups)
        found = self.core.lookup(groups, now=self.clock.now())
        count_looked_up(self.parts, groups=groups, found=found)
        self._decisions.looked_up(session, groups, found)
        will_load = intent is Intent.LOAD or (intent is Intent.DEFAULT and self.parts.limits.prefetch_on_lookup)
        if not will_load or self.clock.is_replay or not found.tokens or is_near(self.tiers, groups, found):
            return found
        return replace(found, prefetch=self.prefetch(session, groups, TierKind.HOST, FROM_LOOKUP).id)

    async def acquire(
        self,
        session: int,
        groups: Sequence[GroupQuery],
        *,
        kind: Wanted,
        timeout_s: float,
        doubted: Generations | None = None,
    ) -> AcquireReply:
        """A lease on the longest prefix servable in the wanted kind of tier within the timeout.

        doubted: set if the client verifies its copies; the generations of pages that it found bad.
        Raises Overloaded if nothing can be served and a queue is full.
        """
        self._check_groups(session, groups)
        now = asyncio.get_running_loop().time
        begun = now()
        deadline = begun + timeout_s
        got = self._ask(session, groups, partial(self.core.acquire, session, groups=groups, kind=kind), timeout_s)
        served = await self._landed(session, got, deadline, doubted=doubted)
        if served.tokens < got.tokens and now() < deadline:
            # A page or a path failed. Another tier or another path may have a good copy.
            self.health.note_ways()
            self.release(session, [got.lease])
            self.background.note(got.plan)
            again = self._ask(
                session, groups, partial(self.core.acquire_again, session, got.question), deadline - now()
            )
            served = await self._landed(session, again, deadline, doubted=doubted)
            got = replace(again, tokens=max(again.tokens, got.tokens))
        if doubted is not None:  # the client asks again what its directory lacked
            self._point_to(served)
        return self._reply(session, groups, got, served, waited_s=now() - begun)

    async def acquire_by_layer(
        self, session: int, groups: Sequence[GroupQuery], *, kind: Wanted, timeout_s: float
    ) -> AcquireReply:
        """As `acquire`, but answers before transfers have ended. `Served.pending` says which pages
        they fill."""
        self._check_groups(session, groups)
        deadline = asyncio.get_running_loop().time() + timeout_s
        ask = partial(self.core.acquire, session, groups=groups, kind=kind)
        got = self._ask(session, groups, ask, timeout_s, by_layer=True)
        served = await self._promised(session, got, timeout_s) or await self._landed(session, got, deadline)
        waited_s = asyncio.get_running_loop().time() - deadline + timeout_s
        return self._reply(session, groups, got, served, waited_s=waited_s)

    def _point_to(self, served: Served) -> None:
        """Adds served pages to the directory."""
        if len(served.blocks):
            metas = self.core.metas(served.blocks)
            metas["error"] = self.core.errors(served.extents)
            self.directories.add_soon(served.extents, metas)

    def _reply(
        self, session: int, groups: Sequence[GroupQuery], got: Acquisition, served: Served, *, waited_s: float
    ) -> AcquireReply:
        """Ends an acquisition."""
        note = partial(self._note_served, session, waited_s=waited_s)
        asyncio.get_running_loop().call_soon(note, groups, got, served)  # after the answer is sent
        hits = served_by_tier(groups, got, served)
        if not got.lease:
            return AcquireReply(0, NOTHING, hits, whole=got.whole and not got.tokens)
        if not served.tokens:
            self.release(session, [got.lease])
            return AcquireReply(0, NOTHING, hits, whole=False)
        return AcquireReply(got.lease, served, hits, got.whole and served.tokens == got.tokens)

    def _ask(
        self,
        session: int,
        groups: Sequence[GroupQuery],
        ask: Callable[..., Acquisition],
        timeout_s: float,
        *,
        by_layer: bool = False,
    ) -> Acquisition:
        """Starts an acquisition. ask: the core's verb. Raises Overloaded."""
        self._prefetcher.asked(groups)
        shut = self.flights.read_queues.shut(session, timeout_s=timeout_s)
        with span("plan") as planned:
            got = ask(now=self.clock.now(), shut=shut)
            planned.set_attribute("tierd.tokens", got.tokens)
        self.flights.start(got.plan, session=session, by_layer=by_layer)
        if not got.whole and self._may_have_room(session):
            self.release(session, [got.lease])
            got = self.core.acquire_again(session, got.question, now=self.clock.now(), shut=shut)
            self.flights.start(got.plan, session=session, by_layer=by_layer)
        if not got.lease and got.shut:
            self._note_served(session, groups, got, NOTHING)
            raise self.flights.read_queues.refusal(shut)
        self.flights.turns.want(got.plan.waits.tolist())
        return got

    async def _landed(
        self, session: int, got: Acquisition, deadline: float, *, doubted: Generations | None = None
    ) -> Served:
        """The part of a lease that can be served after its transfers, or at the deadline."""
        if not got.lease:
            return NOTHING
        try:
            failpoint("cache.acquire.before_landing")
            if len(got.plan.transfers) or len(got.plan.waits):
                with span("wait", transfers=len(got.plan.transfers), shared=len(got.plan.waits)):
                    await self.flights.landed(got.plan, timeout_s=deadline - asyncio.get_running_loop().time())
            served = await self._settle(got, doubted)
            if served.tokens:
                failpoint("cache.acquire.before_hold")
                self._hold(session, HoldKind.LEASE, {got.lease: served.extents})
        except BaseException:
            self.release(session, [got.lease])
            raise
        return served

    async def _promised(self, session: int, got: Acquisition, timeout_s: float) -> Served | None:
        """The lease before its transfers have ended. None if there are none, or no memory yet. None
        also if pages that are there are not good, or if all are to be verified at each hit."""
        if not got.lease or got.served or self._verification.is_always:
            return None
        try:
            served = self.core.settle(got.lease, now=self.clock.now(), early=True)
            assert served.pending is not None, "told of an unsettled lease"
            there = ~served.pending
            bad = await self._verification.find_bad(served.extents[there], served.blocks[there])
            if bad is None or len(bad) or there.all():
                return None
            await asyncio.wait_for(self.flights.prepared(kinds(served.extents["segment"])), timeout_s)
            failpoint("cache.acquire.before_promise")
            pages = {got.lease: served.extents}
            self._hold(session, HoldKind.LEASE, pages)
        except (TierFailed, TimeoutError):
            return None  # `_landed` serves what it can
        except BaseException:
            self.release(session, [got.lease])
            raise
        task = asyncio.create_task(self._settle_late(session, got))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return served

    async def _settle_late(self, session: int, got: Acquisition) -> None:
        """Settles a lease that its client has already. Pages that did not come are taken from it."""
        try:
            await self.flights.landed(got.plan, timeout_s=LATE_S)
            if not (await self._settle(got, None)).tokens:
                self.release(session, [got.lease])
        except Exception:
            log.exception("a lease could not be settled", lease=got.lease)
            self.release(session, [got.lease])

    async def _settle(self, got: Acquisition, doubted: Generations | None) -> Served:
        """Settles a lease and verifies pages that a client could have changed. Each round drops at
        least one bad page. Returns NOTHING if verification is impossible now."""
        first = got.served
        while True:
            served, first = first or self.core.settle(got.lease, now=self.clock.now()), None
            self.flights.start(served.plan)
            bad = await self._verification.find_bad(served.extents, served.blocks, doubted=doubted)
            if bad is None:
                return NOTHING
            if not len(bad):
                self._use(served.extents["generation"].tolist())
                return served
            self.flights.condemn(bad, Fault.READ)

    def _note_served(
        self, session: int, groups: Sequence[GroupQuery], got: Acquisition, served: Served, *, waited_s: float = 0.0
    ) -> None:
        """Counts and records a get after its answer."""
        count_served(self.parts, groups=groups, got=got, served=served)
        if served.tokens < got.tokens:
            got = replace(got, tier_tokens=served_by_tier(groups, got, served))
        self._decisions.got(session, groups, got, served, waited_s=waited_s)
        self.background.note(got.plan)

    def note_used(self, session: int, groups: Sequence[GroupQuery], *, times: int, is_lookup: bool = False) -> None:
        """Counts gets or lookups that a client made without calls
        (tierd/client/blocks/one_sided_get.py). Raises the same errors as a get or lookup."""
        self._check_groups(session, groups)
        if is_lookup:
            self.metrics.lookups.inc(times)
            self._decisions.used(session, groups, None, times=times)
            return
        found = self.core.used(session, groups=groups, kind=TierKind.HOST, now=self.clock.now())
        count_used(self.parts, found, times=times)
        self._decisions.used(session, groups, found, times=times)
        self._prefetcher.asked(groups)
        self._use(self._generations_near(groups))

    def _use(self, generations: Iterable[int]) -> None:
        self.flights.prefetches.use(generations)
        self._prefetcher.resume()

    def _generations_near(self, groups: Sequence[GroupQuery]) -> Iterator[int]:
        """Of the groups' pages in host memory."""
        for group in groups if self.flights.prefetches else ():
            for namespace in group.namespaces:
                blocks = self.core.find_blocks(namespace, group.hashes)
                for tier in self.tiers:
                    if tier.spec.kind is TierKind.HOST:
                        yield from self.core.extents(blocks[blocks >= 0], tier=tier.position)["generation"].tolist()

    def prefetch(self, session: int, groups: Sequence[GroupQuery], kind: Wanted, order: Order = ANY_ORDER) -> Started:
        """Begins to bring blocks near, as far as the share of prefetches allows; the rest follows."""
        self._check_groups(session, groups)
        return Started() if self.is_draining else self._prefetcher.begin(session, groups, kind, order)

    def cancel_prefetches(self, session: int, numbers: Sequence[int]) -> None:
        """Drops transfers of the session's prefetches that have not begun. Others end. Unknown
        numbers are ignored."""
        self.flights.turns.drop(self.flights.prefetches.cancel(session, numbers))

    def stop_session(self, session: int) -> None:
        """As Sessions.stop_session; cancels the session's prefetches."""
        super().stop_session(session)
        self.cancel_prefetches(session, self.flights.prefetches.of(session))

    def _begin_prefetch(self, plan: Plan, session: int) -> None:
        self.flights.start(plan, session=session)
        self.background.note(plan)

    def _allowed(self, session: int, kind: Wanted) -> Allowance:
        """Limits of a prefetch into a kind of tier; during the shutdown it brings nothing."""
        shut = self.flights.read_queues.shut(session, timeout_s=math.inf, is_demand=False)
        wanted = [tier for tier in self.tiers if kind in (tier.spec.kind, tier.spec)]
        most = 0 if self.is_draining else self.parts.limits.prefetch_share * sum(t.spec.capacity_bytes for t in wanted)
        return Allowance(shut, int(most) - sum(self.flights.prefetches.staged[tier.position] for tier in wanted))
