"""The advisor against always loading and always computing, in a simulated engine.

    python -m tools.bench advice

A link reads prefixes in order, at a bandwidth and a latency. An engine computes requests in order.
Times vary at random. The advisor sees finished transfers and steps, and the lengths of the queues.
Figures are means of the time to first token. The limit is the better of the two fixed choices.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tierd.advisor.advice import Run, Wanted, advise
from tierd.advisor.pace import FIRST_PACE, Pace, PaceMeter
from tierd.advisor.prefill import Prefill, pairs
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of

BLOCK = 16
KV_BYTES = 131_072.0
"""Of a token, as Llama-3-8B has them."""
STEP_TOKENS = 8192
BATCH_BYTES = 128 << 20
"""Of a transfer that the daemon measures."""
NOISE = 0.1
H100_S = (3e-3, 3.3e-5, 5e-10)
"""Seconds of a step, a token and a pair: 8B at some 30,000 tokens a second for short prompts."""


@dataclass(frozen=True, slots=True)
class Request:
    """at_s: its arrival. prefix: stored tokens. prompt: all of its tokens. tier: where they are."""

    at_s: float
    prefix: int
    prompt: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """bandwidths: bytes per second of each tier, read when a transfer begins. rate: of the engine,
    as a multiple of H100_S."""

    bandwidths: Callable[[float], Sequence[float]]
    latency_s: float = 1e-3
    rate: float = 1.0
    seed: int = 0

    def prefill_s(self, start: float, tokens: float) -> float:
        """True seconds to compute tokens after `start` others."""
        base, each, pair = H100_S
        steps = -(-tokens // STEP_TOKENS)
        return (base * steps + each * tokens + pair * float(pairs(start, tokens))) / self.rate


@dataclass(slots=True)
class Link:
    """A tier's queue, as the daemon sees it."""

    meter: PaceMeter = field(default_factory=PaceMeter)
    free_s: float = 0.0
    queued: float = 0.0
    """Bytes of transfers under way."""
    since: float = 0.0
    """Last end of a transfer, or begin of the first."""

    def pace(self, now: float) -> Pace:
        """With the wait of a transfer that begins now."""
        is_busy = self.queued >= 1
        pace = self.meter.pace(0.0 if is_busy else now - self.since) or FIRST_PACE
        return pace.after(self.queued, since_s=now - self.since) if is_busy else pace


Choice = Callable[["Engine", Request], int]
"""Tokens of a request's prefix to load."""


class Engine:
    """One engine over some tiers. It computes requests in the order in which their loads end. now:
    of the latest event."""

    def __init__(self, world: World, tiers: int) -> None:
        self.world, self.prefill, self.now = world, Prefill(), 0.0
        self.links = [Link() for _ in range(tiers)]
        self.ended = list[tuple[float, float]]()
        self._ready: deque[tuple[Request, int]] = deque()
        self._until, self._is_busy = 0.0, False
        self._chance = np.random.default_rng(world.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    @property
    def wait_s(self) -> float:
        """Expected seconds until a request that is ready now would be computed."""
        queued = [self.prefill.seconds(*map(np.float64, _part(*each))) for each in self._ready]
        return max(0.0, self._until - self.now) * self._is_busy + float(sum(queued))

    def run(self, requests: Sequence[Request], choose: Choice) -> np.ndarray:
        """Seconds from arrival to first token, in the order of arrivals: float64 [n]."""
        for request in requests:
            self._at(request.at_s, partial(self._arrived, request, choose))
        while self._events:
            self.now, _, work = heapq.heappop(self._events)
            work()
        return np.array([seconds for _, seconds in sorted(self.ended)])

    def _arrived(self, request: Request, choose: Choice) -> None:
        loaded = choose(self, request)
        if loaded:
            self._load(request, loaded)
        else:
            self._compute(request, 0)

    def _load(self, request: Request, tokens: int) -> None:
        link, size = self.links[request.tier], tokens * KV_BYTES
        begin = max(self.now, link.free_s)
        if not link.queued:
            link.since = self.now
        spent = (self.world.latency_s + size / self.world.bandwidths(begin)[request.tier]) * self._noise()
        link.free_s = begin + spent
        pieces = max(1, int(size // BATCH_BYTES))
        for i in range(1, pieces + 1):
            link.queued += size / pieces
            self._at(begin + spent * i / pieces, partial(self._moved, link, size / pieces, spent / pieces))
        self._at(link.free_s, partial(self._compute, request, tokens))

    def _moved(self, link: Link, size: float, seconds: float) -> None:
        link.meter.observe(int(size), seconds)
        link.since, link.queued = self.now, max(0.0, link.queued - size)

    def _compute(self, request: Request, loaded: int) -> None:
        self._ready.append((request, loaded))
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        self._is_busy = bool(self._ready)
        if self._ready:
            request, loaded = self._ready.popleft()
            part = _part(request, loaded)
            spent = self.world.prefill_s(*part) * self._noise()
            self._until = self.now + spent
            self._at(self._until, partial(self._computed, request, part, spent))

    def _computed(self, request: Request, part: tuple[int, int], spent: float) -> None:
        self.prefill.observe([part], spent)
        self.ended.append((request.at_s, self.now - request.at_s))
        self._step()

    def _at(self, at: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._count), work))

    def _noise(self) -> float:
        return float(np.exp(self._chance.normal(0.0, NOISE)))


def _part(request: Request, loaded: int) -> tuple[int, int]:
    """The tokens to compute: after how many others, and how many."""
    return loaded, request.prompt - loaded


def load_all(_: Engine, request: Request) -> int:
    """Always loads."""
    return min(request.prefix, request.prompt - 1) // BLOCK * BLOCK


def load_none(_: Engine, __: Request) -> int:
    """Always computes."""
    return 0


def advised(engine: Engine, request: Request) -> int:
    """The advisor's choice."""
    wanted = Wanted(request.prompt, 0, BLOCK, KV_BYTES, engine.wait_s)
    run = Run(request.prefix, engine.links[request.tier].pace(engine.now))
    return advise(wanted, [run], engine.prefill).tokens


CHOICES: dict[str, Choice] = {"all": load_all, "none": load_none, "advised": advised}


def arrivals(world: World, *, prefix: int, load: float, count: int) -> Iterator[Request]:
    """Requests with a prefix of about so many tokens and a tail of a quarter. An engine that loads
    nothing is busy for a share `load` of the time."""
    chance = np.random.default_rng(world.seed + 1)
    mean = world.prefill_s(0, 1.25 * prefix) / load
    at = 0.0
    for _ in range(count):
        at += chance.exponential(mean)
        tokens = max(BLOCK, int(prefix * chance.uniform(0.5, 1.5)))
        yield Request(at, tokens, tokens + max(1, tokens // 4))


def compared(world: World, requests: Sequence[Request], *, tiers: int = 1, skip: int = 0) -> dict[str, float]:
    """Mean seconds to the first token of each choice, without the first requests."""
    return {name: float(Engine(world, tiers).run(requests, choose)[skip:].mean()) for name, choose in CHOICES.items()}


BANDWIDTHS, PREFIXES, RATES, LOADS = (25e9, 7e9, 2e9, 5e8), (1024, 8192, 32768), (0.2, 1.0), (0.1, 0.5, 0.8)
LEARNING = 30
"""Requests that are not counted: the advisor begins without knowledge."""


POINTS = {
    f"advice_{width / 1e9:g}GBps_{prefix}_x{rate:g}_load{load:g}": (width, prefix, rate, load)
    for width, prefix, rate, load in itertools.product(BANDWIDTHS, PREFIXES, RATES, LOADS)
}


def grid(*, count: int) -> Iterator[tuple[str, float, float]]:
    """(name, advised, better of the others) of each point, in seconds."""
    for name, (width, prefix, rate, load) in POINTS.items():
        world = World(lambda _, width=width: (width,), rate=rate)
        found = compared(world, list(arrivals(world, prefix=prefix, load=load, count=count)), skip=LEARNING)
        yield name, found["advised"], min(found["all"], found["none"])


def mixed(*, count: int, seed: int = 0) -> dict[str, float]:
    """A trace with prefixes of 256 to 64 K tokens in tiers of four speeds."""
    world, chance = World(lambda _: BANDWIDTHS, seed=seed), np.random.default_rng(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += chance.exponential(0.4)
        tokens = int(256 * 2 ** chance.uniform(0, 8))
        requests.append(Request(at, tokens, tokens + max(1, tokens // 4), int(chance.integers(len(BANDWIDTHS)))))
    return compared(world, requests, tiers=len(BANDWIDTHS), skip=LEARNING)


def slowed(*, count: int = 600, seed: int = 0, at_s: float = 20.0) -> dict[str, np.ndarray]:
    """A tier that becomes ten times slower: [arrival, seconds to the first token] of each choice."""
    world = World(lambda now: (25e9 if now < at_s else 2.5e8,), seed=seed)
    requests = list(arrivals(world, prefix=8192, load=0.5, count=count))
    out = {}
    for name, choose in CHOICES.items():
        engine = Engine(world, 1)
        engine.run(requests, choose)
        out[name] = np.array(sorted(engine.ended))
    return out


def rows(effort: Effort) -> list[Row]:
    """A row for each point of the grid, and one for the mixed trace."""
    count = effort.pick(400, 80)
    meaning = "mean time to first token; limit: the better of always loading and always computing"
    found = [
        row_of(name, [value], unit="s", limits=[limit], meaning=meaning) for name, value, limit in grid(count=count)
    ]
    trace = mixed(count=effort.pick(2000, 200))
    limit = min(trace["all"], trace["none"])
    return [*found, row_of("advice_mixed", [trace["advised"]], unit="s", limits=[limit], meaning=meaning)]
