"""Work that no call waits for: demotion between watermarks, and the periodic sync.

It frees room before it is needed, and frees the pages of ended epochs. Only one demotion step runs
at a time, so one plan bounds its queue. Under a replay clock nothing runs except in `quiesce` and
while an operator's call waits. So a trace gives the same result every time.
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
"""Wait for a demotion step at most. Its transfers then stay under way."""
GATHER_S = 0.002
"""Delay from the first allocation to the check of the watermarks. One check serves all calls of
that time, and no call waits for it. A put that finds no room earlier evicts clean blocks."""
LET_GO_S = 0.05
"""Delay of the check after a release. Every get ends with one, which rarely requires demotion."""
PAUSE_S = 1.0
"""Pause after an unexpected error."""


class Background:
    """Runs while the daemon serves. `wake` reports that pages were allocated."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._core, self._tiers, self._clock = parts.core, parts.tiers, parts.clock
        self._flights, self._sync_interval_s = flights, parts.sync_interval_s
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        flights.wake = self.wake
        self._ends: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts demotion (not under a replay clock) and the periodic sync."""
        self._tasks.append(asyncio.create_task(self._sync_for_ever()))
        if not self._clock.is_replay:
            self._tasks.append(asyncio.create_task(self._demote_for_ever()))
            self._wake.set()  # recovered blocks may exceed a watermark already

    def wake(self) -> None:
        """Reports that pages were allocated: a watermark may have been crossed."""
        self._wake.set()

    def note_release(self) -> None:
        """Reports a release. Demotion is checked after `LET_GO_S`."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(LET_GO_S, self.wake)

    def note(self, plan: Plan) -> None:
        """Reports a call's plan, which may have allocated pages."""
        if not plan.is_empty:
            self.wake()

    async def quiesce(self, *, timeout_s: float) -> int:
        """Demotes until no block has to move and no transfer is under way. Returns the number of
        transfers. Raises DeadlineExceeded."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        made, goes_on = self._flights.made, True
        while goes_on:
            if not await self._flights.idle(timeout_s=deadline - asyncio.get_running_loop().time()):
                raise DeadlineExceeded(
                    f"quiesce: {self._flights.count} transfers are in flight after {timeout_s:g} s; allow more time"
                )
            goes_on = await self._step(timeout_s=deadline - asyncio.get_running_loop().time())
        return self._flights.made - made

    async def end_epochs(self, namespaces: Sequence[int], keep: Callable[[], Awaitable[None]]) -> None:
        """Frees these namespaces' forgotten pages, once `keep` has recorded their epochs' end.

        If pages were freed earlier, the next daemon could serve some of the old blocks. Continues
        if the caller is cancelled. Raises what `keep` raises."""
        end = asyncio.create_task(self._end_epochs(namespaces, keep))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        await asyncio.shield(end)

    async def stop(self) -> None:
        """Stops both loops and the work of `end_epochs`. `Flights` waits for transfers under way.
        The next daemon does not load blocks of ended epochs."""
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
        """Syncs every stored tier, except tiers that are out of service."""
        for tier in self._tiers:
            if is_stored(tier) and not self._core.is_writable(tier.position):
                continue  # logged when it failed
            try:
                await tier.sync()
            except TierFailed as error:
                log.warning("sync failed", tier=tier.spec.name, error=str(error))

    async def _end_epochs(self, namespaces: Sequence[int], keep: Callable[[], Awaitable[None]]) -> None:
        try:
            await keep()
        except Exception:  # in this daemon the epochs have ended all the same
            log.exception("epoch bump not recorded for the next start", namespaces=list(namespaces)[:8])
            await self._free_forgotten(namespaces)
            raise
        await self._free_forgotten(namespaces)

    async def _free_forgotten(self, namespaces: Sequence[int]) -> None:
        for blocks in self._core.pieces():
            failpoint("background.before_freeing")
            self._flights.start(self._core.free_forgotten(blocks, namespaces=namespaces, now=self._clock.now()))
            await asyncio.sleep(0)

    async def _step(self, *, timeout_s: float) -> bool:
        """Runs one demotion plan. False if there was nothing to do or every transfer failed."""
        plan = self._core.demote(self._clock.now())
        if plan.is_empty:
            return False
        failpoint("background.before_demotion")
        failed = self._flights.failed
        self._flights.start(plan)
        await self._flights.landed(plan, timeout_s=timeout_s)
        await asyncio.sleep(0)  # a plan that only frees waits for nothing, so let calls run
        return len(plan.freed) > 0 or self._flights.failed - failed < len(plan.transfers) + len(plan.waits)

    async def _demote_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            if self._later is not None:
                self._later.cancel()  # this check covers released pages too
                self._later = None
            try:
                while await self._step(timeout_s=STEP_TIMEOUT_S):
                    pass
            except Exception:  # log and retry, or a tier would silently stay full
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
