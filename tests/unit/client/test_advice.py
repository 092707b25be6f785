"""EngineAdvice: matches, advice, counts."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.advisor.pace import Pace
from tierd.client import Found
from tierd.client.advice import NOTHING, Blocks, EngineAdvice
from tierd.client.match import Match

BYTES = 131_072.0
"""Of a token."""


def engine(*, is_on: bool = True) -> EngineAdvice:
    """Of an engine that computes 30,000 tokens a second."""
    advice = EngineAdvice(is_on=is_on)
    for tokens in range(100, 2000, 100):
        advice.computed([(0, tokens)], 2e-3 + tokens / 30_000)
    return advice


def found(*tiers: int, pace: Pace) -> Found:
    """Blocks of 16 tokens in these tiers; tier 1 is a store."""
    return Found(16 * len(tiers), (np.array([tiers], np.int8),), (), (None, pace))


def claimed(advice: EngineAdvice, its: Found, *, computed: int = 0, least: int = 0) -> int:
    match = Match(its.tokens, computed, prompt=its.tokens + 40)
    return advice.claim(match, its, Blocks(16, BYTES, least_tokens=least)).tokens


def test_memory_is_loaded_and_a_slow_store_computed() -> None:
    """Of a prefix in memory and then in a slow store, the part in memory is loaded."""
    its = found(*[0] * 50, *[1] * 50, pace=Pace(1e8))
    assert claimed(engine(), its) == 800
    assert claimed(engine(), found(*[0] * 50, *[1] * 50, pace=Pace(2e10))) == 1600


def test_without_the_advisor_everything_is_loaded() -> None:
    """The option advisor=false loads every match."""
    assert claimed(engine(is_on=False), found(*[1] * 50, pace=Pace(1e6))) == 800


def test_computed_tokens_are_not_counted_as_loads() -> None:
    """Tokens that the engine has already are neither loaded nor counted as a cost."""
    assert claimed(engine(), found(*[1] * 50, *[0] * 50, pace=Pace(1e6)), computed=800) == 800


def test_less_than_the_least_is_computed() -> None:
    """A part below least_load_tokens is not worth a load."""
    assert claimed(engine(), found(*[0] * 5, *[1] * 50, pace=Pace(1e6)), least=100) == 0


def test_a_reply_without_tiers_counts_as_memory() -> None:
    """An answer that names no tiers is loaded, as before."""
    assert claimed(engine(), Found(1600)) == 1600


def test_decisions_and_regret_are_counted() -> None:
    """Loads, computed matches, and loads that took longer than computing would have."""
    advice, its = engine(), found(*[0] * 50, pace=Pace(1e9))
    claim = advice.claim(Match(800, 0, 840), its, Blocks(16, BYTES))
    advice.loaded(claim, 0.001)
    claimed(advice, found(*[1] * 50, pace=Pace(1e6)))
    counts = advice.take_counts()
    assert (counts["advised_loads"], counts["advised_computes"], counts["advised_compute_tokens"]) == (1, 1, 800)
    assert counts["regret_us"] == 0 and not advice.take_counts()
    advice.loaded(claim, 10.0)
    assert advice.take_counts()["regret_us"] == pytest.approx(10e6, rel=0.01)
    advice.loaded(NOTHING, 10.0)
    assert not advice.take_counts()


def test_a_load_by_layer_is_hidden_by_a_long_tail() -> None:
    """A load whose layers come one after another is worth it if the engine computes long enough beside it."""
    its, match = found(*[1] * 50, pace=Pace(1e9)), Match(800, 0, 4800)
    assert engine().claim(match, its, Blocks(16, BYTES)).tokens < 100
    assert engine().claim(match, its, Blocks(16, BYTES, layers=32)).tokens == 800


def test_regret_of_tokens_that_were_loaded_in_other_parts() -> None:
    """It is the time beyond that of computing them; without decisions there is none."""
    for advice, least_s in ((engine(), 10 - 2e-3 - 600 / 30_000), (engine(is_on=False), 0.0)):
        advice.loaded_tokens(600, 10.0)
        advice.loaded_tokens(600, 1e-6)
        assert advice.take_counts()["regret_us"] == pytest.approx(1e6 * least_s, rel=1e-3)


def test_copies_are_told_once() -> None:
    """A worker's copies go to the scheduler once."""
    advice = EngineAdvice(is_on=True)
    advice.copied(100, 0.5)
    assert advice.take_copies() == ((100, 0.5),) and advice.take_copies() == ()


def test_a_store_that_is_not_worth_its_time_is_doubted() -> None:
    """After a match on a store was not loaded whole, lookups should not start reads, until one is."""
    advice = engine()
    assert not advice.is_doubtful
    for pace, tiers, is_doubtful in ((1e6, [1] * 50, True), (1e6, [0] * 50, True), (2e10, [1] * 50, False)):
        claimed(advice, found(*tiers, pace=Pace(pace)))
        assert advice.is_doubtful == is_doubtful


@pytest.mark.parametrize("is_on", [True, False])
def test_a_claim_has_its_expected_times(is_on: bool) -> None:
    """With or without decisions, a claim tells how long loading and computing its tokens take."""
    its, advice = found(*[1] * 50, pace=Pace(2e10)), engine(is_on=is_on)
    claim = advice.claim(Match(its.tokens, 0, its.tokens + 40), its, Blocks(16, BYTES))
    assert claim.load_s == pytest.approx(800 * BYTES / 2e10)
    assert claim.compute_s == pytest.approx(2e-3 + 800 / 30_000, rel=0.05)


def test_decisions_to_compute_are_told_once() -> None:
    """A decision not to load is told once, with both times, though vLLM asks again in each step."""
    advice, its = engine(), found(*[0] * 50, *[1] * 50, pace=Pace(1e6))
    for request in ("a", "a", "b"):
        advice.claim(Match(1600, 0, 1700, request=request), its, Blocks(16, BYTES))
    told = advice.take_computed()
    assert [(one.request, one.tokens) for one in told] == [("a", 800), ("b", 800)]
    assert all(0 < one.compute_s < one.load_s for one in told) and advice.take_computed() == []
    claimed(engine(is_on=False), its)
    assert engine(is_on=False).take_computed() == []
