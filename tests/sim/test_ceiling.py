"""The online ceiling against whole simulations of the same sizes."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.depth import report
from tierd.ceiling import estimator
from tierd.ceiling.estimator import FACTORS, Estimator
from tierd.cli.trace import read_trace
from tierd.config import Config
from tierd.core.core import Core
from tierd.core.formats.model import TierKind
from tierd.core.instant_driver import InstantDriver
from tierd.policies.named import NamedPolicies
from tierd.server.operators.ceiling import level_of
from tierd.simulator.choices import parse_choice
from tierd.simulator.runs import Scenario, simulate
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tierd.simulator.sizes import Size, Tiers, tiers_of

POINTS = 0.02
"""The estimate is within two points of the simulation."""


@cache
def load(shared: Path, name: str, limit: int | None = None) -> Trace:
    return trace_of(read_trace(shared / "traces" / f"{name}.jsonl.gz", limit=limit), name=name)


def conversations(count: int) -> Trace:
    """A made-up trace: conversations that grow and return, the latest ones more often."""
    rng, ids = random.Random(7), iter(range(10**9))
    common = [next(ids) for _ in range(4)]
    held, requests = [list(common) for _ in range(60)], []
    for number in range(count):
        at = min(int(rng.expovariate(1 / 10)), len(held) - 1)
        held[at] += [next(ids) for _ in range(rng.randint(1, 12))]
        requests.append(Request(number * 700, 512 * len(held[at]), tuple(held[at])))
        if len(held[at]) > 60:
            held[at] = list(common)
        if rng.random() < 0.1:
            held.insert(0, held.pop(at))
    return trace_of(requests, name="made-up")


def tiers(trace: Trace, blocks: dict[TierKind, int], factor: float) -> Tiers:
    """Tiers that hold so many times these blocks."""
    sizes = {kind: Size(f"{count}blocks", blocks=round(count * factor)) for kind, count in blocks.items()}
    return tiers_of(sizes, distinct=trace.distinct, longest=trace.longest, measure=Measure(), config=Config())


def simulated(trace: Trace, blocks: dict[TierKind, int], factor: float) -> float:
    outcome = simulate(trace, Scenario(0, parse_choice("default"), tiers(trace, blocks, factor)))
    return sum(outcome.tier_tokens) / trace.prompt_tokens


def estimated(trace: Trace, blocks: dict[TierKind, int]) -> tuple[Estimator, dict[float, float]]:
    """The estimator beside a core of these sizes, and its shares by factor."""
    policies, made = NamedPolicies(), tiers(trace, blocks, 1)
    core = Core(made.specs, policies=policies, session_share=made.session_share)
    driver = InstantDriver(core, tier_count=len(made.specs))
    beside = Estimator([level_of(spec) for spec in made.specs], policies.traffic, 0.0)
    beside.resize(list(blocks.values()))
    for number, at_s in enumerate(trace.times_s.tolist()):
        sequence = trace.sequence(number, made.measure)
        driver.request(sequence, now=at_s)
        beside.ask([sequence.group()], [at_s])
        work(beside, at_s, is_last=number + 1 == len(trace))
    (*_, day) = beside.shares(at_s)
    assert day.tokens == trace.prompt_tokens
    return beside, dict(zip(FACTORS, day.by_factor, strict=True))


def work(beside: Estimator, now: float, *, is_last: bool) -> None:
    while beside.is_due or (is_last and beside.waits):
        for _ in beside.steps(now):
            pass


def reused(trace: Trace) -> float:
    """The share of tokens whose block came before: hits of a cache without limit."""
    sizes = np.full(len(trace.blocks), 512)
    sizes[trace.starts[1:] - 1] = trace.tokens - (np.diff(trace.starts) - 1) * 512
    first = np.unique(trace.blocks, return_index=True)[1]
    return 1 - int(sizes[first].sum()) / trace.prompt_tokens


def compare(trace: Trace, blocks: dict[TierKind, int], factors: tuple[float, ...], *, points: float = POINTS) -> None:
    beside, shares = estimated(trace, blocks)
    truth = {factor: simulated(trace, blocks, factor) for factor in factors}
    report(
        "ceiling",
        trace=trace.name,
        blocks=list(blocks.values()),
        rate=f"1/{1 << beside.sample.bits}",
        simulated={factor: round(100 * share, 2) for factor, share in truth.items()},
        estimated={factor: round(100 * share, 2) for factor, share in shares.items()},
    )
    assert {factor: shares[factor] for factor in truth} == pytest.approx(truth, abs=points)
    assert shares[FACTORS[-1]] == pytest.approx(reused(trace), abs=points)


def test_every_size_of_made_up_traffic_is_met() -> None:
    """At half, the same, twice and four times the size the estimate meets the simulation."""
    compare(conversations(200), {TierKind.HOST: 300}, FACTORS[:-1])


def test_a_store_counts_as_memory_does() -> None:
    """With a store behind the memory, the estimate of both together meets the simulation."""
    compare(conversations(200), {TierKind.HOST: 150, TierKind.NVME: 300}, (1.0, 2.0))


def test_a_sample_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the blocks, which need half of the memory, give nearly the same estimate."""
    monkeypatch.setattr(estimator, "HELD", 600)
    compare(conversations(200), {TierKind.HOST: 300}, (1.0,), points=2 * POINTS)


@pytest.mark.parametrize(("name", "limit", "blocks"), [("conversation_a", 300, 600), ("agent_a", 150, 1200)])
def test_the_beginning_of_real_traffic_is_met(shared: Path, name: str, limit: int, blocks: int) -> None:
    """On the first requests of both traces the estimate meets the simulation."""
    compare(load(shared, name, limit), {TierKind.HOST: blocks}, (1.0,))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("held", [estimator.HELD, 1 << 12])
@pytest.mark.parametrize("name", ["conversation_a", "agent_a"])
def test_whole_traces_are_met(shared: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: int) -> None:
    """On both traces, from one tier of 5 % of the blocks, all sizes are within two points."""
    monkeypatch.setattr(estimator, "HELD", held)
    trace = load(shared, name)
    compare(trace, {TierKind.HOST: trace.distinct // 20}, FACTORS[:-1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["conversation_a", "agent_a"])
def test_whole_traces_with_a_store_are_met(shared: Path, name: str) -> None:
    """On both traces, from 1 % of the blocks in memory and 5 % in a store, all sizes are within two
    points."""
    trace = load(shared, name)
    compare(trace, {TierKind.HOST: trace.distinct // 100, TierKind.NVME: trace.distinct // 20}, FACTORS[:-1])
