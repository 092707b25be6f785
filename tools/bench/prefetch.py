"""Prefetches in a simulated node: what is staged before it is asked for, and what was wasted.

    python -m tools.bench.prefetch [TRACE.jsonl.gz ...]

The core, its policies, the ledger of prefetches and the predictions are the daemon's own. Time, one
link from NVMe and one engine are simulated. Requests arrive as in the trace, wait for the engine in
order, and then ask for their blocks. The engine's speed follows from the share of time in which it
is busy. A request whose blocks are still under way lets the next one pass.

Staged: of the tokens that lay on NVMe when their request arrived, those that lie in host memory
when the engine asks for them. Wasted: of the bytes that prefetches brought.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tierd.advisor.prefill import pairs
from tierd.cache.predictions import Predictions
from tierd.cache.prefetches import Ledger, Order, Started
from tierd.cli.trace import read_trace
from tierd.core.core import Core
from tierd.core.formats.model import BlockStatus, Hint, Reason, StructArray, TierKind, TierSpec, Wanted
from tierd.core.instant_driver import DIGEST_BYTES
from tierd.core.plan import Acquisition, Allowance, GroupQuery, Plan, PutQuery
from tierd.metrics import Metrics
from tierd.policies.named import NamedPolicies
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tools.bench.advice import H100_S, STEP_TOKENS
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
PAGE = 4096
"""Bytes of a simulated block; it stands for BLOCK_BYTES."""
BLOCK_BYTES = 64 << 20
"""Of 512 tokens of Llama-3-8B."""
NVME_BYTES_PER_S = 7e9
SHARES = (0.05, 0.25)
"""Of the trace's distinct blocks, in host memory and on NVMe."""
PREFETCH_SHARE = 0.5
"""`mover.prefetch_share`."""
BATCH = 4
"""Blocks in one read."""
HORIZON_S = 30.0
"""Time in which a predicted prefetch should be used."""
SESSION, HOST, NVME = 1, 0, 1


@dataclass(frozen=True, slots=True)
class Mode:
    """Prefetches: on arrival, or before the turns that a hint announces."""

    on_arrival: bool = True
    hint: Hint | None = None


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
    queues: tuple[deque[StructArray], deque[StructArray]] = field(default_factory=lambda: (deque(), deque()))
    is_busy: bool = False

    def add(self, transfers: StructArray) -> None:
        """Queues transfers of one plan."""
        is_demand = transfers["reason"] != Reason.PREFETCH
        for queue, some in zip(self.queues, (transfers[is_demand], transfers[~is_demand]), strict=True):
            queue.extend(some[i : i + BATCH] for i in range(0, len(some), BATCH))
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
    """Blocks on NVMe at arrival, and of these staged when asked for. waits_s: from asking until all
    was loaded. Bytes of prefetches, by outcome."""

    far: int = 0
    staged: int = 0
    waits_s: list[float] = field(default_factory=list)
    used: int = 0
    wasted: int = 0

    @property
    def staged_share(self) -> float:
        """Per cent."""
        return 100.0 * self.staged / max(1, self.far)

    @property
    def wasted_share(self) -> float:
        """Per cent of the bytes that prefetches brought."""
        return 100.0 * self.wasted / max(1, self.used + self.wasted)


class Node:
    """A daemon and its engine. speed: of the engine, in multiples of an H100's."""

    def __init__(self, trace: Trace, mode: Mode, *, speed: float, link_bytes_per_s: float = NVME_BYTES_PER_S) -> None:
        self._trace, self._mode, self._speed = trace, mode, speed
        self._measure = Measure(PAGE, whole=True)
        self.clock, self.figures, self.metrics = Clock(), Figures(), Metrics()
        self.core = Core(specs(trace), policies=NamedPolicies(), session_share=1.0)
        self.core.open_session(SESSION, domain=1)
        self.ledger = Ledger(self.metrics, now=self.clock.time)
        self.ledger.let_go = self._let_go
        self.link = Link(self.clock, self._read, BLOCK_BYTES / link_bytes_per_s)
        self.predictions = Predictions(self.prefetch, is_on=mode.hint is not None, loop=lambda: self.clock)
        self._waiting: deque[tuple[int, np.ndarray]] = deque()
        self._ready: deque[tuple[int, Acquisition]] = deque()
        self._loading: list[tuple[set[int], int, Acquisition, float]] = []
        self._is_busy = False
        self._most = int(PREFETCH_SHARE * specs(trace)[HOST].capacity_bytes)

    def run(self) -> Figures:
        """Serves the whole trace."""
        for number, at_s in enumerate(self._trace.times_s.tolist()):
            self.clock.call_later(at_s, self._arrived, number)
        self.clock.run()
        self.clock.now += 1e6
        self.ledger.expire()
        for name, count in self.metrics.counters().items():
            if name.startswith("tierd_prefetched_bytes_total"):
                self.figures.used += count * ('"used"' in name)
                self.figures.wasted += count * ('"wasted"' in name)
        return self.figures

    def prefetch(self, _: int, groups: Sequence[GroupQuery], kind: Wanted, order: Order) -> Started:
        """As `Gets.prefetch`."""
        self.ledger.expire()
        left = self._most - self.ledger.staged[HOST]
        allowance = Allowance(bytes=left, is_guess=order.origin == "predicted")
        plan = self.core.prefetch(SESSION, groups=groups, kind=kind, now=self.clock.now, allowance=allowance)
        number = self.ledger.begin(SESSION, plan, order)
        self._carry_out(plan)
        if not allowance.is_guess:
            self.ledger.keep(number, self.core.keep(SESSION, plan.transfers["block"], kind))
        return Started(number, len(plan.transfers))

    def _let_go(self, session: int, lease: int) -> None:
        self._carry_out(self.core.release(session, leases=[lease], now=self.clock.now))

    # -- a request

    def _arrived(self, number: int) -> None:
        group = self._trace.sequence(number, self._measure).group()
        self.predictions.ask([group])
        found = self.core.lookup([group], now=self.clock.now)
        held = -(-found.tokens // group.tokens_per_block)
        far = np.flatnonzero(found.tier_of[0][0][:held] == NVME)
        if len(far) and self._mode.on_arrival:
            self.prefetch(SESSION, [group], TierKind.HOST, Order("lookup", ttl_s=600.0))
        self._waiting.append((number, far))
        self._next()

    def _next(self) -> None:
        """The engine computes what is ready; if nothing is, it asks for the blocks of the next."""
        while not self._is_busy and (self._ready or self._waiting):
            if self._ready:
                self._compute(*self._ready.popleft())
            else:
                self._ask(*self._waiting.popleft())

    def _ask(self, number: int, far: np.ndarray) -> None:
        group, now = self._trace.sequence(number, self._measure).group(), self.clock.now
        tier_of = self.core.lookup([group], now=now).tier_of[0][0]
        self.figures.far += len(far)
        self.figures.staged += int((tier_of[far] == HOST).sum())
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
        tokens = served.tokens if served else 0
        self._is_busy = True
        spent = prefill_s(tokens, int(self._trace.tokens[number]) - tokens) / self._speed
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
        if self._mode.hint is not None:
            order = Order(ttl_s=HORIZON_S, hint=self._mode.hint)
            self.predictions.pause(SESSION, [sequence.group()], TierKind.HOST, order)
        self._is_busy = False
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
    """The tiers: SHARES of the trace's distinct blocks."""
    host, nvme = (max(256, int(share * trace.distinct)) for share in SHARES)
    far: dict[str, Any] = {"slot_overhead_bytes": PAGE, "writer_owned": False}
    return [
        TierSpec(TierKind.HOST, 0, host * PAGE, 8 * PAGE, eviction="reuse-index"),
        TierSpec(TierKind.NVME, 0, nvme * 2 * PAGE, 16 * PAGE, eviction="reuse-index", admission="learned", **far),
    ]


def prefill_s(start: int, tokens: int) -> float:
    """Seconds in which an H100 computes tokens after `start` others."""
    base, each, pair = H100_S
    return base * -(-tokens // STEP_TOKENS) + each * tokens + pair * float(pairs(start, tokens))


def speed_for(trace: Trace, load: float) -> float:
    """Speed of an engine that is busy for a share `load` of the time, if nothing is evicted."""
    seen, busy_s = set[int](), 0.0
    for number in range(len(trace)):
        blocks, tokens = trace.of(number).tolist(), int(trace.tokens[number])
        held = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        held = min(held * int(trace.full_tokens[number]), tokens - 1)
        busy_s += prefill_s(held, tokens - held)
        seen.update(blocks)
    return busy_s / (load * float(trace.times_s[-1]))


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


def found_traces(*, limit: int | None) -> Iterator[Trace]:
    """The traces beside the checkout, or a synthetic one."""
    for path in sorted(TRACES.glob("*_a.jsonl.gz")):
        yield trace_of(read_trace(path, limit=limit), name=path.name.partition(".")[0])
    yield synthetic(sessions=(limit or 4000) // 8, turns=8)


LOADS = (0.5, 0.8, 0.95)
"""Shares of time in which the engine is busy."""
REQUESTS = 2000
"""Of each trace in `make bench`: a whole one takes minutes."""


def hint_of(trace: Trace) -> Hint:
    """The hint of its sessions at the end of a turn."""
    return Hint.TURN_END if trace.name.startswith("conversation") else Hint.TOOL_CALL


def rows(effort: Effort) -> list[Row]:
    """Rows of each trace and load: staged and wasted on arrival; wasted by predictions."""
    out = list[Row]()
    traces = [synthetic(sessions=20, turns=4)] if effort.is_tiny else found_traces(limit=REQUESTS)
    for trace in traces:
        for load in LOADS[1:]:
            got = Node(trace, Mode(), speed=speed_for(trace, load)).run()
            name = f"{trace.name}_load{load:g}"
            meaning = "NVMe-hit tokens staged before they are asked for; limit: the promised share"
            out.append(row_of(f"prefetch_staged_{name}", [got.staged_share], unit="%", limits=[95.0], meaning=meaning))
            meaning = "bytes that prefetches on arrival brought in vain; limit: the promised share"
            out.append(row_of(f"prefetch_wasted_{name}", [got.wasted_share], unit="%", limits=[5.0], meaning=meaning))
        got = Node(trace, Mode(on_arrival=False, hint=hint_of(trace)), speed=speed_for(trace, LOADS[1])).run()
        meaning = "bytes that predicted prefetches brought in vain; limit: half"
        name = f"prefetch_predicted_{trace.name}"
        out.append(row_of(name, [got.wasted_share], unit="%", limits=[50.0], meaning=meaning))
    return out


def main() -> None:
    """Prints the figures of each trace, load and mode."""
    parser = argparse.ArgumentParser(description="prefetches in a simulated node")
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--bandwidth", type=float, default=NVME_BYTES_PER_S, help="of NVMe, bytes per second")
    asked = parser.parse_args()
    given = [trace_of(read_trace(path, limit=asked.limit), name=path.name.partition(".")[0]) for path in asked.traces]
    for trace in given or found_traces(limit=asked.limit):
        runs = [(f"arrival, load {load:g}", Mode(), load) for load in LOADS]
        runs += [("none", Mode(on_arrival=False), 0.8), ("predicted", Mode(on_arrival=False, hint=hint_of(trace)), 0.8)]
        for name, mode, load in runs:
            got = Node(trace, mode, speed=speed_for(trace, load), link_bytes_per_s=asked.bandwidth).run()
            waits = np.sort(got.waits_s or [0.0])
            print(
                f"{trace.name:16} {name:18} staged {got.staged_share:5.1f} % of {got.far} far blocks, "
                f"wasted {got.wasted_share:5.1f} % of {(got.used + got.wasted) // PAGE} blocks, "
                f"{len(got.waits_s)} waits, p50 {np.quantile(waits, 0.5):.3f} s, p95 {np.quantile(waits, 0.95):.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
