"""The simulator against plain models of LRU and of a clairvoyant, and against published columns."""

from __future__ import annotations

import dataclasses
import heapq
import random
from functools import cache
from pathlib import Path

import pytest

from tests.depth import report
from tierd.cli.trace import read_trace
from tierd.config import Config
from tierd.core.formats.model import TierKind
from tierd.policies.eviction import EVICTION
from tierd.simulator.choices import parse_choice
from tierd.simulator.clairvoyant import NEVER, next_uses
from tierd.simulator.rivals import RIVALS
from tierd.simulator.runs import Outcome, Scenario, Simulation, simulate, simulate_all
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tierd.simulator.sizes import Tiers, parse_size, tiers_of

SHARES = ("0.1%", "1%", "5%", "10%", "25%", "50%")
PUBLISHED = {
    ("conversation_a", "lru"): (4.10, 4.52, 13.15, 22.09, 31.79, 35.13),
    ("conversation_a", "clairvoyant"): (7.25, 20.09, 34.28, 35.32, 35.32, 35.32),
    ("agent_a", "lru"): (1.15, 14.08, 72.23, 90.84, 95.52, 96.01),
    ("agent_a", "clairvoyant"): (6.87, 42.33, 85.43, 94.19, 96.01, 96.01),
}
"""Prefix-token hit ratios in per cent, from shared/traces/README.md."""
CASES = [(name, policy, row) for name, policy in PUBLISHED for row in range(len(SHARES))]


@cache
def load(shared: Path, name: str, limit: int | None = None) -> Trace:
    return trace_of(read_trace(shared / "traces" / f"{name}.jsonl.gz", limit=limit), name=name)


def tiers(trace: Trace, **sizes: str) -> Tiers:
    parsed = {TierKind[kind.upper()]: parse_size(text) for kind, text in sizes.items()}
    return tiers_of(parsed, distinct=trace.distinct, longest=trace.longest, measure=Measure(), config=Config())


def ran(trace: Trace, policy: str, **sizes: str) -> Outcome:
    return simulate(trace, Scenario(0, parse_choice(policy), tiers(trace, **sizes)))


def clairvoyant_hits(trace: Trace, pages: int) -> list[int]:
    """Per request, tokens hit by a cache that keeps the blocks which are used soonest."""
    uses, held, heap, hits = next_uses(trace).tolist(), {}, [], []
    for request in range(len(trace)):
        blocks = trace.of(request).tolist()
        found = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        hits.append(min(found * 512, int(trace.tokens[request])))
        for i, block in enumerate(blocks):
            held[block] = uses[trace.starts[request] + i]
            heapq.heappush(heap, (-held[block], -block))
        while len(held) > pages or (heap and heap[0][0] == -NEVER):
            use, block = heapq.heappop(heap)
            if held.get(-block) == -use:
                del held[-block]
    return hits


@pytest.mark.parametrize("share", ["0.1%", "1%", "5%"])
def test_every_request_finds_what_a_plain_clairvoyant_finds(shared: Path, share: str) -> None:
    """On the first requests of the chat trace the clairvoyant's hits equal Belady's, one by one."""
    trace = load(shared, "conversation_a", 500)
    made = tiers(trace, host=share)
    simulation, hits, sums = Simulation(trace, Scenario(0, parse_choice("clairvoyant"), made)), [], [0]
    for request in range(len(trace)):
        simulation.serve(request)
        sums.append(simulation.tier_tokens[0])
        hits.append(sums[-1] - sums[-2])
    assert hits == clairvoyant_hits(trace, parse_size(share).count(trace.distinct))
    simulation.core.check()


@pytest.mark.parametrize("policy", sorted({**EVICTION, **RIVALS}))
def test_no_policy_passes_the_clairvoyant(shared: Path, policy: str) -> None:
    """In a tier of 2 % of the blocks every policy hits some tokens, fewer than the clairvoyant."""
    trace = load(shared, "conversation_a", 300)
    (found,) = ran(trace, policy, host="2%").tier_tokens
    assert 0 < found < sum(clairvoyant_hits(trace, parse_size("2%").count(trace.distinct)))


def conversations(count: int) -> Trace:
    """A made-up trace: conversations that grow and return, with a common prefix."""
    rng, ids = random.Random(7), iter(range(10**9))
    common = [next(ids) for _ in range(2)]
    held, requests = [list(common) for _ in range(8)], []
    for number in range(count):
        blocks = rng.choice(held)
        blocks += [next(ids) for _ in range(rng.randint(1, 4))]
        requests.append(Request(number * 700, 512 * len(blocks) + rng.randint(1, 512), (*blocks, next(ids))))
    return trace_of(requests, name="made-up")


def test_any_number_of_processes_gives_the_same() -> None:
    """One process and two give the same outcomes in the same order; progress counts all
    requests."""
    trace = conversations(60)
    choices = [parse_choice(text) for text in ("lru", "host:clairvoyant+nvme:lru", "default")]
    runs = [Scenario(0, choice, tiers(trace, host=size, nvme="30%")) for choice in choices for size in ("10%", "20%")]
    seen: list[int] = []
    alone = simulate_all([trace], runs, jobs=1, show=seen.append)
    pair = simulate_all([trace], runs, jobs=2, show=seen.append)
    assert [dataclasses.replace(o, seconds=0) for o in alone] == [dataclasses.replace(o, seconds=0) for o in pair]
    assert len({outcome.tier_tokens for outcome in alone}) > 3
    assert seen[len(runs) * 60 - 1] == seen[-1] == len(runs) * 60


def test_what_is_far_is_found_and_counted(shared: Path) -> None:
    """A second tier adds hits, and its written bytes are a number of whole blocks."""
    trace = load(shared, "conversation_a", 400)
    one, two = ran(trace, "lru", host="2%"), ran(trace, "lru", host="2%", nvme="40%")
    assert sum(two.tier_tokens) > sum(one.tier_tokens)
    assert two.tier_tokens[1] > 0 and two.copied_bytes[1] > 0
    assert two.copied_bytes[1] % 4096 == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "policy", "row"), CASES)
def test_the_published_columns_are_met_to_the_last_digit(shared: Path, name: str, policy: str, row: int) -> None:
    """LRU and the clairvoyant bound over whole traces equal the printed figures."""
    trace = load(shared, name)
    outcome = ran(trace, policy, host=SHARES[row])
    ratio = 100 * outcome.tier_tokens[0] / trace.prompt_tokens
    report("simulated", trace=name, policy=policy, size=SHARES[row], hit=ratio, seconds=round(outcome.seconds, 1))
    assert f"{ratio:.2f}" == f"{PUBLISHED[name, policy][row]:.2f}"


def test_a_request_above_the_tier_keeps_its_beginning() -> None:
    """Of a request larger than the tier the first blocks stay, as in a list in order of use."""
    request = Request(0, 512 * 20, tuple(range(20)))
    trace = trace_of([request, request], name="made-up")
    assert [ran(trace, policy, host="5blocks").tier_tokens for policy in ("lru", "clairvoyant")] == [(2560,), (2560,)]
