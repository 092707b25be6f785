"""A machine with a daemon and its clients, in one process, on a virtual clock.

Purpose: `run` carries a script out and checks every promise. Non-purpose: times of events
(script.py), promises (oracle.py), shrinking (shrink.py). Invariants: a script gives the same trace
every time. A dead process leaves the state that a SIGKILL at that moment leaves. After the last
fault the daemon serves again and has every block that it acknowledged as durable.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import structlog
from pydantic import TypeAdapter

from tests.sim.arena import Memory, Watch
from tests.sim.blocks import Blocks
from tests.sim.client import Client
from tests.sim.daemon import Ground, SimDaemon, Survivors
from tests.sim.disk import SimDisk
from tests.sim.events import Happenings
from tests.sim.loop import SimLoop, Stuck
from tests.sim.oracle import Key, Oracle
from tests.sim.script import SECONDS, Machine, Script
from tests.sim.weather import Weather
from tierd import failpoint, loads_by_layer
from tierd.config import Config
from tierd.core.formats.model import PAGE_ALIGN_BYTES
from tierd.core.plan import Plan
from tierd.errors import ConfigError, TierdError, TierFailed, Unavailable, VersionMismatch
from tierd.server.assembly import Assembly
from tierd.tiers.store.slots import HEADER_BYTES

CONFIGS = TypeAdapter(Config)


@dataclass
class Result:
    """The outcome of a script. violations: broken promises. trace: hash of events. struck:
    faults."""

    seed: int
    violations: list[str]
    trace: str
    struck: Counter[str]
    counts: Counter[str]
    virtual_s: float
    cpu_s: float
    wall_s: float
    first_s: float = 0.0
    """Virtual time of the first broken promise."""


class World:
    """See the module."""

    def __init__(self, script: Script, place: Path) -> None:
        rng = random.Random(f"world {script.seed}")
        self.script, self.machine, self.rng = script, script.machine, rng
        self.loop = SimLoop(rng, in_order=script.machine.in_order)
        self.disk = SimDisk(rng)
        self.weather = Weather(rng, self.disk, now=self.loop.time)
        self.oracle = Oracle(now=self.loop.time, fail=self.fail, verify=script.machine.verify)
        self.violations: list[str] = []
        self.first_s = 0.0
        self.daemon: SimDaemon | None = None
        self.clients: list[Client] = []
        self.puts: deque[Blocks] = deque(maxlen=8)
        """The blocks of the last puts of all clients."""
        self.counts: Counter[str] = Counter()
        self.restarts_wanted = True
        self._trace = hashlib.blake2b(digest_size=16)
        self._pids = 0
        self._sessions: dict[int, int] = {}  # session to pid
        self._alive: set[int] = set()
        self._held: dict[int, set[int]] = {}  # by pid, generations of held pages at the daemon's last end
        self._dead: list[tuple[SimDaemon, list[Callable[[], None]]]] = []
        self._dead_clients: list[Client] = []
        self.happenings = Happenings(self)
        tiers = 1 + bool(script.machine.device_segments)
        self._ground = Ground(
            self.loop,
            Survivors(self.disk, [Memory() for _ in range(tiers)], place / "sessions.tbl"),
            _config(script.machine),
            self._new_watch,
            self.fail,
            lambda pid: pid in self._alive,
        )
        self.loop.pace, self.loop.between = self.weather.pace, self._bury

    # -- for daemon, clients and events

    def serving(self) -> SimDaemon:
        """The present daemon. Raises Unavailable."""
        if self.daemon is None or not self.daemon.is_serving or self.loop.is_ended(self.daemon.life):
            raise Unavailable("daemon: none serves")
        return self.daemon

    def fail(self, what: str) -> None:
        """Records a broken promise, unless a dead process that unwinds reports it."""
        if not self.loop.is_ended():
            self.first_s = self.first_s or self.loop.time()
            self.violations.append(f"{self.loop.time():.4f} s: {what}")
            self.trace("violation", what)

    def trace(self, *what: object) -> None:
        """Adds an event to the trace."""
        self._trace.update(repr((round(self.loop.time(), 9), *what)).encode())

    def new_session(self, pid: int) -> int:
        """Returns the id of a new session of this process."""
        session = self.rng.getrandbits(62) + 1
        self._sessions[session] = pid
        return session

    def domain(self, tenant: str) -> int:
        """The tenant's trust domain, from the daemon's registry."""
        return self.serving().assembly.cache.registry.domain_of(tenant)

    def acknowledge(self, assembly: Assembly, keys: list[Key]) -> None:
        """Notes keys that are acknowledged as durable, but for those dropped since the sync."""
        core = assembly.cache.core
        nvme = sum(1 << tier.position for tier in assembly.tiers if tier.spec.is_durable)
        for key in keys:
            block = core.find_block(*key)
            if block is not None and int(core.describe(np.array([block]))["tiers"][0]) & nvme:
                self.oracle.acknowledged(key)

    def check_calm(self, assembly: Assembly) -> None:
        """Checks that in a calm script no token is missed for a failed transfer, by any waiter."""
        if self.script.is_calm and assembly.metrics.tokens_missed.labels(reason="failed")._value.get():
            self.fail("tokens were missed by a failed transfer, and nothing was made to fail")

    # -- processes

    def new_client(self, number: int) -> Client:
        """Starts a client's process."""
        self._pids += 1
        client = Client(self, pid=self._pids, tenant=f"t{number % self.machine.tenants}")
        self._alive.add(client.pid)
        return client

    def end_client(self, client: Client) -> None:
        """SIGKILL to a client. Half-written pages are spoilt; the daemon learns of it later."""
        if client.pid not in self._alive:
            return
        self.trace("client ends", client.pid)
        self.loop.end_life(client.life)
        self._dead_clients.append(client)
        for page in client.writing:
            page.spoil(self.rng.getrandbits(16))
        self._alive.discard(client.pid)
        sessions = [session for session, pid in self._sessions.items() if pid == client.pid]
        for memory in self._ground.survivors.memories:
            for session in sessions:
                memory.forget(session)
        if self.daemon is not None and self.daemon.is_serving:
            self._tell_end(self.daemon, sessions)

    def _tell_end(self, daemon: SimDaemon, sessions: list[int]) -> None:
        """The daemon sees end of file on the socket, then an event on the pidfd."""
        cache, later_s = daemon.assembly.cache, self.rng.expovariate(100)
        for session in sessions:
            context = self.loop.context_of(daemon.life)
            self.loop.call_later(later_s, cache.stop_session, session, context=context)
            context = self.loop.context_of(daemon.life)
            self.loop.call_later(later_s + self.rng.expovariate(50), cache.end_session, session, context=context)

    def kill_daemon(self, *, why: str) -> None:
        """SIGKILL to the daemon, at this very moment."""
        daemon = self.daemon
        if daemon is None or self.loop.is_ended(daemon.life):
            return
        self.trace("daemon ends", why)
        survivors = self._ground.survivors
        put_back = [memory.photograph() for memory in survivors.memories] + [_photograph(survivors.holds)]
        self.loop.end_life(daemon.life)
        daemon.is_serving = False
        self._count_outages(daemon)
        self._held = {client.pid: set(+client.holds) for client in self.clients}
        self._dead.append((daemon, put_back))

    def _count_outages(self, daemon: SimDaemon) -> None:
        opened, back = daemon.outages()
        self.counts["outages of a store"] += opened
        self.counts["returns of a store"] += back

    def lose_power(self) -> None:
        """The machine loses daemon, clients, memory and the bytes that the disk had not synced."""
        self.kill_daemon(why="power")
        for client in self.clients:
            self.end_client(client)
        for _, put_back in self._dead:
            put_back.append(self._empty_machine)
        self.disk.crash(self.rng)

    def _empty_machine(self) -> None:
        survivors = self._ground.survivors
        survivors.memories[:] = [Memory() for _ in survivors.memories]
        survivors.holds.unlink(missing_ok=True)
        self._sessions.clear()
        self.oracle.power_lost()

    def _bury(self) -> None:
        """After each turn: clears ended processes away and restores the state that outlives
        them."""
        while self._dead:
            daemon, put_back = self._dead.pop()
            self.loop.bury(daemon.life)
            for each in put_back:
                each()
            self.disk.end_process()
            self.oracle.daemon_restarted()
            daemon.fail_calls()
            daemon.close()
            daemon.ended.set_result(None)
        while self._dead_clients:
            self.loop.bury(self._dead_clients.pop().life)

    # -- the run

    async def live(self) -> None:
        """Runs the script from the first start to the final checks."""
        supervisor = self.loop.create_task(self._supervise())
        self.clients = [self.new_client(i) for i in range(self.machine.clients)]
        for event in self.script.events:
            await asyncio.sleep(max(0.0, event.at_s - self.loop.time()))
            self.trace(event.what, event.who)
            self.happenings.happen(event)
        await asyncio.sleep(max(0.0, SECONDS - self.loop.time()))
        self.happenings.end()
        await self.happenings.finale()
        supervisor.cancel()

    async def _supervise(self) -> None:
        """Starts the daemon again whenever it has ended."""
        while True:
            self.daemon = daemon = SimDaemon(self._ground)
            starting = self.loop.create_task(daemon.start(), context=daemon.context)
            await asyncio.wait([starting, daemon.ended], return_when=asyncio.FIRST_COMPLETED)
            if self.loop.is_ended(daemon.life):
                self.trace("died while it started")
            elif (error := starting.exception()) is not None:
                self._cannot_start(error)
            else:
                self.trace("serves")
                self.happenings.check_durable()
                self._check_held(daemon)
            await daemon.ended
            await asyncio.sleep(self.rng.uniform(0.01, 0.5))

    def _check_held(self, daemon: SimDaemon) -> None:
        """Checks that the session table tells the new life all pages that living clients held."""
        known = {g for former in daemon.assembly.former for g in former.leased["generation"].tolist()}
        for pid, held in self._held.items():
            if pid in self._alive:
                self.counts["held pages checked"] += len(held)
                if held - known:
                    self.fail(f"{len(held - known)} pages that client {pid} held are not in the session table")

    def _cannot_start(self, error: BaseException) -> None:
        self.counts["starts that failed"] += 1
        # A lying disk may also seem to refuse O_DIRECT, or to hold another version's files.
        expected = (TierFailed, ConfigError, VersionMismatch) if self.script.medium_lies else TierFailed
        if not isinstance(error, expected) or not self.happenings.may_fail_to_start:
            self.fail(f"the daemon cannot start: {error!r}")
        self.kill_daemon(why="no start")

    def _new_watch(self) -> Watch:
        return Watch(self.fail, self._saw, lambda: self.weather.strikes("memory_short", 0.5))

    def _saw(self, plan: Plan) -> None:
        if self.loop.is_ended():
            return
        daemon = self.daemon
        assert daemon is not None
        self.oracle.saw(plan, nvme=len(daemon.assembly.tiers) - 1)
        if daemon.is_serving and (what := daemon.breaks_service(plan)):
            self.fail(what)
        for generation in plan.freed["extent"]["generation"].tolist():
            if generation in daemon.watch.flying:
                self.fail(f"a page of generation {generation} is freed while a transfer uses it")

    def result(self, begun: tuple[float, float]) -> Result:
        """The result. begun: CPU time and wall-clock time at the start, in seconds."""
        self.violations += [f"unforeseen: {text}" for text in self.loop.unforeseen]
        self.trace("end", self.loop.turns)
        for client in self.clients:
            self.counts += client.counts
        if self.daemon is not None and not self.loop.is_ended(self.daemon.life):
            self._count_outages(self.daemon)
        struck = self.weather.totals() + self.happenings.struck
        return Result(
            self.script.seed,
            self.violations,
            self._trace.hexdigest(),
            struck,
            self.counts + self.oracle.counts,
            self.loop.time(),
            time.process_time() - begun[0],
            time.perf_counter() - begun[1],
            self.first_s,
        )


def run(script: Script) -> Result:
    """Carries a script out."""
    begun = time.process_time(), time.perf_counter()
    place = Path(tempfile.mkdtemp(prefix="tierd-sim-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = World(script, place)
    try:
        with _watching(world):
            try:
                world.loop.run(world.live())
            except Stuck as error:
                world.fail(f"stuck: {error}")
            finally:
                result = world.result(begun)
                world.loop.shut()
        return result
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _watching(world: World) -> Iterator[None]:
    """Sends fault points and the daemon's log to the world while it runs."""

    def listen(_logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        error = event.get("exc_info") and sys.exc_info()[1]
        if method in ("exception", "critical") and not isinstance(error, TierdError | OSError):
            world.fail(f"the daemon logs {event.get('event')!r}: {error!r}")
        raise structlog.DropEvent

    before, parts = structlog.get_config(), (loads_by_layer.PART_BYTES, loads_by_layer.PART_BATCH_BYTES)
    loads_by_layer.PART_BYTES = loads_by_layer.PART_BATCH_BYTES = PAGE_ALIGN_BYTES
    structlog.configure(processors=[listen], cache_logger_on_first_use=False)
    failpoint.watch(world.happenings.at_point)
    try:
        yield
    finally:
        failpoint.watch(None)
        loads_by_layer.PART_BYTES, loads_by_layer.PART_BATCH_BYTES = parts
        structlog.configure(**before)


def _photograph(path: Path) -> Callable[[], None]:
    """Saves a file's content; the result writes it back into the same file, which may be mapped."""
    content = path.read_bytes() if path.exists() else b""

    def put_back() -> None:
        if content:
            with path.open("r+b") as file:
                file.write(content)
                file.truncate(len(content))

    return put_back


def _config(machine: Machine) -> Config:
    page = -(-machine.block_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    segment, stored = machine.depth * page, machine.depth * (page + HEADER_BYTES)
    in_memory = {"level": 0, **_marks(stored)}
    tables: dict[str, Any] = {
        "host": [{"capacity": machine.host_segments * segment, "verify": machine.verify, **_marks(segment)}],
        "nvme": [
            *([{"capacity": machine.memory_segments * stored, **in_memory}] if machine.memory_segments else []),
            {"capacity": machine.nvme_segments * stored, **_marks(stored)},
        ],
        "mover": {
            "prefetch_on_lookup": machine.prefetch_on_lookup,
            "batch_blocks": machine.batch_blocks,
            "transfer_limit": 128,
        },
    }
    if machine.device_segments:
        tables["device"] = [{"capacity": machine.device_segments * segment, **_marks(segment)}]
    return CONFIGS.validate_python(tables)


def _marks(segment_bytes: int) -> dict[str, Any]:
    return {"segment": segment_bytes, "high_watermark": 0.8, "low_watermark": 0.6}
