"""Predicted returns of sessions, and the guard over what predictions waste."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.policies.returns import AGES_S, LEAST_CHANCE, LEAST_SEEN, RETRY, WINDOW, Guard, Returns

pauses = st.lists(st.tuples(st.floats(0, 4000), st.booleans()), max_size=200)


def learnt(seen: list[tuple[float, bool]]) -> Returns:
    """A table of pauses: how long, and whether the session came back."""
    returns = Returns()
    for pause_s, is_back in seen:
        (returns.ended if is_back else returns.given_up)(pause_s)
    return returns


@given(pauses, st.floats(0, 2000), st.floats(0, 2000), st.floats(0, 2000))
def test_a_chance_is_a_chance(seen: list[tuple[float, bool]], after: float, short: float, more: float) -> None:
    """It lies between 0 and 1, and a longer time never makes a return less likely."""
    returns = learnt(seen)
    assert 0.0 <= returns.chance(after, short) <= returns.chance(after, short + more) + 1e-9 <= 1.0 + 1e-9


@given(pauses, st.sampled_from([5.0, 15.0, 30.0]))
def test_a_prediction_is_likely(seen: list[tuple[float, bool]], horizon: float) -> None:
    """A prediction comes true, in the table, with LEAST_CHANCE."""
    found = learnt(seen).predict(horizon)
    if found is not None:
        assert found.chance >= LEAST_CHANCE
        assert found.after_s in AGES_S


@pytest.mark.parametrize("count", [0, LEAST_SEEN - 1])
def test_little_evidence_predicts_nothing(count: int) -> None:
    """Until enough pauses were seen, nothing is predicted."""
    assert learnt([(10.0, True)] * count).predict(30.0) is None


def test_chances_follow_the_pauses() -> None:
    """Of pauses of which three in four end after ten to fifteen seconds, that is the chance."""
    returns = learnt([(12.0, True)] * 75 + [(2000.0, False)] * 25)
    assert returns.chance(0.0, 15.0) == pytest.approx(0.75)
    assert returns.chance(15.0, 600.0) == pytest.approx(0.0)
    found = returns.predict(5.0)
    assert found is not None
    assert found.after_s == 10.0
    assert found.chance == pytest.approx(0.75)


def test_pauses_that_nobody_saw_end_count_as_away() -> None:
    """Sessions given up before the age do not lower the chance at that age."""
    returns = learnt([(12.0, True)] * 80 + [(12.0, False)] * 0 + [(1.5, False)] * 400 + [(60.0, False)] * 20)
    assert returns.chance(10.0, 5.0) == pytest.approx(0.8)


def test_rare_returns_predict_nothing() -> None:
    """In chat, where one in eight comes back within the horizon, no moment is predicted."""
    dice = random.Random(1)
    seen = [(dice.lognormvariate(4.8, 0.9), dice.random() < 0.36) for _ in range(2000)]
    assert learnt([(pause if back else 2000.0, back) for pause, back in seen]).predict(30.0) is None


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=300))
def test_a_guard_is_open_while_half_is_used(outcomes: list[tuple[int, int]]) -> None:
    """It is open exactly while the last WINDOW outcomes wasted no more than they used."""
    guard, allowed = Guard(), list[tuple[int, int]]()
    for used, wasted in outcomes:
        last = [each for each in allowed if any(each)][-WINDOW:]
        assert guard.is_open == (sum(w for _, w in last) <= sum(u for u, _ in last))
        if guard.allows():
            guard.told(used=used, wasted=wasted)
            allowed.append((used, wasted))


@given(st.integers(1, 10_000), st.integers(0, 40))
def test_what_always_wastes_is_tried_rarely(candidates: int, late: int) -> None:
    """If all is wasted, a guard lets pass the predictions whose outcome it has not heard, then one in
    RETRY."""
    guard, passed, untold = Guard(), 0, 0
    for _ in range(candidates):
        if guard.allows():
            passed, untold = passed + 1, untold + 1
        if untold > late:
            guard.told(used=0, wasted=1)
            untold -= 1
    assert passed <= min(late + 1, WINDOW) + candidates / RETRY + 1


def test_a_guard_opens_again() -> None:
    """Trials that were used open a closed guard, once they outweigh what was wasted."""
    guard = Guard()
    for _ in range(WINDOW):
        if guard.allows():
            guard.told(used=0, wasted=1)
    assert not guard.is_open
    for _ in range(RETRY * 2):
        if guard.allows():
            guard.told(used=1, wasted=0)
    assert guard.is_open
