"""Work that no call waits for: demotion between watermarks, and the periodic sync of what was demoted.

Purpose: keep room free ahead of need, and free what ended epochs have left. Invariants: one demotion step at a time, so its queue is bounded by one plan; under a replay clock
nothing happens but in `quiesce` and while an operator's call waits, so that a trace gives the same result every time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.core.plan import Plan
from tierd.errors import DeadlineExceeded, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.tier import is_stored

log = structlog.get_logger(__name__)

STEP_TIMEOUT_S = 600.0
"""After which a demotion step is no longer waited for; its transfers stay under way."""
GATHER_S = 0.002
"""Between the first word of pages that were taken and a look at the watermarks: one look serves all calls of that time, and none waits for it. A put that
finds no room before drops what is clean, as ever."""
LET_GO_S = 0.05
"""As long after pages were let go of: nothing is taken by that, and little is ever due because of it, while every get ends so."""
PAUSE_S = 1.0
"""After a fault that nobody foresaw."""


class Background:
    """Runs while the daemon serves; `wake` tells it that pages were taken."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._core, self._tiers, self._clock = parts.core, parts.tiers, parts.clock
        self._flights, self._sync_interval_s = flights, parts.sync_interval_s
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        flights.wake = self.wake
        self._ends: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins demotion (not under a replay clock) and the periodic sync."""
        self._tasks.append(asyncio.create_task(self._sync_for_ever()))
        if not self._clock.is_replay:
            self._tasks.append(asyncio.create_task(self._demote_for_ever()))
            self._wake.set()  # what was found again may be above a watermark already

    def wake(self) -> None:
        """Pages were taken: perhaps a watermark was crossed."""
        self._wake.set()

    def note_release(self) -> None:
        """Pages were let go of: what waited for that may go on, in a while."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(LET_GO_S, self.wake)

    def note(self, plan: Plan) -> None:
        """What was decided for somebody; pages may have been taken."""
        if not plan.is_empty:
            self.wake()

    async def quiesce(self, *, timeout_s: float) -> int:
        """Demotes until nothing wants to move and nothing flies; gives the transfers made. Raises DeadlineExceeded."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        made, goes_on = self._flights.made, True
        while goes_on:
            if not await self._flights.idle(timeout_s=deadline - asyncio.get_running_loop().time()):
                raise DeadlineExceeded(
                    f"quiesce: {self._flights.count} transfers still under way after {timeout_s:g} s"
                )
            goes_on = await self._step(timeout_s=deadline - asyncio.get_running_loop().time())
        return self._flights.made - made

    async def end_epochs(self, namespaces: Sequence[int], keep: Callable[[], Awaitable[None]]) -> None:
        """Frees what the core has forgotten of these namespaces, once `keep` has told the next life that they ended: one that began before would find some of it. Raises what that
        raises. It goes on when the caller has gone."""
        end = asyncio.create_task(self._end_epochs(namespaces, keep))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        await asyncio.shield(end)

    async def stop(self) -> None:
        """Ends both loops, and what else goes on; transfers under way are the flights' to wait for. What ended epochs have left the next life does not take up."""
        if self._later is not None:
            self._later.cancel()
        tasks = [*self._tasks, *self._ends]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    async def sync(self) -> None:
        """Makes what was written to every stored tier durable; one that is out of service is passed over."""
        for tier in self._tiers:
            if is_stored(tier) and not self._core.is_writable(tier.position):
                continue  # said when it failed
            try:
                await tier.sync()
            except TierFailed as error:
                log.warning("sync failed", tier=tier.spec.name, error=str(error))

    async def _end_epochs(self, namespaces: Sequence[int], keep: Callable[[], Awaitable[None]]) -> None:
        try:
            await keep()
        except Exception:  # in this life they have ended all the same
            log.exception("an ended epoch cannot be told to the next life", namespaces=list(namespaces)[:8])
            await self._free_forgotten(namespaces)
            raise
        await self._free_forgotten(namespaces)

    async def _free_forgotten(self, namespaces: Sequence[int]) -> None:
        for blocks in self._core.pieces():
            failpoint("background.before_freeing")
            self._flights.start(self._core.free_forgotten(blocks, namespaces=namespaces, now=self._clock.now()))
            await asyncio.sleep(0)

    async def _step(self, *, timeout_s: float) -> bool:
        """One demotion plan to its end; False if there was nothing to do, or nothing of it succeeded (a tier that fails)."""
        plan = self._core.demote(self._clock.now())
        if plan.is_empty:
            return False
        failpoint("background.before_demotion")
        failed = self._flights.failed
        self._flights.start(plan)
        await self._flights.landed(plan, timeout_s=timeout_s)
        await asyncio.sleep(0)  # a plan that only frees has nothing to wait for; calls must get their turn
        return len(plan.freed) > 0 or self._flights.failed - failed < len(plan.transfers) + len(plan.waits)

    async def _demote_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            if self._later is not None:
                self._later.cancel()  # this look is for those too
                self._later = None
            try:
                while await self._step(timeout_s=STEP_TIMEOUT_S):
                    pass
            except Exception:  # told, and tried again: else a tier would silently stay full
                log.exception("demotion failed")
                await asyncio.sleep(PAUSE_S)
                self._wake.set()

    async def _sync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._sync_interval_s)
            try:
                await self.sync()
            except Exception:
                log.exception("sync failed")
