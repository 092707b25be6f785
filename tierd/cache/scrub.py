"""Scrub: verifies every block in every tier within a period.

Passes over all tiers run in the background at a bounded rate, or at once by an operator's command.
A pass covers every page held from its beginning to its end. A bad page is a miss at once. A scrub
never evicts, pins or delays anything, and its batches are last in their queues. Under a replay
clock nothing runs by itself. A restart begins a new pass.

A page is bad if its bytes are not the block's. An unreadable page is retried at the end of the
tier's pass, then condemned too. It is not condemned if more than UNREAD_LIMIT pages are unreadable,
or the tier is out of service: then the medium is at fault. Pages are examined in examine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass

import numpy as np
import structlog

from tierd.cache.cache import Cache
from tierd.cache.examine import Examiner, Faults
from tierd.core.formats.model import Fault, StructArray, TierSpec
from tierd.core.plan import PagesHeld
from tierd.errors import Overloaded, Unavailable

log = structlog.get_logger(__name__)

BATCH_BYTES = 1 << 20
"""Read and verified at a time. A larger block goes alone."""
MARGIN = 0.8
"""Share of the period in which a pass should finish."""
LONGEST_PAUSE_S = 60.0
"""After this pause the rate is computed again: there may be more to verify."""
STOP_TIMEOUT_S = 1.0
"""Wait for a batch on a hanging disk."""
UNREAD_LIMIT = 8


class Pacer:
    """Paces bytes over time: never above the rate, no unused budget saved. Pure; times are seconds
    of any clock. longest_s: limit of a pause."""

    def __init__(self, now: float, *, debt_bytes: int = BATCH_BYTES, longest_s: float = LONGEST_PAUSE_S) -> None:
        self._credit, self._at, self._longest_s = -float(debt_bytes), now, longest_s

    def pause_s(self, rate: float, now: float) -> float:
        """How long to wait before the next batch, at most longest_s; 0: now. rate: bytes per
        second; 0: nothing to do."""
        self._credit, self._at = min(0.0, self._credit + rate * (now - self._at)), now
        if self._credit > -1:  # no byte is owed; a fraction of one gives a pause too short for any clock
            return 0.0
        return min(self._longest_s, -self._credit / rate) if rate else self._longest_s

    def pay(self, size_bytes: int) -> None:
        """Records bytes that were read."""
        self._credit -= size_bytes


@dataclass
class TierPass:
    """A pass's results in one tier so far. tier: its position. bad: condemned pages. unread:
    unreadable pages, not condemned."""

    tier: int
    pages: int = 0
    bytes: int = 0
    bad: int = 0
    unread: int = 0


class Pass:
    """One pass over some tiers, page by page in the order of ids. begun, finished (0 while it
    runs): in the loop's time."""

    def __init__(self, cache: Cache, tiers: Sequence[int]) -> None:
        self.tiers = [TierPass(tier) for tier in tiers]
        self.begun, self.finished = _now(), 0.0
        self._cache, self._core = cache, cache.core
        self._examiner = Examiner(cache.parts)

    async def steps(self) -> AsyncGenerator[int]:
        """Verifies one batch after another. Yields the bytes of each."""
        for done in self.tiers:
            async with contextlib.aclosing(self._walk(done)) as batches:
                async for size in batches:
                    done.bytes += size
                    yield size
        self.finished = _now()

    async def _walk(self, done: TierPass) -> AsyncGenerator[int]:
        after, unread = -1, list[PagesHeld]()
        while self._core.is_serving(done.tier):
            held = self._core.pages_held(done.tier, after=after, limit_bytes=BATCH_BYTES)
            if not len(held.blocks):
                await self._look_again(done, unread)
                return
            unread += self._judge(done, held, await self._examiner.examine(done.tier, held))
            done.pages += len(held.blocks)
            after = int(held.extents["page"][-1])
            yield int(held.extents["length"].sum()) + len(held.blocks) * self._spec(done).slot_overhead_bytes

    def _spec(self, done: TierPass) -> TierSpec:
        return self._cache.tiers[done.tier].spec

    def _judge(self, done: TierPass, held: PagesHeld, faults: Faults) -> list[PagesHeld]:
        """Acts on verdicts of pages still held. Returns the unreadable pages, one by one."""
        is_held = self._core.are_held(held.extents)
        for fault in (Fault.DIGEST, Fault.HEADER):
            self._condemn(done, held.extents[is_held & (faults == fault)], fault)
        good = faults == Fault.NONE
        self._core.verified(held.extents[good & held.is_sealed])
        self._count(done, "good", int(good.sum()))
        return [held.at(row) for row in np.flatnonzero(is_held & (faults == Fault.IO)).tolist()]

    async def _look_again(self, done: TierPass, unread: Sequence[PagesHeld]) -> None:
        """Reads unreadable pages again. A few are condemned; if there are many, the medium is at
        fault and they stay."""
        if len(unread) > UNREAD_LIMIT or len(unread) == done.pages or not self._core.is_writable(done.tier):
            done.unread = len(unread)
            self._count(done, "unread", len(unread))
            if unread:
                log.error("scrub: pages unreadable, none condemned", tier=self._spec(done).name, pages=len(unread))
            return
        for page in unread:
            if self._core.are_held(page.extents).all() and self._judge(
                done, page, await self._examiner.examine(done.tier, page)
            ):
                self._condemn(done, page.extents, Fault.IO)

    def _condemn(self, done: TierPass, extents: StructArray, fault: Fault) -> None:
        if not len(extents):
            return
        done.bad += len(extents)
        self._count(done, fault.name.lower(), len(extents))
        self._cache.flights.condemn(extents, fault)

    def _count(self, done: TierPass, outcome: str, pages: int) -> None:
        if pages:
            self._cache.metrics.scrub_pages.labels(tier=self._spec(done).name, outcome=outcome).inc(pages)


class Scrub:
    """One per daemon. period_s: 0 disables the background. bandwidth: limit of the background, in
    bytes per second."""

    def __init__(self, cache: Cache, *, period_s: float, bandwidth: int) -> None:
        self._cache, self._core = cache, cache.core
        self.period_s, self.bandwidth = period_s, bandwidth
        self.current: Pass | None = None
        """The pass in the background."""
        self.last: Pass | None = None
        """The last pass that covered every tier."""
        self._task: asyncio.Task[None] | None = None
        self._is_asked = self._is_ended = self._has_warned = False

    def start(self) -> None:
        """Starts the background, unless period_s is 0 or the clock is a replay clock."""
        if self.period_s and not self._cache.clock.is_replay:
            # Of no call, even if an operator's call begins it: its lines and spans have none.
            self._task = asyncio.create_task(self._run_for_ever(), context=Context())

    def set_pace(self, *, period_s: float, bandwidth: int) -> None:
        """Sets both while it runs. Another period begins a new pass; 0 ends the one under way."""
        is_new = period_s != self.period_s
        self.period_s, self.bandwidth, self._has_warned = period_s, bandwidth, False
        if is_new and self._task is not None:
            self._task.cancel()
            self._task = self.current = None
        if is_new and not self._is_ended:
            self.start()

    @property
    def _longest_s(self) -> float:
        return min(LONGEST_PAUSE_S, self.period_s * (1 - MARGIN))

    async def stop(self) -> None:
        """Ends every pass. A batch on a hanging disk is abandoned."""
        self._is_ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)

    async def ask(self, tiers: Sequence[int], *, bandwidth: int) -> AsyncGenerator[Pass]:
        """Runs a pass now. Yields it at its beginning, after each batch and at its end. Closing the
        iterator cancels it.

        bandwidth: bytes per second; 0: no limit, but it rests as long as it works. Raises
        Overloaded while another one runs, Unavailable when the daemon ends.
        """
        if self._is_asked:
            raise Overloaded("scrub: another requested pass is running; wait until it ends, or watch the counters")
        self._is_asked = True
        try:
            passed = Pass(self._cache, tiers)
            yield passed
            async with contextlib.aclosing(self._paced(passed, bandwidth)) as steps:
                async for _ in steps:
                    yield passed
                    if self._is_ended:
                        raise Unavailable("scrub: the daemon is shutting down; the results so far were sent")
            self._finish(passed)
            yield passed
        finally:
            self._is_asked = False

    async def _paced(self, passed: Pass, bandwidth: int) -> AsyncGenerator[None]:
        pacer, begun = Pacer(_now(), debt_bytes=0), _now()
        async with contextlib.aclosing(passed.steps()) as steps:
            async for size in steps:
                yield
                pacer.pay(size if bandwidth else 0)
                await asyncio.sleep(0 if bandwidth else _now() - begun)
                await _sleep_until(lambda: pacer.pause_s(bandwidth, _now()))
                begun = _now()

    async def _run_for_ever(self) -> None:
        pacer = Pacer(_now(), longest_s=self._longest_s)
        while True:
            try:
                await self._pace(pacer)
                await self._run_once(pacer)
            except Exception:  # log and retry, or rot would go unseen
                log.exception("scrub failed")
                await asyncio.sleep(self._longest_s)

    async def _run_once(self, pacer: Pacer) -> None:
        self.current = passed = Pass(self._cache, range(len(self._cache.tiers)))
        async with contextlib.aclosing(passed.steps()) as steps:
            async for size in steps:
                pacer.pay(size)
                await self._pace(pacer)
        self._finish(passed)
        if not any(tier.pages for tier in passed.tiers):
            await asyncio.sleep(self._longest_s)  # all pages are reserved, or on a failed tier

    async def _pace(self, pacer: Pacer) -> None:
        await _sleep_until(lambda: pacer.pause_s(self._rate(), _now()))

    def _rate(self) -> float:
        """The rate that the period requires for the bytes held now, within the bandwidth."""
        held = self._core.used_bytes()
        wanted = held / (self.period_s * MARGIN)
        if wanted > self.bandwidth and not self._has_warned:
            self._has_warned = True
            log.warning(
                "scrub: a pass takes longer than its period; raise scrub.bandwidth or scrub.period",
                held_bytes=held,
                pass_s=round(held / self.bandwidth),
                period_s=self.period_s,
            )
        return min(wanted, self.bandwidth)

    def _finish(self, passed: Pass) -> None:
        bad = sum(tier.bad for tier in passed.tiers)
        log.info("scrub: pass finished", pages=sum(tier.pages for tier in passed.tiers), bad=bad)
        if len(passed.tiers) == len(self._cache.tiers):
            self.last = passed
            self._cache.metrics.scrub_passes.inc()


async def _sleep_until(pause_s: Callable[[], float]) -> None:
    """Sleeps until the pause is 0. The pause is computed again each time."""
    while pause := pause_s():  # noqa: ASYNC110  # waits for time
        await asyncio.sleep(pause)


def _now() -> float:
    return asyncio.get_running_loop().time()
