"""Admission and wear budgets of simulated stores in the form that users write."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tierd.config import Config
from tierd.core.formats.model import TierKind
from tierd.errors import InvalidArgument
from tierd.policies.admission import ADMISSION
from tierd.simulator.choices import CLAIRVOYANT, parse_choice
from tierd.simulator.runs import Outcome, Scenario, simulate
from tierd.simulator.sequences import Measure, Request, Trace, trace_of
from tierd.simulator.sizes import Tiers, parse_size, tiers_of
from tierd.simulator.wear import Budget, Writes, parse_admission, parse_budget


def growing(turns: int) -> Trace:
    """A conversation that grows by 3 blocks a turn, beside one-time requests; 100 s between requests."""
    requests = []
    for turn in range(turns):
        requests.append(Request(200_000 * turn, 512 * 3 * (turn + 1), tuple(range(3 * (turn + 1)))))
        lone = tuple(range(10_000 + 8 * turn, 10_008 + 8 * turn))
        requests.append(Request(200_000 * turn + 100_000, 512 * 8, lone))
    return trace_of(requests, name="made-up")


def tiers(trace: Trace, *, host: str = "12blocks", nvme: str = "100%") -> Tiers:
    sizes = {TierKind.HOST: parse_size(host), TierKind.NVME: parse_size(nvme)}
    return tiers_of(sizes, distinct=trace.distinct, longest=trace.longest, measure=Measure(), config=Config())


def ran(trace: Trace, policy: str, writes: Writes) -> Outcome:
    return simulate(trace, Scenario(0, parse_choice(policy), tiers(trace), writes))


def test_budgets_are_bytes_a_day_or_footprints() -> None:
    """A budget keeps its text. A budget of zero or of another form is refused with the form."""
    assert parse_budget(" 100 GiB ") == Budget("100 GiB", bytes_per_day=100 << 30)
    assert parse_budget("0.5footprints") == Budget("0.5footprints", footprints=Fraction(1, 2))
    for text, fault in (("0", "nothing be written"), ("0 footprints", "nothing be"), ("half", "or 0.5footprints")):
        with pytest.raises(ValueError, match=fault):
            parse_budget(text)


def test_admissions_are_the_daemons() -> None:
    """The names are those of ADMISSION, and `default`."""
    assert [parse_admission(name) for name in ADMISSION] == list(ADMISSION)
    with pytest.raises(ValueError, match="is no admission policy; use one of default, all"):
        parse_admission("some")


def test_a_budget_is_a_rate_over_the_traces_time() -> None:
    """Footprints spread over the trace's span, bytes over days. Blocks without bytes have no bytes a day."""
    trace = growing(5)
    counted = tiers(trace)
    assert parse_budget("2footprints").rate(trace, counted.measure) == pytest.approx(2 * trace.distinct * 4096 / 900)
    in_bytes = tiers(trace, host="1GiB", nvme="1GiB")
    assert parse_budget("86400").rate(trace, in_bytes.measure) == 1.0
    with pytest.raises(InvalidArgument, match=r"write for example 0\.5footprints"):
        parse_budget("86400").rate(trace, counted.measure)


def test_admission_and_budget_reach_the_stores_alone() -> None:
    """Only the NVMe spec gets them. The clairvoyant has its own admission unless one is named."""
    trace = growing(3)
    counted = tiers(trace)
    host, nvme = Writes("all", parse_budget("1footprints")).applied(counted.specs, trace, counted.measure)
    assert host == counted.specs[0]
    assert (nvme.admission, nvme.wear_bytes_per_s > 0) == ("all", True)
    knowing = parse_choice(CLAIRVOYANT).applied(counted.specs)
    assert Writes().applied(knowing, trace, counted.measure)[1].admission == CLAIRVOYANT
    assert Writes("all").applied(knowing, trace, counted.measure)[1].admission == "all"
    assert Writes("default").applied(counted.specs, trace, counted.measure) == counted.specs


def test_a_budget_bounds_what_is_written() -> None:
    """A budget of 0.2 footprints bounds the writes, which exceed it without a budget."""
    trace = growing(20)
    free, bound = ran(trace, "lru", Writes("all")), ran(trace, "lru", Writes("all", parse_budget("0.2footprints")))
    footprint = trace.distinct * 4096
    assert free.copied_bytes[1] > 0.2 * footprint
    assert 0 < bound.copied_bytes[1] <= 0.2 * footprint


@pytest.mark.parametrize("policy", [CLAIRVOYANT, "host:lru+nvme:clairvoyant"])
def test_the_clairvoyant_writes_only_what_is_used_again(policy: str) -> None:
    """The clairvoyant writes no block without a later request, and hits no less than LRU."""
    trace = growing(20)
    plain, knowing = ran(trace, "lru", Writes("all")), ran(trace, policy, Writes())
    lone = sum(trace.of(request).size for request in range(1, len(trace), 2)) * 4096
    assert 0 < knowing.copied_bytes[1] <= trace.distinct * 4096 - lone < plain.copied_bytes[1]
    assert sum(knowing.tier_tokens) >= sum(plain.tier_tokens)
