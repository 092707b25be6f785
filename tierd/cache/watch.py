"""Looks after the stored and the device tiers: takes those that keep failing out of service, and tries whether they work again.

Purpose: `Watch`, which asks tiers how they fare, lets a breaker judge, and tells the core; also which stores a device reads from directly now. Non-purpose: the judgement (`breaker`).
Invariants: one probe at a time for each tier, so that a disk that hangs costs one thread; before a probe mends a store the core knows what that has lost; people hear of each change once; while a call is under way, or
a tier out of service, there is a look every LOOK_S, and while nothing happens there is none. Under a replay clock it looks too, since a disk may fail then as well.
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
"""Between two looks at the tiers: adds to the time for which it serves although it hangs."""

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
        """How much each watched tier may fail, by position; before `start`."""
        self.breakers.update((at, Breaker(tolerances[at])) for at in self._watched if at in tolerances)

    def withhold(self, position: int, why: Callable[[], str]) -> None:
        """The tier is out of service whatever its breaker says. why: asked when people want to know."""
        self._withheld[position] = why
        self._set(position)

    def admit(self, position: int) -> None:
        """It is withheld no more."""
        del self._withheld[position]
        self._set(position)

    def withheld(self) -> list[int]:
        """The tiers that are."""
        return list(self._withheld)

    def trouble(self, position: int) -> str:
        """Why the tier is out of service, for reads or for writes; empty if it is not."""
        why = self._withheld.get(position)
        return why() if why else self.breakers[position].reason

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """Ends; a probe that hangs is left to itself."""
        tasks = [task for task in (self._task, *self._probes.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """At every watched tier, now."""
        now = asyncio.get_running_loop().time()
        self.note_ways()
        self._flights.note_lost()  # before a probe puts a new file in the place of one that had it
        for position, tier in self._watched.items():
            breaker = self.breakers[position]
            if breaker.look(tier.health(), now, corrupt=self._flights.corrupt[position]):
                self._tell(tier)
            if breaker.is_due(now):
                breaker.probing()
                self._probes[position] = asyncio.create_task(self._probe(tier))

    def note_ways(self) -> None:
        """Plans go by the ways from stores to devices that there are now, not by those of the last look."""
        for tier in self._watched.values():
            self._set_direct(tier)

    async def resume(self, position: int | None, *, timeout_s: float) -> str:
        """By command: probes a tier that is out of service at once; what keeps it so, empty if it is back. Raises InvalidArgument."""
        if position not in self.breakers:
            raise InvalidArgument(
                "resume: only a tier that stores (such as nvme.0) or a GPU's goes out of service; name one"
            )
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
        """How the tiers fared just before this look at them; None: it failed."""
        try:
            before = self._readings()
            self.look()
        except Exception:
            log.exception("tiers not looked at")
            return None
        return before

    def _is_calm(self, before: Readings | None) -> bool:
        """Whether nothing can change before something stirs: every tier is in service and as it was before the last look, and nothing is under way."""
        if before is None:
            return False
        readings = self._readings()
        is_well = all(breaker.state is State.CLOSED for breaker in self.breakers.values())
        return is_well and readings == before and not any(health.calls for health, _ in readings)

    def _readings(self) -> Readings:
        """How each watched tier fares, and how many corrupt blocks it has given."""
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
        self._flights.note_lost()  # what could not be brought into a new file
        breaker = self.breakers[tier.position]
        breaker.probed(fault, asyncio.get_running_loop().time())
        if breaker.state is State.CLOSED:
            self._tell(tier)

    def _tell(self, tier: WatchedTier) -> None:
        """The core, the mover, and people."""
        breaker = self.breakers[tier.position]
        self._set(tier.position)
        if breaker.writes:
            log.info("tier back in service", tier=tier.spec.name, place=tier.place)
            self._flights.wake()  # it takes what could not be written meanwhile
        else:
            what = "writes" if breaker.reads else "reads and writes"
            log.error("tier out of service", tier=tier.spec.name, what=what, reason=breaker.reason)
            self._metrics.tier_outages.labels(tier=tier.spec.name).inc()

    def _set(self, position: int) -> None:
        """The core and the mover."""
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
