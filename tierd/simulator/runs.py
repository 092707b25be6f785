"""Runs: traces through cores, one after another or in parallel processes.

The core, the policies and the driver are the daemon's own. A run depends only on its trace, tiers
and policies, so any number of processes gives the same rows. A run ends early if its parent process
dies or stops asking.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from tierd.core.admission import Admission
from tierd.core.core import Core
from tierd.core.eviction import Eviction
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.instant_driver import InstantDriver
from tierd.errors import TierFailed
from tierd.policies.named import NamedPolicies
from tierd.simulator.choices import CLAIRVOYANT, Choice
from tierd.simulator.clairvoyant import Clairvoyant, Foresight, ForesightDriver, UsedAgain
from tierd.simulator.rivals import RIVALS
from tierd.simulator.sequences import Trace
from tierd.simulator.sizes import Tiers
from tierd.simulator.wear import Writes

REFRESH_S = 0.1
"""Interval at which the progress of processes is read."""

Counted = Callable[[int], bool]
"""Called after each request with the number done; False stops the run."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One trace under one choice of policies in tiers of one size each. trace: its number."""

    trace: int
    choice: Choice
    tiers: Tiers
    writes: Writes = field(default_factory=Writes)

    @property
    def label(self) -> str:
        """Its name among runs in tiers of the same sizes."""
        asked = (self.choice.text, self.writes.admission, self.writes.budget.text if self.writes.budget else None)
        return ", ".join(filter(None, asked))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. tier_tokens: prompt tokens found in each tier; copied_bytes: written
    into each by transfers; both near to far."""

    tier_tokens: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    seconds: float


class _Knowing(NamedPolicies):
    """The daemon's policies, their rivals, and those that know the future (added to knowing)."""

    def __init__(self, sight: Foresight | None, knowing: list[Clairvoyant]) -> None:
        super().__init__()
        self._sight, self._known_by = sight, knowing

    def eviction(self, spec: TierSpec, blocks: Blocks) -> Eviction:
        if spec.eviction in RIVALS:
            return RIVALS[spec.eviction](blocks)
        if spec.eviction != CLAIRVOYANT:
            return super().eviction(spec, blocks)
        assert self._sight is not None
        self._known_by.append(Clairvoyant(blocks, self._sight))
        return self._known_by[-1]

    def admission(self, spec: TierSpec, blocks: Blocks) -> Admission:
        if spec.admission != CLAIRVOYANT:
            return super().admission(spec, blocks)
        assert self._sight is not None
        return UsedAgain(spec, blocks, self._sight)


class Simulation:
    """One core that serves a trace. Requests are served in order, each once."""

    def __init__(self, trace: Trace, run: Scenario) -> None:
        self._trace, self._tiers = trace, run.tiers
        self._specs = run.writes.applied(run.choice.applied(run.tiers.specs), trace, run.tiers.measure)
        self._sight = Foresight(trace) if any(spec.eviction == CLAIRVOYANT for spec in self._specs) else None
        self._knowing: list[Clairvoyant] = []
        self.core = Core(
            self._specs, policies=_Knowing(self._sight, self._knowing), session_share=run.tiers.session_share
        )
        self.driver = self._driver(self._specs[0].kind)
        self.tier_tokens = [0] * len(self._specs)

    def serve(self, request: int) -> None:
        """Serves the request of that number."""
        if self._sight is not None:
            self._sight.see(request)
        sequence = self._trace.sequence(request, self._tiers.measure)
        found = self.driver.request(sequence, now=float(self._trace.times_s[request]))
        for tier, tokens in enumerate(found):
            self.tier_tokens[tier] += tokens

    def _driver(self, kind: TierKind) -> InstantDriver:
        if len(self._knowing) != len(self._specs):
            return InstantDriver(self.core, kind=kind, tier_count=len(self._specs))
        measure = self._tiers.measure
        page = measure.page_bytes(int(self._trace.sequence(0, measure).block_bytes)) if len(self._trace) else 1
        pages = sum(
            (spec.capacity_bytes - spec.headroom_bytes) // (page + spec.slot_overhead_bytes) for spec in self._specs
        )
        return ForesightDriver(self.core, kind=kind, tiers=self._knowing, pages=pages)


def simulate(trace: Trace, run: Scenario, *, counted: Counted = lambda _: True) -> Outcome:
    """Serves the trace, until `counted` returns False."""
    begun, simulation = time.perf_counter(), Simulation(trace, run)
    for request in range(len(trace)):
        simulation.serve(request)
        if not counted(request + 1):
            break
    seconds = time.perf_counter() - begun
    return Outcome(tuple(simulation.tier_tokens), tuple(simulation.driver.copied_bytes), seconds)


def simulate_all(
    traces: Sequence[Trace], runs: Sequence[Scenario], *, jobs: int, show: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """The outcomes of all runs, in their order. jobs: processes; 1 runs all in this one. show:
    called with the number of requests done in all. Raises TierFailed if a process dies."""
    if min(jobs, len(runs)) > 1:
        return _in_processes(traces, runs, jobs=min(jobs, len(runs)), show=show)
    outcomes: list[Outcome] = []
    begun = 0
    for run in runs:

        def counted(done: int, begun: int = begun) -> bool:
            show(begun + done)
            return True

        outcomes.append(simulate(traces[run.trace], run, counted=counted))
        begun += len(traces[run.trace])
    return outcomes


# -- processes


@dataclass(slots=True)
class _Worker:
    """State of a process: the traces, the progress of each run, and whether to go on."""

    traces: Sequence[Trace]
    done: Any
    go_on: Any


_worker: list[_Worker] = []


def _begin(traces: Sequence[Trace], done: Any, go_on: Any) -> None:
    """Starts a process that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _worker[:] = [_Worker(traces, done, go_on)]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(number: int, run: Scenario) -> Outcome:
    worker = _worker[0]

    def counted(done: int) -> bool:
        worker.done[number] = done
        return bool(worker.go_on.value)

    return simulate(worker.traces[run.trace], run, counted=counted)


def _in_processes(
    traces: Sequence[Trace], runs: Sequence[Scenario], *, jobs: int, show: Callable[[int], None]
) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    done, go_on = context.RawArray("q", len(runs)), context.RawValue("b", 1)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(traces, done, go_on))
    try:
        futures = [pool.submit(_work, number, run) for number, run in enumerate(runs)]
        for _ in _waits(futures):
            show(sum(done))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise TierFailed("simulate: a process was killed, perhaps out of memory; use fewer --jobs") from error
    finally:
        go_on.value = 0
        pool.shutdown(cancel_futures=True)


def _waits(futures: Sequence[Future[Outcome]]) -> Iterator[None]:
    """Yields after each pause, until all have ended or one has failed."""
    left = set(futures)
    while left:
        ended, left = wait(left, timeout=REFRESH_S, return_when=FIRST_COMPLETED)
        yield
        if any(future.exception() for future in ended):
            return
