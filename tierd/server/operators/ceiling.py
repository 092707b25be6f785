"""The online ceiling: the hit ratio that other sizes of memory would give, for operators.

It passes the clients' requests to the estimator (tierd/ceiling), whose work it cuts into pieces on
the event loop. It also tells the estimator how many blocks the tiers hold. No call waits for it. A
fault of the estimate ends the estimate, and nothing else. If an operator gives a tier another size,
policy or watermark, the estimate begins anew.

A request is a lookup, or an acquire without one. Engines look a prompt up, then acquire what was
found. So an acquire within LOOKUP_S of a lookup with the same first block belongs to that lookup.
Of several ranks and attention groups the first one stands for the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import structlog
from prometheus_client import Counter

from tierd._proto import admin_pb2 as pb
from tierd.ceiling.estimator import FACTORS, LEAST_HELD, LEAST_SAMPLED, Estimator, Level, Shares
from tierd.core.formats.block import size_class
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.plan import GroupQuery, TierStats
from tierd.server.assembly import Assembly

log = structlog.get_logger(__name__)

TICK_S = 15.0
"""Interval of resizes and of gauges. Requests that wait are counted then, even if they are few."""
LOOKUP_S = 60.0
DELAY_S = 0.2
CALLS, BLOCKS = 128, 8192
"""Calls wait together for so long, or until they or their blocks are so many."""
QUEUE_BLOCKS = 1 << 17
"""Blocks of the calls that wait at most, 32 bytes each. Calls beyond it are left out and counted."""
SMOOTHED = 16
"""The pages of a block are averaged over so many looks at the calls."""
LOOKUPS = 4096
"""Lookups that may wait for their acquire."""


class _Call(NamedTuple):
    """A client's call, and its arrival on the daemon's clock."""

    at_s: float
    groups: Sequence[GroupQuery]
    is_lookup: bool


class Lookups:
    """The lookups whose acquire is yet to come, by the hash of their first block."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, tuple[int, float]] = {}

    def is_request(self, first: bytes, now: float, *, is_lookup: bool) -> bool:
        """Whether a call is a request of its own. first: the hash of its first block."""
        count, at_s = self._waiting.pop(first, (0, now))
        if now - at_s > LOOKUP_S:
            count = 0
        left = count + 1 if is_lookup else count - 1
        if left > 0:
            self._waiting[first] = (left, now if is_lookup else at_s)
            if len(self._waiting) > LOOKUPS:
                del self._waiting[next(iter(self._waiting))]
        return is_lookup or not count


class Ceiling:
    """One per daemon, on its event loop."""

    def __init__(self, daemon: Assembly) -> None:
        self._cache, self._metrics = daemon.cache, daemon.metrics
        self._tiers, self._policies = daemon.tiers, daemon.policies
        self._lookups, self._trouble = Lookups(), ""
        self._calls, self._blocks, self._lost = list[_Call](), 0, 0
        self._page_bytes, self._pages_per_block = 0, 1.0
        self._hit = self._asked = 0
        self._turn = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begin_estimate(self._limits())

    def start(self) -> None:
        """Starts the refresh."""
        self._task = asyncio.create_task(self._refresh_for_ever())

    def stop(self) -> None:
        """Stops all work."""
        for each in (self._timer, self._task, self._working):
            if each:
                each.cancel()

    def note(self, groups: Sequence[GroupQuery], *, is_lookup: bool) -> None:
        """A client has made this call. It is looked at later, with others: that costs a tenth."""
        count = len(groups[0].hashes)
        if self._trouble or not count:
            return
        if self._blocks + count > QUEUE_BLOCKS:
            self._lost += 1
            return
        self._blocks += count
        self._calls.append(_Call(self._cache.clock.now(), groups, is_lookup))
        if len(self._calls) == 1:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._begin)
        elif len(self._calls) >= CALLS or self._blocks >= BLOCKS:
            self._begin()

    async def reply(self) -> pb.CeilingReply:
        """The estimate, with all calls so far."""
        await self._work(to_end=True)
        self._set_gauges()
        trouble = self._trouble or self._too_few()
        windows = [] if self._trouble else self._estimator.shares(self._cache.clock.now())
        return pb.CeilingReply(
            windows=[self._window(window, has_points=not trouble) for window in windows],
            bytes=self._estimator.bytes,
            trouble=trouble,
            rate=self._estimator.rate,
            lost=self._lost,
        )

    # -- inside

    def _limits(self) -> list[tuple[Level, int]]:
        """The assumptions of the estimate about each tier."""
        return [(level_of(tier.spec), tier.spec.capacity_bytes - tier.spec.headroom_bytes) for tier in self._tiers]

    def _begin_estimate(self, limits: list[tuple[Level, int]]) -> None:
        tiers = sorted((tier.spec for tier in self._tiers), key=lambda spec: spec.distance)
        self._levels = [list(specs) for _, specs in itertools.groupby(tiers, key=lambda spec: spec.distance)]
        levels, now = [level_of(specs[0]) for specs in self._levels], self._cache.clock.now()
        self._estimator, self._estimated = Estimator(levels, self._policies.traffic, now), limits
        self._held: dict[str, int] = {}
        """The most pages that each tier has held."""
        self._evicted = {stats.name: stats.evictions for stats in self._cache.core.tier_stats()}
        self._resize()

    def _begin(self) -> None:
        if self._working is None or self._working.done():
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self, *, to_end: bool = False) -> None:
        """Works on the calls that wait, in whole batches or to the end. Other tasks of the loop run
        between two steps."""
        async with self._turn:
            with self._guarded():
                if (limits := self._limits()) != self._estimated:
                    self._begin_estimate(limits)
                self._pass_on()
                while not self._trouble and (self._estimator.is_due or to_end):
                    for _ in self._estimator.steps(self._cache.clock.now()):
                        await asyncio.sleep(0)
                    self._count_measured()
                    to_end = to_end and self._estimator.waits

    def _pass_on(self) -> None:
        """Tells the estimator of the requests among the calls that wait."""
        calls, self._calls, self._blocks = self._calls, [], 0
        found = [call for call in calls if self._is_request(call)]
        if found:
            self._learn_sizes(found[-1].groups)
            self._estimator.ask([call.groups[0] for call in found], [call.at_s for call in found])

    def _is_request(self, call: _Call) -> bool:
        group = call.groups[0]
        if self._cache.registry.get(group.namespaces[0]).id not in group.namespaces:
            return False
        return self._lookups.is_request(group.hashes[0].tobytes(), call.at_s, is_lookup=call.is_lookup)

    def _learn_sizes(self, groups: Sequence[GroupQuery]) -> None:
        """Counts the pages of a block of the first group: one for each rank and group."""
        spec = self._cache.registry.get(groups[0].namespaces[0]).spec
        pages = sum(len(group.hashes) for group in groups) * spec.rank_count / len(groups[0].hashes)
        if not self._page_bytes:
            self._page_bytes, self._pages_per_block = size_class(spec.block_bytes), pages
            self._resize()
        self._pages_per_block += (pages - self._pages_per_block) / SMOOTHED

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A fault in here ends the estimate."""
        try:
            yield
        except Exception as error:
            log.exception("the ceiling is no longer estimated")
            self._trouble = f"internal fault ({error!r:.200}); see the daemon's log"

    async def _refresh_for_ever(self) -> None:
        while not self._trouble:
            await asyncio.sleep(TICK_S)
            await self._work(to_end=True)
            async with self._turn:
                with self._guarded():
                    self._resize()
                    self._set_gauges()

    def _resize(self) -> None:
        """Tells the estimator how many blocks the tiers hold."""
        stats = {stats.name: stats for stats in self._cache.core.tier_stats()}
        for name, tier in stats.items():
            self._held[name] = max(self._held.get(name, 0), _pages(tier))
        if self._page_bytes:
            sizes = [sum(self._holds(spec, stats[spec.name]) for spec in specs) for specs in self._levels]
            self._estimator.resize([size / self._pages_per_block for size in sizes])

    def _holds(self, spec: TierSpec, stats: TierStats) -> float:
        """Pages that a tier holds when it is full. Once it has evicted as many, what it held shows
        also the space that size classes waste."""
        held = self._held[spec.name]
        if stats.evictions - self._evicted[spec.name] > held:
            return held
        page = stats.used_bytes / _pages(stats) if _pages(stats) else self._page_bytes + spec.slot_overhead_bytes
        return max(held, (spec.capacity_bytes - spec.headroom_bytes) / page)

    def _count_measured(self) -> None:
        hit = _total(self._metrics.tokens_hit)
        asked = hit + _total(self._metrics.tokens_missed)
        self._estimator.measured(hit - self._hit, asked - self._asked, self._cache.clock.now())
        self._hit, self._asked = hit, asked

    def _too_few(self) -> str:
        held, is_sampled = self._estimator.held, self._estimator.rate < 1
        least = LEAST_SAMPLED if is_sampled else LEAST_HELD
        if not self._page_bytes or held >= least:
            return ""
        return (
            f"memory and stores hold {held:.0f} {'sampled ' if is_sampled else ''}blocks, an estimate needs {least}: they "
            "are small for so many requests; record these, and use `tierctl simulate`"
        )

    def _bytes(self, factor: float) -> int:
        """Memory and stores at a factor; 0: without limit."""
        whole = sum(spec.capacity_bytes for specs in self._levels for spec in specs if spec.kind != TierKind.DEVICE)
        return 0 if math.isinf(factor) else int(whole * factor)

    def _window(self, shares: Shares, *, has_points: bool) -> pb.CeilingWindow:
        points = zip(FACTORS, shares.by_factor, strict=False) if has_points else ()
        return pb.CeilingWindow(
            seconds=shares.seconds,
            covered_s=shares.covered_s,
            tokens=shares.tokens,
            hit_ratio=shares.measured,
            points=[
                pb.CeilingPoint(factor=0 if math.isinf(f) else f, bytes=self._bytes(f), hit_ratio=share)
                for f, share in points
            ],
        )

    def _set_gauges(self) -> None:
        gauge = self._metrics.ceiling
        if self._too_few():
            gauge.clear()
            return
        for window in self._estimator.shares(self._cache.clock.now()):
            for factor, share in zip(FACTORS, window.by_factor, strict=False):
                gauge.labels(window=f"{window.seconds:.0f}", factor=f"{factor:g}").set(share)


def level_of(spec: TierSpec) -> Level:
    """The level of a tier, and of those at its distance."""
    copied = 1 - (spec.high_watermark + spec.low_watermark) / 2
    is_store, by_worth = spec.kind is TierKind.NVME, spec.eviction == "reuse-index"
    return Level(is_store, by_worth, grows=spec.kind is not TierKind.DEVICE, copied=copied)


def _pages(stats: TierStats) -> int:
    return stats.pages_reserved + stats.pages_ready + stats.pages_retiring


def _total(counter: Counter) -> int:
    return sum(
        int(sample.value) for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")
    )
