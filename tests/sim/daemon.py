"""One life of the daemon: all code from the cache down, over memory and a disk that outlive it.

Purpose: `SimDaemon`: it starts as `assemble` and the lifecycle do, accepts calls as the guard does,
stops in order. Non-purpose: sockets, messages, causes of a life's end (world.py). Invariants:
callbacks here end with the daemon's life. A call that overruns its deadline is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.sim.arena import Memory, Segment, SimArena, Watch
from tests.sim.disk import SimDisk
from tests.sim.loop import SimLoop
from tierd.cache.breaker import State
from tierd.cache.operator import Operator
from tierd.clock import Clock
from tierd.config import Config
from tierd.core.formats.model import StructArray, TierKind
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.core.plan import Plan
from tierd.errors import DeadlineExceeded, NotFound, NotPermitted, TierdError, Unavailable
from tierd.mover import Mover
from tierd.server.assembly import Assembly, Opened, put_together, spec_of
from tierd.server.instance import Instance
from tierd.server.operators.live import LiveSettings
from tierd.server.session.grants import Grants
from tierd.tiers.arena.holds import FormerHolder, HoldTable
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.tier import Tier

T = TypeVar("T")

SLACK_S = 0.5
"""A call may end this long after its deadline: a cancelled handler needs a few turns."""
SHUTDOWN_S = 2.0
PIECE_BLOCKS = 16
"""The core's piece size, in place of a few hundred: more callbacks run between two pieces."""
STORE, STORE_IN_MEMORY = Path("/store"), Path("/memory")


class SimClock(Clock):
    """The loop's time; the wall clock follows it."""

    is_replay = False

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def now(self) -> float:
        """Virtual seconds."""
        return self._now()

    def advance(self, now: float) -> None:
        """Ignored."""

    def wall_ms(self) -> int:
        """Virtual milliseconds after a moment in 2026."""
        return 1_790_000_000_000 + int(self._now() * 1000)


class SimInstance(Instance):
    """The state directory, as a list that outlives every life."""

    def __init__(self) -> None:
        self.id = "simulated"
        self.records: list[bytes] = []

    def restore_namespaces(self, registry: NamespaceRegistry) -> None:
        """As the real one does from its file."""
        registry.restore(self.records)

    def keep_namespaces(self, records: list[bytes]) -> None:
        """Durable at once."""
        self.records = list(records)

    def close(self) -> None:
        """Does nothing: no lock is held."""


@dataclass
class Survivors:
    """State that outlives a daemon. memories: of mapped tiers, in order. holds: the session
    table."""

    disk: SimDisk
    memories: list[Memory]
    holds: Path
    instance: SimInstance = field(default_factory=SimInstance)


@dataclass(frozen=True)
class Ground:
    """Surroundings of a life. fail: reports a broken rule. is_alive: does a pid's client live."""

    loop: SimLoop
    survivors: Survivors
    config: Config
    watch: Callable[[], Watch]
    fail: Callable[[str], None]
    is_alive: Callable[[int], bool]


class SimDaemon:
    """One life. The caller runs its coroutines in `context`."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.loop = ground, ground.loop
        self.life = ground.loop.new_life()
        self.context = ground.loop.context_of(self.life)
        self.ended: asyncio.Future[None] = ground.loop.create_future()
        self.watch = ground.watch()
        self.is_serving = False
        self.restored: dict[int, int] = {}
        """Sessions of a former life whose processes live, with their pids."""
        self.assembly: Assembly
        self.grants: Grants
        self.operator: Operator
        self.live: LiveSettings
        self.names: dict[asyncio.Future[Any], tuple[int, str]] = {}
        """Session and request of each named call in progress."""
        self._calls: dict[asyncio.Future[Any], asyncio.Task[None]] = {}

    # -- life

    async def start(self) -> None:
        """Opens tiers, loads books, restores former sessions, serves. Raises the `open`s'
        errors."""
        survivors, config = self.ground.survivors, self.ground.config
        tiers = self._tiers()
        recovered = [await tier.open() for tier in tiers]
        holds = HoldTable(survivors.holds)
        opened = Opened(
            tiers,
            recovered,
            holds=holds,
            former=holds.open(distrust=self._distrust),
            clock=SimClock(self.loop.time),
            draw=self.loop.rng.getrandbits,
        )
        self.assembly = put_together(config, opened, instance=survivors.instance)
        cache = self.assembly.cache
        cache.core.piece_blocks = PIECE_BLOCKS
        _count_flying(cache.parts.mover, self.watch)
        self.operator = Operator(cache)
        self.live = LiveSettings(self.assembly)
        self.grants = Grants(release=cache.release, abort=cache.abort, check_open=cache.tenant_of)
        for former in self.assembly.former:
            self._take_up(former)
        cache.health.start()
        cache.background.start()
        await self.assembly.load()
        self.is_serving = True

    async def stop(self) -> None:
        """Stops as the lifecycle does on SIGTERM."""
        assembly, deadline = self.assembly, self.loop.time() + SHUTDOWN_S
        assembly.cache.is_draining = True
        if self._calls:
            await asyncio.wait([*self._calls.values()], timeout=SHUTDOWN_S)
        for reply, call in [*self._calls.items()]:
            _refuse(reply, Unavailable("daemon: it is stopping"))
            call.cancel()
        await asyncio.wait(
            [asyncio.ensure_future(assembly.cache.health.stop())], timeout=max(0.0, deadline - self.loop.time())
        )
        await assembly.cache.background.stop()
        await assembly.cache.flights.idle(timeout_s=max(0.0, deadline - self.loop.time()))
        self.is_serving = False
        for tier in reversed(assembly.tiers):
            await tier.close(release=False)
        assembly.holds.close(release=False)  # last: nothing runs after it

    def _tiers(self) -> list[Tier]:
        config, tiers = self.ground.config, list[Tier]()
        tables = [(TierKind.DEVICE, i, t) for i, t in enumerate(config.device)]
        tables += [(TierKind.HOST, i, t) for i, t in enumerate(config.host)]  # type: ignore[misc]
        for position, ((kind, index, table), memory) in enumerate(
            zip(tables, self.ground.survivors.memories, strict=True)
        ):
            spec = spec_of(kind, index, table)
            tiers.append(SimArena(spec, position=position, memory=memory, watch=self.watch))
        for index, nvme in enumerate(config.nvme):
            store = NvmeStore(
                spec_of(TierKind.NVME, index, nvme),
                position=len(tiers),
                path=STORE if nvme.level else STORE_IN_MEMORY,
                direct="on",
                queue_depth=4,
            )
            store.disk = self.ground.survivors.disk
            tiers.append(store)
        return tiers

    def _distrust(self, fault: str) -> None:
        """Reports a bad session table, if memory was found that a client could hold."""
        if any(memory.data for memory in self.ground.survivors.memories):
            self.ground.fail(fault)

    def _take_up(self, former: FormerHolder) -> None:
        holder, cache = former.holder, self.assembly.cache
        if self.ground.is_alive(holder.pid):
            self.restored[holder.session] = holder.pid
        else:
            cache.end_session(holder.session)

    def breaks_service(self, plan: Plan) -> str:
        """A plan's wrong use of a store that is out of service; empty if there is none."""
        for position, breaker in self.assembly.cache.health.breakers.items():
            if not breaker.writes and np.any(plan.reserved["tier"] == position):
                return f"pages are reserved on a store while it is out of service: {breaker.reason}"
            if not breaker.reads and np.any(plan.transfers["source"]["tier"] == position):
                return f"a read of a store is planned while it is out of service: {breaker.reason}"
        return ""

    def outages(self) -> tuple[int, int]:
        """How often stores went out of service in this life, and how often they returned."""
        breakers = self.assembly.cache.health.breakers.values() if hasattr(self, "assembly") else ()
        opened = sum(breaker.opened for breaker in breakers)
        return opened, opened - sum(breaker.state is not State.CLOSED for breaker in breakers)

    # -- calls

    async def call(
        self, work: Callable[[], Awaitable[T]], *, timeout_s: float, name: tuple[int, str] | None = None
    ) -> T:
        """Runs work in the daemon for its result or error. Raises Unavailable, DeadlineExceeded."""
        if not self.is_serving:
            raise Unavailable("daemon: not serving")
        reply: asyncio.Future[T] = self.loop.create_future()
        self._calls[reply] = self.loop.create_task(
            self._serve(work, reply, timeout_s), context=self.loop.context_of(self.life)
        )
        if name is not None:
            self.names[reply] = name
        _, late = await asyncio.wait([reply], timeout=timeout_s + 2 * SLACK_S)
        if late:
            self.ground.fail(f"a call with {timeout_s:.2f} s has not ended after {timeout_s + 2 * SLACK_S:.2f} s")
            raise DeadlineExceeded("call: not ended")
        return reply.result()

    def post(self, work: Callable[..., object], *args: object) -> None:
        """Runs work in the daemon soon; no caller waits."""
        self.loop.call_later(self.loop.rng.expovariate(1 / 2e-4), work, *args, context=self.loop.context_of(self.life))

    def give_up(self, name: tuple[int, str]) -> bool:
        """Gives up a call in progress and cancels its handler. False: the call already has a
        reply."""
        for reply in [reply for reply, given in self.names.items() if given == name and not reply.done()]:
            _refuse(reply, Unavailable("call: given up"))
            self.post(self._calls[reply].cancel)
            return True
        return False

    def close(self) -> None:
        """Closes the descriptors of a process that has ended."""
        if hasattr(self, "assembly"):
            self.assembly.cache.directories.close()

    def fail_calls(self) -> None:
        """Fails the open calls of a process that has ended, as its sockets would."""
        for reply in [*self._calls]:
            if not reply.done():
                _refuse(reply, Unavailable("daemon: it has ended"))
        self._calls.clear()

    async def _serve(self, work: Callable[[], Awaitable[T]], reply: asyncio.Future[T], timeout_s: float) -> None:
        begun = self.loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                result = await work()
            if not reply.done():
                reply.set_result(result)
        except TimeoutError:
            _refuse(reply, DeadlineExceeded("call: its deadline passed"))
        except TierdError as error:
            _refuse(reply, error)
        except asyncio.CancelledError:
            _refuse(reply, Unavailable("call: given up"))
            raise
        except Exception as error:  # the guard would log it as the daemon's fault
            self.ground.fail(f"a call raised {error!r}")
            _refuse(reply, Unavailable("call: an internal fault"))
        finally:
            if not self.loop.is_ended():
                self._told(reply, begun + timeout_s)

    def _told(self, reply: asyncio.Future[Any], deadline: float) -> None:
        self._calls.pop(reply, None)
        self.names.pop(reply, None)
        if self.loop.time() > deadline + SLACK_S:
            self.ground.fail(f"a call ended {self.loop.time() - deadline:.2f} s after its deadline")

    # -- the session socket

    def map(self, tier: int, segment: int, *, session: int) -> Segment:
        """As the listeners' `_map_segment`. Raises NotFound, NotPermitted, TierFailed."""
        cache, arena = self.assembly.cache, self.assembly.tiers[tier]
        core = cache.core
        found = [s for s in core.segments(tier) if s.segment == segment] if isinstance(arena, SimArena) else []
        if not found or not isinstance(arena, SimArena):
            raise NotFound(f"segment {segment} of tier {tier}: it does not exist (any more)")
        if found[0].domain != cache.registry.domain_of(cache.tenant_of(session)):
            raise NotPermitted(f"segment {segment} of tier {tier}: belongs to another trust domain")
        core.note_attached(session, tier=tier, segment=segment)
        return arena.map(segment, session=session)

    def forget(self, session: int) -> None:
        """Ends a restored session whose process uses nothing of it any more."""
        if self.restored.pop(session, None) is not None:
            self.assembly.cache.end_session(session)


def _refuse(reply: asyncio.Future[Any], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
        reply.exception()  # mark as retrieved: its client may have gone


def _count_flying(mover: Mover, watch: Watch) -> None:
    """Counts the pages of every copy while its bytes may move."""
    copy = mover._copy

    async def counted(batch: StructArray, metas: StructArray, *ends: Tier) -> np.ndarray[Any, Any]:
        pages = [*batch["source"]["generation"].tolist(), *batch["target"]["generation"].tolist()]
        watch.flying.update(pages)
        try:
            return await copy(batch, metas, *ends)
        finally:
            watch.flying.subtract(pages)
            for page in [page for page in pages if not watch.flying[page]]:
                del watch.flying[page]

    mover._copy = counted  # type: ignore[method-assign, assignment]
