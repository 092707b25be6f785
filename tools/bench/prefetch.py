"""Prefetches in a simulated node: what is staged before it is asked for, and what was wasted.

    python -m tools.bench.prefetch [TRACE.jsonl.gz ...]

The core, its policies, the ledger of prefetches and what begins them are the daemon's own. Time,
one link from NVMe and one engine are simulated. Requests arrive as in the trace, wait for the
engine in order, and then ask for their blocks. The trace's time is scaled so that the engine is
busy for a stated share of it. A turn comes when the turn before it was answered, or later. A
request whose blocks are under way lets the next one pass.

Staged: of the tokens that lay on NVMe when their request arrived, those that lie in host memory
when the engine asks for them. The bound: what the link could have read for each request alone while
it queued. Wasted: of the bytes that prefetches brought.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tierd.advisor.prefill import pairs
from tierd.cache.prefetcher import Prefetcher
from tierd.cache.prefetches import Ledger, Order
from tierd.cli.trace import read_trace
from tierd.core.core import Core
from tierd.core.formats.model import BlockStatus, Reason, StructArray, TierKind, TierSpec
from tierd.core.instant_driver import DIGEST_BYTES
from tierd.core.plan import Acquisition, Allowance, Plan, PutQuery
from tierd.metrics import Metrics
from tierd.policies.named import NamedPolicies
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tools.bench.advice import H100_S, STEP_TOKENS
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
PAGE = 4096
"""Bytes of a simulated block; it stands for TOKEN_BYTES a token."""
TOKEN_BYTES = 128 << 10
"""Of Llama-3-8B."""
DRIVE_BYTES_PER_S = 7e9
HOST_SHARE, HOST_LONGEST = 0.05, 4
"""Host memory: a share of the trace's distinct blocks, but so many of its longest requests, and
HOST_DEVICE times the engine's memory. NVMe holds all blocks."""
HOST_DEVICE = 1.5
"""If the engine pins all of it, demand evicts what prefetches brought."""
DEVICE_TOKENS = 480_000
"""In an H100's memory beside the weights. The engine asks for no more at one time."""
PREFETCH_SHARE = 0.5
"""`mover.prefetch_share`."""
BATCH_TOKENS = 4096
"""In one read: half a GiB."""
TTL_S = 600.0
"""Time in which a get should use what a lookup's prefetch brings."""
SESSION, HOST, NVME = 1, 0, 1


@dataclass
class Timer:
    """A timer of the simulation."""

    work: Callable[[], object] | None

    def cancel(self) -> None:
        """It does nothing any more."""
        self.work = None


class Clock:
    """Virtual time, as predictions want it of a loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()

    def time(self) -> float:
        """Seconds."""
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back once, unless cancelled."""
        timer = Timer(partial(callback, *args))
        heapq.heappush(self._events, (self.now + delay, next(self._count), timer))
        return timer

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self.now, _, timer = heapq.heappop(self._events)
            if timer.work is not None:
                timer.work()


@dataclass
class Link:
    """Reads from NVMe, one batch at a time, demand first. read: called with a batch when it ends."""

    clock: Clock
    read: Callable[[StructArray], None]
    block_s: float
    batch: int
    queues: tuple[deque[StructArray], deque[StructArray]] = field(default_factory=lambda: (deque(), deque()))
    is_busy: bool = False

    def add(self, transfers: StructArray) -> None:
        """Queues transfers of one plan."""
        is_demand = transfers["reason"] != Reason.PREFETCH
        for queue, some in zip(self.queues, (transfers[is_demand], transfers[~is_demand]), strict=True):
            queue.extend(some[i : i + self.batch] for i in range(0, len(some), self.batch))
        self._next()

    def want(self, ids: Sequence[int]) -> None:
        """A get waits for these: they go ahead, as in `tierd.cache.prefetches.Turns`."""
        wanted = set(ids)
        ahead = [batch for batch in self.queues[1] if not wanted.isdisjoint(batch["id"].tolist())]
        kept = [batch for batch in self.queues[1] if wanted.isdisjoint(batch["id"].tolist())]
        self.queues[0].extend(ahead)
        self.queues[1].clear()
        self.queues[1].extend(kept)

    def _next(self) -> None:
        queue = self.queues[0] or self.queues[1]
        if not self.is_busy and queue:
            self.is_busy, batch = True, queue.popleft()
            self.clock.call_later(self.block_s * len(batch), self._ended, batch)

    def _ended(self, batch: StructArray) -> None:
        self.is_busy = False
        self.read(batch)
        self._next()


@dataclass
class Figures:
    """far: blocks on NVMe at arrival. staged: of these, near when asked for. bound: see the module.

    waits_s: from asking until all was loaded. used, wasted: bytes of prefetches.
    """

    far: int = 0
    bound: float = 0.0
    staged: int = 0
    waits_s: list[float] = field(default_factory=list)
    used: int = 0
    wasted: int = 0

    @property
    def staged_share(self) -> float:
        """Per cent."""
        return 100.0 * self.staged / max(1, self.far)

    @property
    def bound_share(self) -> float:
        """Per cent: no prefetch on arrival can stage more."""
        return 100.0 * self.bound / max(1, self.far)

    @property
    def wasted_share(self) -> float:
        """Per cent of the bytes that prefetches brought."""
        return 100.0 * self.wasted / max(1, self.used + self.wasted)


class Node:
    """A daemon and its engine, an H100. prefetches: on arrival."""

    def __init__(self, trace: Trace, *, prefetches: bool = True, drives: int = 1) -> None:
        self._trace, self._prefetches = trace, prefetches
        self._measure = Measure(PAGE, whole=True)
        self.clock, self.figures, self.metrics = Clock(), Figures(), Metrics()
        self.core = Core(specs(trace), policies=NamedPolicies(), session_share=1.0)
        self.core.open_session(SESSION, domain=1)
        self.ledger = Ledger(self.metrics, now=self.clock.time, next_id=self.core.next_id)
        self.ledger.let_go = self._let_go
        tokens = int(trace.full_tokens[0])
        self.link = Link(
            self.clock, self._read, tokens * TOKEN_BYTES / (drives * DRIVE_BYTES_PER_S), max(1, BATCH_TOKENS // tokens)
        )
        most = int(PREFETCH_SHARE * specs(trace)[HOST].capacity_bytes)
        self.prefetcher = Prefetcher(
            self.core,
            self.ledger,
            allow=lambda _session, _kind: Allowance(bytes=most - self.ledger.staged[HOST]),
            carry_out=lambda plan, _session: self._carry_out(plan),
            now=self.clock.time,
        )
        self._waiting: deque[tuple[int, np.ndarray, float]] = deque()
        self._ready: deque[tuple[int, Acquisition]] = deque()
        self._loading: list[tuple[set[int], int, Acquisition, float]] = []
        self._is_busy = False
        self._device_tokens = 0
        self._followers: defaultdict[int, list[int]] = defaultdict(list)

    def run(self) -> Figures:
        """Serves the whole trace."""
        for number, former in enumerate(predecessors(self._trace)):
            if former < 0:
                self.clock.call_later(float(self._trace.times_s[number]), self._arrived, number)
            else:
                self._followers[former].append(number)
        self.clock.run()
        self.clock.now += 1e6
        self.ledger.expire()
        for name, count in self.metrics.counters().items():
            if name.startswith("tierd_prefetched_bytes_total"):
                self.figures.used += count * ('"used"' in name)
                self.figures.wasted += count * ('"wasted"' in name)
        return self.figures

    def _let_go(self, session: int, lease: int) -> None:
        self._carry_out(self.core.release(session, leases=[lease], now=self.clock.now))

    # -- a request

    def _arrived(self, number: int) -> None:
        group = self._trace.sequence(number, self._measure).group()
        found = self.core.lookup([group], now=self.clock.now)
        held = -(-found.tokens // group.tokens_per_block)
        far = np.flatnonzero(found.tier_of[0][0][:held] == NVME)
        if len(far) and self._prefetches:
            self.prefetcher.begin(SESSION, [group], TierKind.HOST, Order("lookup", ttl_s=TTL_S))
        self._waiting.append((number, far, self.clock.now))
        self._next()

    def _next(self) -> None:
        """The engine computes what is ready; if nothing is, it asks for the blocks of the next."""
        while not self._is_busy and (self._ready or self._waiting):
            if self._ready:
                self._compute(*self._ready.popleft())
            elif self._device_tokens and self._device_tokens + self._trace.tokens[self._waiting[0][0]] > DEVICE_TOKENS:
                return
            else:
                self._ask(*self._waiting.popleft())

    def _ask(self, number: int, far: np.ndarray, since_s: float) -> None:
        group, now = self._trace.sequence(number, self._measure).group(), self.clock.now
        tier_of = self.core.lookup([group], now=now).tier_of[0][0]
        self._device_tokens += int(self._trace.tokens[number])
        self.figures.far += len(far)
        self.figures.bound += min(len(far), (now - since_s) / self.link.block_s)
        self.figures.staged += int((tier_of[far] == HOST).sum())
        self.prefetcher.asked([group])
        got = self.core.acquire(SESSION, groups=[group], kind=TierKind.HOST, now=now)
        self._carry_out(got.plan)
        if not got.whole and self.ledger.yield_room():
            self._let_go(SESSION, got.lease)
            got = self.core.acquire_again(SESSION, got.question, now=now)
            self._carry_out(got.plan)
        ids = {*got.plan.transfers["id"].tolist(), *got.plan.waits.tolist()}
        self.link.want(got.plan.waits.tolist())
        if ids:
            self._loading.append((ids, number, got, now))
        else:
            self._ready.append((number, got))

    def _compute(self, number: int, got: Acquisition) -> None:
        served = self.core.settle(got.lease, now=self.clock.now) if got.lease else None
        if served is not None:
            self._carry_out(served.plan)
            self.ledger.use(served.extents["generation"].tolist())
            self.prefetcher.resume()
        tokens = served.tokens if served else 0
        self._is_busy = True
        spent = prefill_s(tokens, int(self._trace.tokens[number]) - tokens)
        self.clock.call_later(spent, self._computed, number, got.lease, tokens)

    def _computed(self, number: int, lease: int, tokens: int) -> None:
        sequence, now = self._trace.sequence(number, self._measure), self.clock.now
        first = tokens // sequence.tokens_per_block
        leases = [
            each for each in (lease, self._put(sequence.put(first)) if first < len(sequence.hashes) else 0) if each
        ]
        self._carry_out(self.core.release(SESSION, leases=leases, now=now))
        while not (plan := self.core.demote(now)).is_empty:
            self._carry_out(plan)
        for follower in self._followers[number]:
            self.clock.call_later(max(0.0, float(self._trace.times_s[follower]) - now), self._arrived, follower)
        self._is_busy = False
        self._device_tokens -= int(self._trace.tokens[number])
        self._next()

    def _put(self, query: PutQuery) -> int:
        reserved = self.core.reserve(SESSION, groups=[query], kind=TierKind.HOST, now=self.clock.now)
        self._carry_out(reserved.plan)
        if (reserved.statuses[0] == BlockStatus.NO_ROOM).any() and self.ledger.yield_room():
            self._carry_out(self.core.abort(SESSION, reservation=reserved.reservation, now=self.clock.now))
            reserved = self.core.reserve(SESSION, groups=[query], kind=TierKind.HOST, now=self.clock.now)
            self._carry_out(reserved.plan)
        if not reserved.reservation:
            return 0
        now = self.clock.now
        begun = self.core.begin_commit(SESSION, reservation=reserved.reservation, blocks=None, now=now)
        count = len(begun.extents)
        digests, ok = np.zeros((count, DIGEST_BYTES), np.uint8), np.ones(count, np.bool_)
        done = self.core.finish_commit(begun, digests=digests, ok=ok, lease=True, keep_open=False, now=now)
        self._carry_out(done.plan)
        return done.lease

    # -- plans

    def _carry_out(self, plan: Plan) -> None:
        """Reads go over the link, writes to NVMe succeed at once."""
        self.ledger.free(plan.freed)
        if len(plan.transfers):
            is_read = plan.transfers["source"]["tier"] == NVME
            self.link.add(plan.transfers[is_read])
            self._finish(plan.transfers[~is_read])

    def _read(self, batch: StructArray) -> None:
        self._finish(batch)
        ended, still = set(batch["id"].tolist()), []
        for ids, number, got, since_s in self._loading:
            ids.difference_update(ended)
            if ids:
                still.append((ids, number, got, since_s))
            else:
                self.figures.waits_s.append(self.clock.now - since_s)
                self._ready.append((number, got))
        self._loading = still
        self._next()

    def _finish(self, transfers: StructArray) -> None:
        if len(transfers):
            statuses = np.full(len(transfers), BlockStatus.READY, np.uint16)
            self._carry_out(self.core.finish(transfers["id"], statuses=statuses, now=self.clock.now))


def specs(trace: Trace) -> Sequence[TierSpec]:
    """The tiers of its size."""
    device = DEVICE_TOKENS // int(trace.full_tokens[0])
    host = max(int(HOST_SHARE * trace.distinct), HOST_LONGEST * trace.longest, int(HOST_DEVICE * device))
    far: dict[str, Any] = {"slot_overhead_bytes": PAGE, "writer_owned": False}
    return [
        TierSpec(TierKind.HOST, 0, host * PAGE, 8 * PAGE, eviction="reuse-index"),
        TierSpec(TierKind.NVME, 0, trace.distinct * 2 * PAGE, 16 * PAGE, eviction="reuse-index", **far),
    ]


def prefill_s(start: int, tokens: int) -> float:
    """Seconds in which an H100 computes tokens after `start` others."""
    base, each, pair = H100_S
    return base * -(-tokens // STEP_TOKENS) + each * tokens + pair * float(pairs(start, tokens))


def predecessors(trace: Trace) -> list[int]:
    """Of each request, the one that it continues; -1: none. It shares more than half of that one's
    prompt."""
    last, lengths, found = dict[int, int](), np.diff(trace.starts).tolist(), list[int]()
    for number in range(len(trace)):
        blocks = trace.of(number).tolist()
        depth = next((depth for depth in range(len(blocks), 0, -1) if blocks[depth - 1] in last), 0)
        former = last[blocks[depth - 1]] if depth else -1
        found.append(former if depth and 2 * depth >= lengths[former] else -1)
        last.update(dict.fromkeys(blocks, number))
    return found


def scaled(trace: Trace, load: float) -> Trace:
    """The trace in such time that the engine is busy for a share `load` of it, if no hit is recomputed."""
    seen, busy_s = set[int](), 0.0
    for number in range(len(trace)):
        blocks, tokens = trace.of(number).tolist(), int(trace.tokens[number])
        held = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        held = min(held * int(trace.full_tokens[number]), tokens - 1)
        busy_s += prefill_s(held, tokens - held)
        seen.update(blocks)
    return replace(trace, times_s=trace.times_s * (busy_s / (load * float(trace.times_s[-1]))))


def coarse(request: Request, by: int) -> Request:
    """With blocks of `by` blocks. An id stands for all before it, so the last names them."""
    ids = tuple(request.blocks)
    kept = ids[by - 1 :: by] + ids[len(ids) - 1 :] * (len(ids) % by > 0)
    return replace(request, blocks=kept, block_tokens=by * request.block_tokens)


def synthetic(*, sessions: int, turns: int, seed: int = 0, pause_s: float = 60.0) -> Trace:
    """Sessions whose prompts grow by some blocks a turn, with pauses in between."""
    dice = np.random.default_rng(seed)
    begins = np.sort(dice.uniform(0, sessions * 4.0, sessions))
    requests, fresh = list[Request](), itertools.count()
    for begin in begins.tolist():
        at_s, blocks = begin, list[int]()
        for _ in range(turns):
            blocks += [next(fresh) for _ in range(int(dice.integers(4, 24)))]
            requests.append(Request(int(at_s * 1000), 512 * len(blocks), tuple(blocks)))
            at_s += float(dice.exponential(pause_s))
    return trace_of(sorted(requests, key=lambda request: request.time_ms), name="synthetic")


PARTS = {"conversation_a": (1500, 1, 1), "agent_a": (1500, 8, 4)}
"""Of each trace: requests, how many of its blocks are one here, and NVMe drives. An agent's prompt
of 130,000 tokens takes 2.4 s to read from one drive and 1 s to compute, if most of it is stored."""
LOAD = 1.1
"""Work that arrives, as a share of what the engine can do: above 1 requests queue, or prefetches
have no time."""


def found_traces(*, is_tiny: bool = False) -> Iterator[tuple[Trace, int]]:
    """The traces beside the checkout with their drives, or a synthetic one."""
    paths = {name: TRACES / f"{name}.jsonl.gz" for name in PARTS}
    if is_tiny or not all(path.exists() for path in paths.values()):
        yield synthetic(sessions=60, turns=6), 1
        return
    for name, (limit, by, drives) in PARTS.items():
        yield trace_of((coarse(each, by) for each in read_trace(paths[name], limit=limit)), name=name), drives


def rows(effort: Effort) -> list[Row]:
    """Rows of each trace: staged and wasted, at LOAD."""
    out = list[Row]()
    for trace, drives in found_traces(is_tiny=effort.is_tiny):
        got = Node(scaled(trace, LOAD), drives=drives).run()
        meaning = (
            f"NVMe-hit tokens staged before they are asked for, at an engine load of {LOAD}; limit: 95 or the bound"
        )
        limits = [min(95.0, got.bound_share)]
        out.append(
            row_of(f"prefetch_staged_{trace.name}", [got.staged_share], unit="%", limits=limits, meaning=meaning)
        )
        meaning = "bytes that prefetches on arrival brought in vain; limit: the promised share"
        out.append(row_of(f"prefetch_wasted_{trace.name}", [got.wasted_share], unit="%", limits=[5.0], meaning=meaning))
    return out


def main() -> None:
    """Prints the figures of each trace and load, without prefetches and with them."""
    parser = argparse.ArgumentParser(description="prefetches in a simulated node")
    parser.add_argument("--loads", type=float, nargs="*", default=[LOAD], help="of the engine")
    asked = parser.parse_args()
    for (trace, drives), load, prefetches in itertools.product(found_traces(), asked.loads, (False, True)):
        got = Node(scaled(trace, load), prefetches=prefetches, drives=drives).run()
        waits = np.sort(got.waits_s or [0.0])
        print(
            f"{trace.name} load {load:g} drives {drives} {'prefetches' if prefetches else 'none'}:"
            f" staged {got.staged_share:.1f} % (bound {got.bound_share:.1f} %) of {got.far} far blocks, wasted"
            f" {got.wasted_share:.1f} % of {(got.used + got.wasted) // PAGE}, {len(waits)} waits,"
            f" p50 {np.quantile(waits, 0.5):.3f} s, p95 {np.quantile(waits, 0.95):.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
