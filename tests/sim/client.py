"""A client's process: it calls the daemon's verbs, reads and writes pages, and checks every byte.

Purpose: `Client`. Non-purpose: times (script.py), promises (oracle.py). Invariants: a client keeps
to the protocol unless a fault of the script says otherwise. After the daemon's death it still uses
the pages that it holds, as real workers do, and then releases them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tests.sim import by_layer
from tests.sim.arena import Segment
from tests.sim.blocks import CHAINS, TOKENS, Blocks, Page
from tests.sim.copies import Copies
from tests.sim.daemon import SimDaemon
from tests.sim.oracle import Key, bytes_of
from tierd.cache.acquire_reply import AcquireReply
from tierd.cache.commit import CommitQuery
from tierd.checksum import raw_tables, slice_sums
from tierd.core.formats.block import KVGeometry, Namespace, NamespaceSpec, slice_lengths
from tierd.core.formats.model import (
    BlockStatus,
    Durability,
    StructArray,
    TierKind,
)
from tierd.core.plan import Committed, Reserved
from tierd.errors import NotFound, RetryError, SessionLost, StaleHandle, TierFailed, Unavailable
from tierd.server.assembly import Assembly
from tierd.tiers.arena.holds import Holder, read_boot_id
from tierd.tiers.tier import Descriptor

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")

EXPECTED = (RetryError, StaleHandle, TierFailed, NotFound)
"""Errors that a verb may raise when something goes wrong. Any other error is the daemon's fault."""


@dataclass
class Held:
    """A session with one life of the daemon. uses: gets and puts that still touch its pages."""

    daemon: SimDaemon
    session: int
    uses: int = 0
    has_left: bool = False
    answered_s: float = 0.0
    """When the client made the latest call that got an answer."""
    copies: Copies = field(init=False)


class Client:
    """One process. pid: also its number among all clients that ever ran."""

    def __init__(self, world: World, *, pid: int, tenant: str) -> None:
        self.world, self.loop, self.pid, self.tenant = world, world.loop, pid, tenant
        self.life = world.loop.new_life()
        self.context = world.loop.context_of(self.life)
        self.stalled_until = 0.0
        self.gives_up = 0
        """Number of its next calls that it gives up."""
        self.lies = self.unheard = 0
        """Number of its next puts with wrong sums, and of its next use notices that get lost."""
        self.written: list[Page] = []
        """Committed pages that it can still write to."""
        self.writing: list[Page] = []
        """Reserved pages that it writes."""
        self.holds, self.pending = Counter[int](), Counter[tuple[int, int]]()
        """Generations of the pages that its gets' leases hold."""
        self.counts: Counter[str] = Counter()
        self.seen: list[Page] = []
        """The pages that it read last."""
        self._held: Held | None = None
        self._namespaces: dict[str, Namespace] = {}
        self.specs: dict[int, NamespaceSpec] = {}
        self.maps: dict[tuple[int, int], Segment] = {}
        """Mapped segments, by tier and number."""
        self._requests = 0

    # -- calls to the daemon

    async def session(self) -> Held:
        """The session with this life of the daemon. Raises Unavailable and open_session's
        errors."""
        daemon = self.world.serving()
        held = self._held
        if held is None or held.daemon is not daemon or held.has_left:
            held = Held(daemon, self.world.new_session(self.pid))
            self._held = held
            self._namespaces.clear()
            holder = Holder(
                held.session, self.pid, 1, read_boot_id(), 1000, self.world.domain(self.tenant), self.tenant
            )
            await self.ask(
                held, lambda a: a.cache.open_session(held.session, tenant=self.tenant, holder=holder), timeout_s=1.0
            )
        if not hasattr(held, "copies"):
            held.copies = Copies(self, held, await self.ask(held, self._directory, timeout_s=1.0))
        return held

    async def ask(
        self, held: Held, work: Callable[[Assembly], Awaitable[T] | T], *, timeout_s: float, request: str = ""
    ) -> T:
        """Runs a verb of the session. Raises the daemon's errors."""
        if held.daemon is not self.world.daemon:
            raise Unavailable("daemon: another life has begun")

        async def run() -> T:
            result = work(held.daemon.assembly)
            return await result if isinstance(result, Awaitable) else result

        name = (held.session, request) if request else None
        if name is not None and self.gives_up:
            self.gives_up -= 1
            self.loop.call_later(self.world.rng.expovariate(1 / 1e-3), self.give_up, held.daemon, name)
        asked_s = self.loop.time()
        result = await held.daemon.call(run, timeout_s=timeout_s, name=name)
        held.answered_s = max(held.answered_s, asked_s)
        await self.awake()
        return result

    def give_up(self, daemon: SimDaemon, name: tuple[int, str]) -> None:
        """Gives up a call in progress; cancel and revoke reach the daemon in any order."""
        if daemon.give_up(name):
            self.world.happenings.struck["client_gives_up"] += 1
            daemon.post(daemon.grants.revoke, *name)

    async def awake(self) -> None:
        """Waits until the stopped process is woken."""
        while self.stalled_until > self.loop.time():  # noqa: ASYNC110  # it may be stopped again meanwhile
            await asyncio.sleep(self.stalled_until - self.loop.time())

    async def namespace(self, held: Held, model: str) -> Namespace:
        """The namespace of a model, opened if needed."""
        if model not in self._namespaces:
            machine = self.world.machine
            geometry = KVGeometry(machine.layers, 1, 1, "float16") if machine.layers else KVGeometry()
            spec = NamespaceSpec(model, TOKENS, machine.block_bytes, geometry=geometry)

            async def opening(assembly: Assembly) -> Namespace:
                namespace = assembly.cache.open_namespace(held.session, spec)
                await assembly.keep_namespaces(namespace)
                return namespace

            self._namespaces[model] = await self.ask(held, opening, timeout_s=3.0)
            self.specs[self._namespaces[model].id] = spec
        return self._namespaces[model]

    async def choose(self, held: Held, rng: random.Random, *, whole: bool) -> Blocks:
        """Some blocks of some chain. whole: they start with the chain's first block."""
        namespace = await self.namespace(held, rng.choice(("m0", "m0", "m1")))
        first = 0 if whole else rng.choice((0, 0, 0, 2, 4))
        machine = self.world.machine
        stop = rng.randint(first + 1, machine.depth)
        number = rng.choice((0, 0, *range(CHAINS)))
        return Blocks(namespace.id, number, first, stop, machine.depth, machine.block_bytes)

    async def do(self, what: str, rng: random.Random) -> None:
        """Runs one verb of the script to its end."""
        try:
            await getattr(self, what)(rng)
            self.counts[what] += 1
        except StaleHandle:
            self._namespaces.clear()
            self.counts["StaleHandle"] += 1
        except EXPECTED as error:
            self.counts[type(error).__name__] += 1

    async def get(self, rng: random.Random) -> None:
        """Acquires blocks, reads their pages, holds them, reads them again and releases them."""
        held = await self.session()
        with self.using(held):
            wanted = await self.choose(held, rng, whole=True)
            if self.world.machine.by_layer and rng.random() < self.world.machine.by_layer:
                await by_layer.get(self, held, wanted, rng)
                return
            began_s = self.loop.time()
            self.world.oracle.asks([wanted.key(i) for i in wanted.numbers])
            lease = await self.acquire(held, wanted, kind=self.kind(rng), timeout_s=rng.choice((0.2, 1.0, 4.0)))
            self.counts["tokens asked"] += wanted.query().tokens
            self.counts["tokens served"] += lease.served.tokens
            if lease.lease:
                await self.use(held, lease, wanted, rng, began_s=began_s)

    async def use(self, held: Held, lease: AcquireReply, wanted: Blocks, rng: random.Random, *, began_s: float) -> None:
        """Reads the pages of a get's lease twice and releases the lease."""
        extents = lease.served.groups[0].extents[0]
        generations = extents["generation"].tolist()
        self.holds.update(generations)
        try:
            pages = await self.pages(held, extents, [wanted.key(i) for i in range(len(extents))])
            self.read(pages, began_s)
            await self.hold(rng)
            self.read(pages, began_s)
        finally:
            self.holds.subtract(generations)
            self.let_go(held, lambda a: a.cache.release(held.session, [lease.lease]))

    async def copy(self, rng: random.Random) -> None:
        """One or two gets into the client's own memory, mostly of the blocks put last."""
        held = await self.session()
        with self.using(held):
            wanted = await self.choose(held, rng, whole=rng.random() < 0.7)
            last = [put for put in self.world.puts if put.namespace == wanted.namespace]
            wanted = rng.choice(last) if last and rng.random() < 0.7 else wanted
            if rng.random() < 0.8:
                await self.ask(held, lambda a: a.cache.lookup(held.session, [wanted.query()]), timeout_s=1.0)
            for _ in range(rng.choice((1, 2))):
                await held.copies.get(wanted, self.specs[wanted.namespace], rng)

    def _directory(self, assembly: Assembly) -> Descriptor:
        """The directory's descriptor, as the hello returns it."""
        return assembly.cache.directories.give(self.world.domain(self.tenant))

    async def acquire(
        self, held: Held, wanted: Blocks, *, kind: TierKind, timeout_s: float, verb: str = "acquire", **how: Any
    ) -> AcquireReply:
        """Acquires a lease. A client that gives up revokes it by the request's name."""
        request = self.new_request()

        async def work(assembly: Assembly) -> AcquireReply:
            how.update(kind=kind, timeout_s=timeout_s * 0.8)
            lease: AcquireReply = await getattr(assembly.cache, verb)(held.session, [wanted.query()], **how)
            self.world.check_calm(assembly)
            return held.daemon.grants.give((held.session, request), lease, lease=lease.lease)

        return await self.ask(held, work, timeout_s=timeout_s, request=request)

    async def lookup(self, rng: random.Random) -> None:
        """Asks how many tokens are cached."""
        held = await self.session()
        wanted = await self.choose(held, rng, whole=True)
        await self.ask(held, lambda a: a.cache.lookup(held.session, [wanted.query()]), timeout_s=1.0)

    async def prefetch(self, rng: random.Random) -> None:
        """Asks the daemon to copy blocks to a nearer tier."""
        held = await self.session()
        wanted = await self.choose(held, rng, whole=True)
        kind = self.kind(rng)
        await self.ask(held, lambda a: a.cache.prefetch(held.session, [wanted.query()], kind), timeout_s=1.0)

    def read(self, pages: Sequence[Page], began_s: float) -> None:
        """Checks every byte of held pages, and that their generations are the handles'."""
        self.seen = [*self.seen[-16:], *pages]
        for page in pages:
            found = page.bytes()
            if not page.is_current:
                self.world.fail(f"{page}: its generation changed under a reader")
            self.world.oracle.read(page.key, found, generation=page.generation, began_s=began_s)

    async def hold(self, rng: random.Random) -> None:
        """Keeps pages held for a while, mostly a short one."""
        await asyncio.sleep(rng.choice((0.0, rng.expovariate(5.0), rng.uniform(0, 4.0))))
        await self.awake()

    async def pages(self, held: Held, extents: StructArray, keys: Sequence[Key]) -> list[Page]:
        """Maps the segments of extents and returns the pages."""
        return [
            Page(
                key,
                await self.segment(held, int(row["tier"]), int(row["segment"])),
                int(row["slot"]),
                int(row["offset"]),
                int(row["length"]),
                int(row["generation"]),
            )
            for row, key in zip(extents, keys, strict=True)
        ]

    async def segment(self, held: Held, tier: int, segment: int) -> Segment:
        """Maps a segment once, as the session socket does."""
        if (tier, segment) not in self.maps:
            work = lambda _assembly: held.daemon.map(tier, segment, session=held.session)  # noqa: E731
            try:
                self.maps[tier, segment] = await self.ask(held, work, timeout_s=1.0)
            except NotFound:
                if (tier, segment) not in self.pending:
                    self.world.fail(f"segment {segment} of tier {tier} cannot be mapped, though pages of it are held")
                raise
        return self.maps[tier, segment]

    # -- puts

    async def put(self, rng: random.Random) -> None:
        """Reserves pages, writes them in two steps, and commits or aborts."""
        held = await self.session()
        with self.using(held):
            wanted = await self.choose(held, rng, whole=False)
            durability, private = rng.choice((Durability.MEMORY, Durability.DURABLE)), rng.random() < 0.2
            reserved = await self.reserve(held, wanted, durability=durability, private=private, kind=self.kind(rng))
            given = np.flatnonzero(reserved.statuses[0] == BlockStatus.RESERVED)
            if reserved.reservation:
                ways = _Commit(wanted, reserved.reservation, given.tolist(), durability, private)
                await self.fill(held, ways, reserved.extents[0][given], rng)

    async def fill(self, held: Held, ways: _Commit, extents: StructArray, rng: random.Random) -> None:
        """Writes reserved pages and commits them, or aborts the reservation."""
        pages: list[Page] = []
        try:
            pages = await self.pages(held, extents, [ways.wanted.key(ways.wanted.first + i) for i in ways.given])
            self.writing += pages
            commit, written = None, asyncio.Event()
            if rng.random() < 0.3:  # the commit begins before the pages are written
                early = replace(ways, written=written)
                commit = self.loop.create_task(self.commit(held, early, rng), context=self.context)
            await self.write(pages, rng)
            self.writing = [page for page in self.writing if page not in pages]  # committed pages are read-only
            self.let_go(held, lambda _assembly: written.set())
            if commit is not None or rng.random() < 0.9:
                await (commit or self.commit(held, ways, rng))
                self.world.puts.append(ways.wanted)
                if rng.random() < 0.4:
                    await held.copies.get(ways.wanted, self.specs[ways.wanted.namespace], rng)
                self.written = [*self.written[-16:], *pages]
                return
        finally:
            self.writing = [page for page in self.writing if page not in pages]
            # A commit ends the reservation; an abort after it is no error.
            self.let_go(held, lambda a: a.cache.abort(held.session, ways.reservation))

    async def reserve(
        self, held: Held, wanted: Blocks, *, durability: Durability, private: bool, kind: TierKind
    ) -> Reserved:
        """Reserves pages. Existing blocks count as acknowledged if the put is durable."""
        request = self.new_request()

        async def work(assembly: Assembly) -> Reserved:
            reserved = await assembly.cache.reserve(
                held.session, [wanted.put(private=private)], kind=kind, durability=durability, timeout_s=1.6
            )
            if durability is Durability.DURABLE:
                exist = np.flatnonzero(reserved.statuses[0] == BlockStatus.EXISTS)
                self.world.acknowledge(assembly, [wanted.key(wanted.first + i) for i in exist.tolist()])
            call = held.session, request
            numbers = [reserved.reservation] if reserved.reservation else []
            return held.daemon.grants.give(call, reserved, reservations=numbers)

        return await self.ask(held, work, timeout_s=2.0, request=request)

    async def write(self, pages: Sequence[Page], rng: random.Random) -> None:
        """Writes in two steps. The daemon may die in the pause between them."""
        for page in pages:
            page.write(0, page.length // 2)
        await self.hold(rng)
        for page in pages:
            page.write(page.length // 2, page.length)

    async def commit(self, held: Held, ways: _Commit, rng: random.Random) -> None:
        """Commits at once or in two parts, with or without a lease."""
        parts, timeout_s = [ways.given], rng.choice((0.5, 2.0, 5.0))
        if len(ways.given) > 1 and rng.random() < 0.3:
            cut = rng.randrange(1, len(ways.given))
            parts = [ways.given[:cut], ways.given[cut:]]
        for number, part in enumerate(parts):
            is_last, lease = number == len(parts) - 1, rng.random() < 0.4
            named = ways.wanted.named(part) if ways.private or len(parts) > 1 else None
            began_s = self.loop.time()
            committed = await self._commit(held, ways, _Part(part, named, lease, is_last), timeout_s=timeout_s)
            if committed.lease:
                keys = [ways.wanted.key(ways.wanted.first + i) for i in part]
                await self.read_committed(held, committed, keys, began_s)

    async def _commit(self, held: Held, ways: _Commit, part: _Part, *, timeout_s: float) -> Committed:
        request, keys = self.new_request(), [ways.wanted.key(ways.wanted.first + i) for i in part.given]
        sums = self.sums(ways, part.given)
        self.world.oracle.commit_begins(keys)

        async def written() -> bytes:
            assert ways.written is not None
            while not ways.written.is_set():
                if self.loop.is_ended(self.life):
                    raise SessionLost("line: its client has gone before its pages were written")
                await asyncio.sleep(0.01)
            return sums

        began_s = self.loop.time()

        async def work(assembly: Assembly) -> Committed:
            query = CommitQuery(
                ways.reservation,
                part.named,
                ways.durability,
                lease=part.lease,
                keep_open=not part.is_last,
                sums=sums,
                written=written if ways.written is not None else None,
            )
            committed = await assembly.cache.commit(held.session, query, deadline=self.loop.time() + timeout_s)
            if part.lease:  # a hit on the blocks that existed
                theirs = np.flatnonzero(committed.statuses == BlockStatus.EXISTS)
                self.world.oracle.hit([keys[i] for i in theirs.tolist()], began_s)
            if ways.durability is Durability.DURABLE:
                good = np.isin(committed.statuses, (BlockStatus.READY, BlockStatus.EXISTS))
                self.world.acknowledge(assembly, [key for key, ok in zip(keys, good.tolist(), strict=True) if ok])
            return held.daemon.grants.give((held.session, request), committed, lease=committed.lease)

        return await self.ask(held, work, timeout_s=timeout_s, request=request)

    def sums(self, ways: _Commit, given: Sequence[int]) -> bytes:
        """Sums of the bytes to write, as the SDK's. One put in four has none, like an in-place
        writer."""
        if ways.reservation % 4 == 0:
            return b""
        numbers, layers = [ways.wanted.first + i for i in given], self.world.machine.layers
        blocks = [bytes_of(ways.wanted.key(number), ways.wanted.length(number)) for number in numbers]
        sums = b"".join(raw_tables([slice_sums(block, slice_lengths(len(block), layers)) for block in blocks]))
        if self.lies:
            self.lies -= 1
            self.world.happenings.struck["client_lies"] += 1
            return bytes([sums[0] ^ 1]) + sums[1:]
        return sums

    async def read_committed(self, held: Held, committed: Committed, keys: list[Key], began_s: float) -> None:
        """Reads the pages of a commit's lease, perhaps another writer's, and releases the lease."""
        good = np.flatnonzero(committed.extents["page"] >= 0)
        try:
            pages = await self.pages(held, committed.extents[good], [keys[i] for i in good.tolist()])
            self.read(pages, began_s)
        finally:
            self.let_go(held, lambda a: a.cache.release(held.session, [committed.lease]))

    # -- releases

    def let_go(self, held: Held, work: Callable[[Assembly], object]) -> None:
        """Sends the release to the daemon that granted it, if that life still serves."""
        if self.loop.is_ended():
            return
        if held.daemon is self.world.daemon and held.daemon.is_serving:
            held.daemon.post(lambda: work(held.daemon.assembly))

    @contextmanager
    def using(self, held: Held) -> Iterator[None]:
        """Marks the session as in use."""
        held.uses += 1
        try:
            yield
        finally:
            held.uses -= 1
            self.forget(held)

    def forget(self, held: Held) -> None:
        """After a restart: ends the former session once its last page is unused."""
        daemon = self.world.daemon
        if held.uses or daemon is None or daemon is held.daemon or not daemon.is_serving or self.loop.is_ended():
            return
        daemon.post(daemon.forget, held.session)

    async def leave(self, rng: random.Random) -> None:
        """Ends the session of a process that lives on, if nothing of it is in use."""
        held = self._held
        if held is None or held.uses or held.daemon is not self.world.daemon or held.has_left:
            return
        held.has_left = True
        held.daemon.post(held.daemon.assembly.cache.leave_session, held.session)

    # -- random choices

    def kind(self, rng: random.Random) -> TierKind:
        """Mostly host memory."""
        return TierKind.DEVICE if self.world.machine.device_segments and rng.random() < 0.3 else TierKind.HOST

    def new_request(self) -> str:
        """A name for a call."""
        self._requests += 1
        return f"{self.pid}.{self._requests}"


@dataclass(frozen=True, slots=True)
class _Commit:
    """A commit. given: indices in the reservation. written: set once the pages are written."""

    wanted: Blocks
    reservation: int
    given: list[int]
    durability: Durability
    private: bool
    written: asyncio.Event | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """One call of a commit."""

    given: list[int]
    named: StructArray | None
    lease: bool
    is_last: bool
