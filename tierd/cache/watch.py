"""Watches stored and device tiers: takes failing ones out of service, and probes them.

`Watch` reads the tiers' health, lets a breaker (`breaker.py`) judge, and tells the core. It also
keeps which stores a device reads directly. Each tier has one probe at a time, so a hanging disk
blocks one thread. The core learns of a store's losses before a probe repairs the store. Each change
is logged once. While a call is under way or a tier is out of service, it looks every LOOK_S;
otherwise it waits for an event. It also runs under a replay clock, since a disk may fail then too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from tierd.cache.breaker import Breaker, State, Tolerance
from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.errors import InvalidArgument, TierFailed
from tierd.tiers.tier import Health, Tier, WatchedTier, is_device, is_watched

log = structlog.get_logger(__name__)

LOOK_S = 0.2
"""Time between two looks. It adds to the time for which a hanging tier still serves."""

Readings = list[tuple[Health, int]]


class Watch:
    """Runs while the daemon serves. breakers: of the watched tiers, by position."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._core, self._flights, self._mover, self._metrics = parts.core, flights, parts.mover, parts.metrics
        self._watched = {tier.position: tier for tier in parts.tiers if is_watched(tier)}
        self.breakers = {position: Breaker(Tolerance()) for position in self._watched}
        self._withheld: dict[int, Callable[[], str]] = {}
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._stirred = asyncio.Event()
        flights.stir = self._stirred.set
        for tier in self._watched.values():
            tier.heed(self._stirred.set)

    def tolerate(self, tolerances: Mapping[int, Tolerance]) -> None:
        """Sets the tolerances of watched tiers by position."""
        for at in self._watched.keys() & tolerances.keys():
            self.breakers[at].tolerate(tolerances[at])

    def withhold(self, position: int, why: Callable[[], str]) -> None:
        """Takes a tier out of service, whatever its breaker says. why: called for the reason."""
        self._withheld[position] = why
        self._set(position)

    def admit(self, position: int) -> None:
        """Ends `withhold`."""
        del self._withheld[position]
        self._set(position)

    def withheld(self) -> list[int]:
        """The withheld tiers."""
        return list(self._withheld)

    def trouble(self, position: int) -> str:
        """Why the tier is out of service, for reads or for writes. Empty if it is not."""
        why = self._withheld.get(position)
        return why() if why else self.breakers[position].reason

    def start(self) -> None:
        """Starts watching."""
        self._task = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """Stops watching. A hanging probe is abandoned."""
        tasks = [task for task in (self._task, *self._probes.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Looks at every watched tier now."""
        now = asyncio.get_running_loop().time()
        self.note_ways()
        self._flights.note_lost()  # before a probe replaces the file that lost them
        for position, tier in self._watched.items():
            breaker = self.breakers[position]
            if breaker.look(tier.health(), now, corrupt=self._flights.corrupt[position]):
                self._apply_change(tier)
            if breaker.is_due(now):
                breaker.probing()
                self._probes[position] = asyncio.create_task(self._probe(tier))

    def note_ways(self) -> None:
        """Tells the core the present direct paths from stores to devices, not those of the last
        look."""
        for tier in self._watched.values():
            self._set_direct(tier)

    async def resume(self, position: int | None, *, timeout_s: float) -> str:
        """Probes a tier that is out of service, by command. Returns the trouble that remains, empty
        if none. Raises InvalidArgument."""
        if position not in self.breakers:
            raise InvalidArgument("resume: only nvme and device tiers go out of service; name one, such as nvme.0")
        self.breakers[position].resume()
        self.look()
        if probe := self._probes.get(position):
            await asyncio.wait([probe], timeout=timeout_s)
        return self.trouble(position)

    async def _look_for_ever(self) -> None:
        while True:
            self._stirred.clear()
            before = self._looked()
            await asyncio.sleep(LOOK_S)
            if self._is_calm(before):
                await self._stirred.wait()

    def _looked(self) -> Readings | None:
        """The tiers' readings just before this look. None: the look failed."""
        try:
            before = self._readings()
            self.look()
        except Exception:
            log.exception("tiers not checked")
            return None
        return before

    def _is_calm(self, before: Readings | None) -> bool:
        """Whether nothing can change before an event: all tiers are in service and unchanged, and
        no call is under way."""
        if before is None:
            return False
        readings = self._readings()
        is_well = all(breaker.state is State.CLOSED for breaker in self.breakers.values())
        return is_well and readings == before and not any(health.calls for health, _ in readings)

    def _readings(self) -> Readings:
        """Health and corrupt blocks of each watched tier."""
        return [(tier.health(), self._flights.corrupt[position]) for position, tier in self._watched.items()]

    async def _probe(self, tier: WatchedTier) -> None:
        fault = ""
        try:
            await tier.probe()
        except TierFailed as error:
            fault = str(error)
        except Exception as error:
            log.exception("probe failed", tier=tier.spec.name)
            fault = f"{tier.spec.name}: the probe failed ({error!r}); see the log"
        self._flights.note_lost()  # losses that could not be copied into a new file
        breaker = self.breakers[tier.position]
        breaker.probed(fault, asyncio.get_running_loop().time())
        if breaker.state is State.CLOSED:
            self._apply_change(tier)

    def _apply_change(self, tier: WatchedTier) -> None:
        """Tells the core and the mover, and logs the change."""
        breaker = self.breakers[tier.position]
        self._set(tier.position)
        if breaker.writes:
            log.info("tier back in service", tier=tier.spec.name, place=tier.place)
            self._flights.wake()  # it can take blocks that were not written meanwhile
        else:
            what = "writes" if breaker.reads else "reads and writes"
            log.error("tier out of service", tier=tier.spec.name, what=what, reason=breaker.reason)
            self._metrics.tier_outages.labels(tier=tier.spec.name).inc()

    def _set(self, position: int) -> None:
        """Tells the core and the mover."""
        breaker, may = self.breakers[position], position not in self._withheld
        self._set_direct(self._watched[position])
        self._core.set_serving(position, breaker.reads and may)
        self._core.set_writable(position, breaker.writes and may)
        self._metrics.tier_writable.labels(tier=self._watched[position].spec.name).set(breaker.writes and may)
        if not (breaker.reads and may):
            self._mover.refuse(position)

    def _set_direct(self, tier: Tier) -> None:
        if is_device(tier):
            self._core.set_direct(tier.position, tier.direct_from)
