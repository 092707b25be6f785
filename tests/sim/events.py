"""Carries out the events of a script: verbs, faults that happen at once, and the final checks.

Purpose: `Happenings`. Non-purpose: times (script.py). Invariant: an event draws from its own seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim.blocks import CHAINS, hashes_of
from tests.sim.client import EXPECTED, Client
from tests.sim.daemon import SimDaemon
from tests.sim.loop import LIFE, OUTSIDE, Killed
from tests.sim.oracle import Key
from tests.sim.script import VERBS, Event
from tests.sim.weather import ON_DISK
from tierd.cache.operator import Operator
from tierd.core.formats.block import Namespace
from tierd.errors import TierdError
from tierd.failpoint import POINTS
from tierd.live_settings import settings_of
from tierd.policies.eviction import EVICTION
from tierd.server.assembly import Assembly

if TYPE_CHECKING:
    from tests.sim.world import World

OPERATORS = ("evict", "flush", "pin", "unpin", "bump", "set")
SETTINGS = {
    "eviction": sorted(EVICTION),
    "admission": ("learned", "all", "second-touch", "tinylfu"),
    "low_watermark": ("0.1", "0.5"),
    "high_watermark": ("0.7", "0.9"),
    "headroom": ("0.0", "0.2"),
    "wear_budget": ("0", "1 GiB"),
    "hang_limit": ("1 s", "5 s"),
    "session_share": ("0.3", "0.6"),
    "batch_blocks": ("1", "16"),
    "transfer_limit": ("1", "64"),
    "queue_time": ("0.1 s", "2 s"),
}
"""Values that changes of settings draw from, by the last part of the name."""
LASTING = {*ON_DISK, "disk_slow", "disk_hangs", "memory_short"}
POINTS_HERE = tuple(
    name for name in POINTS if not name.startswith(("arena.", "cuda.", "session.", "lifecycle.", "instance.", "file."))
)
"""Fault points that a simulation passes."""
SHORT_S, LONG_S = 2.0, 10.0
"""Longest times of faults; faults of reads last longer, as reads are rarer than writes."""
SLOW_SHARE = 0.5
"""Share of bumps that wait for a slow disk before the next epoch's names are kept."""
QUIET_S = 90.0
"""After the last fault all work must end within this time."""


class Happenings:
    """One per world. struck: faults that happened at once, by kind."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.struck: Counter[str] = Counter()
        self.may_fail_to_start = True
        self._verbs: dict[asyncio.Task[None], int] = {}  # task to its life
        self._kill_at: dict[str, int] = {}

    def happen(self, event: Event) -> None:
        """Carries out one event now; verbs go on by themselves."""
        rng = random.Random(event.seed)
        client = self._world.clients[event.who % len(self._world.clients)]
        if event.what in LASTING:
            self._world.weather.begin(event.what, rng.uniform(0.2, LONG_S if "read" in event.what else SHORT_S))
        elif event.what == "herd":
            self._start(self._herd(event.seed), None)
        elif event.what in OPERATORS:
            self._start(self.operate(event.what, rng), None)
        elif event.what in VERBS:
            self._start(client.do(event.what, rng), client)
        else:
            getattr(self, f"_{event.what}")(client, rng)

    def at_point(self, name: str) -> None:
        """The daemon passes a fault point and may die there."""
        world = self._world
        daemon = world.daemon
        if daemon is None or LIFE.get() != daemon.life or world.loop.is_ended(daemon.life) or not self._kill_at:
            return
        left = self._kill_at.get(name)
        if left is None:
            return
        self._kill_at[name] = left - 1
        if left == 0:
            self._kill_at.clear()
            self.struck["crash_at_point"] += 1
            world.kill_daemon(why=name)
            raise Killed(name)

    def end(self) -> None:
        """Ends all faults."""
        self._world.weather.clear()
        self._kill_at.clear()
        self._world.restarts_wanted = True

    def _start(self, verb: Any, client: Client | None) -> None:
        context, life = (client.context.copy(), client.life) if client is not None else (None, OUTSIDE)
        self._verbs[self._world.loop.create_task(verb, context=context)] = life

    # -- faults that happen at once

    def _crash(self, _client: Client, _rng: random.Random) -> None:
        self.struck["crash"] += 1
        self._world.kill_daemon(why="crash")

    def _crash_at_point(self, _client: Client, rng: random.Random) -> None:
        """Sets a few points for a crash, each at one of its next passes."""
        for name in rng.sample(POINTS_HERE, 12):
            self._kill_at[name] = rng.choice((0, 0, 1, 3))

    def _power_loss(self, _client: Client, _rng: random.Random) -> None:
        world = self._world
        self.struck["power_loss"] += 1
        world.lose_power()
        self._replace_dead()

    def _restart(self, _client: Client, _rng: random.Random) -> None:
        daemon = self._world.daemon
        if daemon is None or not daemon.is_serving:
            return
        self.struck["restart"] += 1

        async def stop() -> None:
            await daemon.stop()
            self._world.kill_daemon(why="stopped")

        self._world.loop.create_task(stop(), context=daemon.context.copy())

    def _client_dies(self, client: Client, _rng: random.Random) -> None:
        self.struck["client_dies"] += 1
        self._world.end_client(client)
        self._replace_dead()

    def _client_gives_up(self, client: Client, rng: random.Random) -> None:
        """The client gives up some of its next calls."""
        client.gives_up = rng.randint(1, 4)

    def _client_stalls(self, client: Client, rng: random.Random) -> None:
        self.struck["client_stalls"] += 1
        client.stalled_until = self._world.loop.time() + rng.uniform(0.5, 8)

    def _client_scribbles(self, client: Client, rng: random.Random) -> None:
        pages = [page for page in client.written if page.is_current]
        if pages:
            self.struck["client_scribbles"] += 1
            page = rng.choice(pages)
            page.spoil(rng.getrandbits(16))
            self._world.oracle.spoils(page.generation, page.key)

    def _client_lies(self, client: Client, rng: random.Random) -> None:
        """The client sends wrong sums with some of its next puts."""
        client.lies = rng.randint(1, 4)

    def _words_are_lost(self, _client: Client, rng: random.Random) -> None:
        """The use notices of clients' next copies get lost on the way to the daemon."""
        for client in self._world.clients:
            client.unheard = rng.randint(1, 8)

    def _directory_errs(self, _client: Client, rng: random.Random) -> None:
        """Entries of the directory point to other blocks, to no block, or out of range."""
        daemon = self._world.daemon
        if daemon is None or not daemon.is_serving:
            return
        for directory in daemon.assembly.cache.directories._written.values():
            used = np.argwhere(directory._keys != 0).tolist()
            places = [int(directory._places[bucket, slot]) for bucket, slot in used]
            for bucket, slot in used:
                self.struck["directory_errs"] += 1
                directory._places[bucket, slot] = rng.choice((*places, rng.getrandbits(rng.choice((8, 24, 64)))))

    def _host_rots(self, _client: Client, rng: random.Random) -> None:
        """Changes a byte of a block in mapped memory."""
        pages = [page for client in self._world.clients for page in client.seen if page.is_current]
        if pages:
            self.struck["host_rots"] += 1
            page = rng.choice(pages)
            page.spoil(rng.getrandbits(16))
            self._world.oracle.spoils(page.generation, page.key)

    def _replace_dead(self) -> None:
        world = self._world
        for number, client in enumerate(world.clients):
            if world.loop.is_ended(client.life):
                world.counts += client.counts
                world.clients[number] = world.new_client(number)

    # -- operators

    async def operate(self, what: str, rng: random.Random) -> None:
        """Runs a verb of the operator to its end."""
        world = self._world
        try:
            daemon = world.serving()

            async def work() -> None:
                await getattr(self, f"_do_{what}")(daemon.operator, rng)

            await daemon.call(work, timeout_s=rng.choice((1.0, 4.0)))
            world.counts[what] += 1
        except EXPECTED as error:
            world.counts[type(error).__name__] += 1

    async def _herd(self, seed: int) -> None:
        """All clients get the same blocks at once from a far tier, so many wait for one flight."""
        await self.operate("empty", random.Random(seed))
        for client in self._world.clients:
            self._start(client.do("get", random.Random(seed)), client)

    async def _do_empty(self, operator: Operator, rng: random.Random) -> None:
        await operator.evict([], "host.0")

    async def _do_set(self, operator: Operator, rng: random.Random) -> None:
        live = self._world.serving().live
        names = [s.name for s in settings_of(live.config) if s.is_live and s.name.rpartition(".")[2] in SETTINGS]
        chosen = {name: rng.choice(SETTINGS[name.rpartition(".")[2]]) for name in rng.sample(names, 3)}
        if rng.random() < 0.5:
            host = live.config.host[0]
            chosen["host.0.capacity"] = str(rng.randint(3, self._world.machine.host_segments) * host.segment)
        await live.set(chosen, is_check=False, who={})

    async def _do_evict(self, operator: Operator, rng: random.Random) -> None:
        if rng.random() < 0.5:
            await operator.evict([], "host.0")  # everything: the next gets read from a far tier
        else:
            await operator.evict(
                self._some(rng),
                rng.choice(("", "host.0", "nvme.0", self._world.serving().assembly.tiers[-1].spec.name)),
            )

    async def _do_pin(self, operator: Operator, rng: random.Random) -> None:
        await operator.pin(self._some(rng))

    async def _do_unpin(self, operator: Operator, rng: random.Random) -> None:
        await operator.unpin(self._some(rng))

    async def _do_flush(self, operator: Operator, rng: random.Random) -> None:
        assembly, before = self._world.serving().assembly, self._stored()
        if not (await operator.flush(timeout_s=1.0)).left:
            self._world.acknowledge(assembly, [key for key, at in self._stored().items() if before.get(key) == at])

    async def _do_bump(self, operator: Operator, rng: random.Random) -> None:
        assembly = self._world.serving().assembly
        model = rng.choice(("m0", "m1"))
        old = [i for n in assembly.cache.registry.current(model=model) for i in n.ids]
        self._world.oracle.epoch_ends(old)

        async def keep(*fresh: Namespace) -> None:
            self._world.oracle.epoch_is_over(old)
            if rng.random() < SLOW_SHARE:
                for client in self._world.clients:
                    self._start(client.do("copy", random.Random(rng.getrandbits(32))), client)
                await asyncio.sleep(rng.expovariate(1.0))
            await assembly.keep_namespaces(*fresh)

        await operator.bump_epoch(model=model, namespace_id=0, keep=keep)
        self._world.oracle.epoch_ended(old)

    def _stored(self) -> dict[Key, int]:
        """The generations of the blocks on NVMe, from the daemon's books."""
        core, tiers = self._world.serving().assembly.cache.core, self._world.serving().assembly.tiers
        nvme = next(tier.position for tier in tiers if tier.spec.is_durable)
        ids = core.blocks(tier=nvme)
        names, generations = core.names(ids), core.extents(ids, tier=nvme)["generation"].tolist()
        keys = zip(names["namespace"].tolist(), names["hash"], strict=True)
        return {(n, h.tobytes()): at for (n, h), at in zip(keys, generations, strict=True)}

    def _some(self, rng: random.Random) -> list[str]:
        """The name of a block that may exist."""
        depth = self._world.machine.depth
        return [hashes_of(rng.randrange(CHAINS), depth)[rng.randrange(depth)].tobytes().hex()[:16]]

    # -- the final checks

    async def finale(self) -> None:
        """All work ends, nothing stays held, and every durable block is there."""
        world = self._world
        await self._all_done()
        await self._nothing_is_held()
        self.may_fail_to_start = world.script.medium_lies
        world.rng.choice((lambda: world.kill_daemon(why="the last"), world.lose_power, lambda: None))()
        self._replace_dead()
        await self._serves()
        self.check_durable()
        await self._serves_again()
        await self._all_done()
        await self._nothing_is_held()

    async def _all_done(self) -> None:
        world = self._world
        alive = [task for task, life in self._verbs.items() if not task.done() and not world.loop.is_ended(life)]
        if alive:
            _, late = await asyncio.wait(alive, timeout=QUIET_S)
            for task in late:
                if not world.loop.is_ended(self._verbs[task]):
                    world.fail(f"a client's verb has not ended after {QUIET_S:.0f} s without faults: {task.get_coro()}")
        for task in alive:
            if task.done() and not task.cancelled() and task.exception() is not None:
                world.fail(f"a client fell: {task.exception()!r}")
        self._verbs.clear()

    async def _serves(self) -> None:
        """Waits until the daemon serves."""
        deadline = self._world.loop.time() + QUIET_S
        while self._world.daemon is None or not self._world.daemon.is_serving:
            if self._world.loop.time() > deadline:
                self._world.fail("the daemon does not serve")
                return
            await asyncio.sleep(0.1)

    async def _nothing_is_held(self) -> None:
        """Checks the books after every client has ended."""
        world = self._world
        await self._serves()
        for client in list(world.clients):
            world.end_client(client)
        self._replace_dead()
        await asyncio.sleep(1.0)
        await self._serves()
        daemon = world.serving()
        rest = daemon.assembly.cache.background.quiesce
        try:
            await daemon.call(lambda: rest(timeout_s=QUIET_S), timeout_s=QUIET_S + 1)
        except TierdError as error:
            if world.daemon is daemon and daemon.is_serving:
                world.fail(f"no rest: {error!r}")
            return  # an orderly stop that began before: the next check sees another life
        await self._in_service(daemon)
        self._audit(daemon.assembly)

    async def _in_service(self, daemon: SimDaemon) -> None:
        """No fault is on any more, so every store must soon accept writes."""
        world, breakers = self._world, daemon.assembly.cache.health.breakers.values()
        deadline = world.loop.time() + QUIET_S
        while not all(breaker.writes for breaker in breakers) and world.daemon is daemon:
            if world.loop.time() > deadline:
                world.fail(f"a store is still out of service: {[breaker.reason for breaker in breakers]}")
                return
            await asyncio.sleep(0.1)

    def _audit(self, assembly: Assembly) -> None:
        core, world = assembly.cache.core, self._world
        try:
            core.check()
        except AssertionError as error:
            world.fail(f"the core's books: {error}")
        stats = core.stats()
        held = {"leases": stats.leases, "reservations": stats.reservations, "transfers": stats.transfers}
        held["flights"] = assembly.cache.flights.count
        held["rows in the session table"] = len(assembly.cache._holdings._rows)
        for tier in core.tier_stats():
            held[f"pinned pages of {tier.name}"] = tier.pages_pinned
            held[f"reserved pages of {tier.name}"] = tier.pages_reserved
            held[f"retiring pages of {tier.name}"] = tier.pages_retiring
        for name, count in held.items():
            if count:
                world.fail(f"{count} {name} are left though everybody has gone")

    def check_durable(self) -> None:
        """Checks that every durable block that was not dropped is found, unless the disk lies."""
        world = self._world
        if world.daemon is None or not world.daemon.is_serving:
            return
        core = world.daemon.assembly.cache.core
        missing = sorted(key for key in world.oracle.durable if core.find_block(*key) is None)
        world.counts["durable checked"] += len(world.oracle.durable)
        if missing and world.script.medium_lies:
            world.counts["durable lost to a lying disk"] += len(missing)
            world.oracle.durable -= set(missing)
        elif missing:
            world.fail(
                f"{len(missing)} of {len(world.oracle.durable)} durable blocks are lost: {missing[0][1].hex()[:8]}"
            )

    async def _serves_again(self) -> None:
        """Starts puts and a get, which must work."""
        world = self._world
        for client in world.clients[:1]:
            for seed in range(3):
                self._start(client.do("put", random.Random(seed)), client)
            self._start(client.do("get", random.Random(7)), client)
