"""The advisor: fits, choices, and its gain over fixed choices in a simulated engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.advisor.advice import Advice, Run, Wanted, advise
from tierd.advisor.fit import Fit
from tierd.advisor.pace import Pace, PaceMeter
from tierd.advisor.prefill import KNOWN, Prefill
from tools.bench.advice import LEARNING, World, arrivals, compared, mixed, slowed

COSTS = (4e-3, 5e-5, 1e-9)
"""Of a step, a token, a pair."""


def trained(costs: tuple[float, float, float] = COSTS) -> Prefill:
    """An engine's steps of 100 to 8,000 tokens, without noise."""
    prefill, chance = Prefill(), np.random.default_rng(3)
    for _ in range(60):
        start, tokens = int(chance.integers(0, 20_000)), int(chance.integers(100, 8000))
        base, each, pair = costs
        prefill.observe([(start, tokens)], base + each * tokens + pair * tokens * (start + tokens / 2))
    return prefill


PREFILL = trained()


def test_a_fit_finds_the_costs_of_its_samples() -> None:
    """Without noise the costs come out, and predictions beyond the samples hold."""
    seconds = float(PREFILL.seconds(np.float64(30_000), np.float64(6000)))
    assert seconds == pytest.approx(4e-3 + 5e-5 * 6000 + 1e-9 * 6000 * 33_000, rel=0.05)


@given(
    samples=st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(0, 1e3, allow_subnormal=False)), max_size=20
    )
)
def test_no_cost_is_negative(samples: list[tuple[float, float, float]]) -> None:
    """Costs of any samples are finite and not below 0."""
    fit = Fit((1e-3, 1e-5, 1e-9), (0.02, 0.0, 0.001), memory=0.9)
    for tokens, seen, seconds in samples:
        fit.observe((1.0, tokens, seen), seconds)
    assert np.isfinite(fit.costs).all() and (fit.costs >= 0).all()


def test_transfers_of_one_size_tell_a_bandwidth() -> None:
    """If all transfers are alike, their time is that of their bytes and not a latency."""
    meter = PaceMeter()
    for _ in range(10):
        meter.observe(128 << 20, 0.1)
    pace = meter.pace()
    assert pace is not None
    assert pace.bytes_per_s == pytest.approx((128 << 20) / 0.1, rel=0.1)


def test_an_idle_link_is_tried_again() -> None:
    """A link that was slow is expected to recover while it is idle, up to half of its best."""
    meter, paces = PaceMeter(), []
    for seconds in [0.01] * 5 + [0.1] * 20:
        meter.observe(100_000_000, seconds)
        meter.pace()
    for idle_s in (0.0, 20.0, 200.0):
        pace = meter.pace(idle_s)
        assert pace is not None
        paces.append(pace.bytes_per_s)
    assert paces == pytest.approx([1e9, 4e9, 5e9], rel=0.1)


def test_a_hanging_link_waits_at_least_as_long_again() -> None:
    """Behind queued bytes a transfer waits for them, less the time that passed; if that was longer
    than they take, as long again."""
    pace = Pace(1e9)
    assert pace.after(1e9, since_s=0.25).wait_s == pytest.approx(0.75)
    assert pace.after(1e9, since_s=3.0).wait_s == 3.0


def advised(runs: list[Run], **more: float) -> Advice:
    wanted = Wanted(prompt=10_000, computed=0, tokens_per_block=16, bytes_per_token=131_072, **more)  # type: ignore[arg-type]
    return advise(wanted, runs, PREFILL)


def test_a_fast_tier_is_loaded_and_a_slow_one_computed() -> None:
    """All of a prefix in fast memory is loaded, nothing of one in a slow tier."""
    assert advised([Run(8000, Pace(25e9))]).tokens == 8000
    assert advised([Run(8000, Pace(1e8))]).tokens == 0


def test_the_end_of_a_prefix_in_a_slow_tier_is_computed() -> None:
    """Of a prefix half in memory and half in a slow tier, the first half is loaded."""
    assert advised([Run(4000), Run(4000, Pace(1e8))]).tokens == 4000


def test_a_queue_makes_loading_slower() -> None:
    """A tier that is worth loading from is not if its queue takes longer than computing."""
    assert advised([Run(8000, Pace(25e9, wait_s=30.0))]).tokens == 0


def test_a_busy_engine_has_time_to_load() -> None:
    """A busy engine loads more than an idle one: loading costs nothing while it waits."""
    pace = Pace(1.6e9)
    assert advised([Run(8000, pace)], engine_wait_s=1.0).tokens > advised([Run(8000, pace)]).tokens


def test_the_last_token_is_computed() -> None:
    """At least one token of the prompt is left, in whole blocks."""
    assert advised([Run(20_000)]).tokens == 9984


def test_without_knowledge_a_free_tier_is_loaded() -> None:
    """Before the engine's steps are known, a tier without a queue is loaded, and one with a queue not."""
    wanted = Wanted(prompt=1000, computed=0, tokens_per_block=16, bytes_per_token=1000.0)
    assert advise(wanted, [Run(640, Pace(1.0))], Prefill()).tokens == 640
    assert advise(wanted, [Run(640, Pace(1e12, wait_s=0.1))], Prefill()).tokens == 0
    some = Prefill()
    for _ in range(KNOWN):
        some.observe([(0, 100)], 0.01)
    assert some.is_known and not Prefill().is_known


@given(
    runs=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1e8, 1e9, 1e10]), st.floats(0, 2)), max_size=4),
    computed=st.integers(0, 2000),
    prompt=st.integers(1, 20_000),
    wait_s=st.floats(0, 3),
)
def test_no_fixed_choice_is_expected_to_be_faster(
    runs: list[tuple[int, float, float]], computed: int, prompt: int, wait_s: float
) -> None:
    """The advice is expected to be within 4 % of loading everything and of loading nothing."""
    wanted = Wanted(max(prompt, computed + 1), computed, 16, 131_072.0, wait_s)
    found = advise(wanted, [Run(tokens, Pace(width, wait_s=wait)) for tokens, width, wait in runs], PREFILL)
    assert found.first_token_s <= min(found.all_s, found.none_s) * 1.04 + 1e-12
    assert 0 <= found.tokens < max(1, wanted.prompt - computed) and found.tokens % 16 == 0


@pytest.mark.parametrize("width", [25e9, 2e9, 5e8])
@pytest.mark.parametrize("load", [0.1, 0.8])
@pytest.mark.parametrize("prefix", [1024, 32_768])
def test_advice_is_near_the_better_fixed_choice(width: float, load: float, prefix: int) -> None:
    """In the simulated engine it is within 5 % of the better of always loading and always computing."""
    world = World(lambda _: (width,))
    found = compared(world, list(arrivals(world, prefix=prefix, load=load, count=200)), skip=LEARNING)
    assert found["advised"] <= 1.05 * min(found["all"], found["none"])


def test_advice_beats_both_fixed_choices_on_a_mixed_trace() -> None:
    """With prefixes of all lengths in tiers of four speeds it is faster than either choice."""
    found = mixed(count=200)
    assert found["advised"] < 0.9 * min(found["all"], found["none"])


def test_advice_follows_a_tier_that_slows_down() -> None:
    """Two seconds after a tier became ten times slower, requests are as fast as computed ones."""
    found = slowed(count=150)
    late = {name: times[times[:, 0] > 22, 1].mean() for name, times in found.items()}
    assert late["advised"] <= 1.05 * late["none"] < late["all"]


@given(gbps=st.floats(0.1, 100), prefix=st.integers(1, 100), tail=st.integers(1, 3000), layers=st.integers(1, 64))
def test_layers_hide_the_longer_of_two_times(gbps: float, prefix: int, tail: int, layers: int) -> None:
    """Waiting for layers is never slower than waiting for whole loads. It is never faster than the
    load, or the computing, alone."""
    runs = [Run(64 * prefix, Pace(gbps * 1e9, 1e-4, 0.0))]
    whole, layered = (Wanted(64 * prefix + tail, 0, 64, 1e5, layers=n) for n in (1, layers))
    one, many = advise(whole, runs, PREFILL), advise(layered, runs, PREFILL)
    assert many.all_s <= one.all_s * (1 + 1e-9) and many.none_s == pytest.approx(one.none_s)
    tail_s = float(PREFILL.seconds(np.float64(64 * prefix), np.float64(tail)))
    load_s = 1e-4 + 64 * prefix * 1e5 / (gbps * 1e9)
    assert many.all_s >= max(tail_s, load_s) * (1 - 1e-9)
