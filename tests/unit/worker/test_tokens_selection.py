"""Token policies alone: the tokens and pages that they choose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tierd.errors import InvalidArgument
from tierd.kernels import PagedBatch, paged_attention
from tierd.worker.report import Request
from tierd.worker.tokens.choice import POLICIES, TokenChoice
from tierd.worker.tokens.policy import Budget, Place, top
from tierd.worker.tokens.snapkv import KERNEL, WINDOW, pooled
from tierd.worker.tokens.streaming import SINKS
from tierd.worker.tokens.weights import PARTS, bounds_of, key_weights

HEADS = 2
DROPPING = ("h2o", "streaming", "snapkv", "random")
SCORES = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, np.inf, -np.inf, np.nan])


@given(data=st.data(), n=st.integers(1, 12))
def test_top_takes_the_greatest_and_of_equals_the_lower(data: st.DataObject, n: int) -> None:
    """The fixed first and last ones, then the greatest scores, of equal ones the lower ordinal, in
    the exact number and order."""
    scores = data.draw(arrays(np.float64, (HEADS, n), elements=SCORES))
    first = data.draw(st.integers(0, n))
    last = data.draw(st.integers(0, n - first))
    count = data.draw(st.integers(first + last, n))
    for row, got in zip(scores, top(scores, count, first=first, last=last), strict=True):
        fixed = {*range(first), *range(n - last, n)}
        free = sorted(set(range(n)) - fixed, key=lambda i: (-np.inf if np.isnan(row[i]) else row[i], -i), reverse=True)
        assert got.tolist() == sorted([*fixed, *free[: count - len(fixed)]])


@pytest.mark.parametrize("count", [2, 6])
def test_top_refuses_impossible_counts(count: int) -> None:
    """A count below the fixed ones or above all raises InvalidArgument."""
    with pytest.raises(InvalidArgument, match="top"):
        top(np.zeros((1, 5)), count, first=1, last=2)


@given(name=st.sampled_from(DROPPING), prompt=st.integers(1, 60), keep=st.floats(0.01, 1), data=st.data())
def test_the_number_of_kept_tokens_is_exact(name: str, prompt: int, keep: float, data: st.DataObject) -> None:
    """After each drop every head holds as many tokens as the budget says, rising, the last one too."""
    choice = TokenChoice(name, keep)
    policy = choice.policy(Place(0, HEADS, prompt, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    held = prompt
    policy.note(rng.random((HEADS, held)))
    for seen in range(prompt, prompt + 12):
        kept = policy.keep(held, seen)
        want = min(seen, max(choice.least, round(keep * prompt) + seen - prompt))
        assert (kept is None) == (held <= want or (name == "snapkv" and seen > prompt))
        if kept is not None:
            assert kept.shape == (HEADS, want)
            assert (np.diff(kept, axis=1) > 0).all()
            assert kept.max() < held
            assert name == "random" or (kept[:, -1] == held - 1).all()
            held = want
        held += 1
        policy.note(rng.random((HEADS, held)))


@given(seed=st.integers(0, 999), tokens=st.integers(2, 10))
def test_h2o_keeps_recent_tokens_and_heavy_hitters(seed: int, tokens: int) -> None:
    """Half of the budget are the last tokens; of the rest those with most attention so far stay."""
    rng = np.random.default_rng(seed)
    policy = TokenChoice("h2o", tokens=tokens).policy(Place(0, 1, 12, 4))
    mass = dict.fromkeys(range(12), 0.0)

    def note() -> None:
        weights = rng.integers(0, 4, len(mass)).astype(float)
        policy.note(weights[None])
        for token, weight in zip(mass, weights, strict=True):
            mass[token] += weight

    note()
    for seen in range(12, 20):
        held = list(mass)
        kept = policy.keep(len(held), seen)
        recent = held[len(held) - tokens // 2 :]
        heavy = sorted(held[: len(held) - tokens // 2], key=lambda token: (-mass[token], token))
        want = sorted([*recent, *heavy[: tokens - tokens // 2]])
        assert [held[slot] for slot in (range(len(held)) if kept is None else kept[0])] == want
        mass = {token: mass[token] for token in want} | {seen: 0.0}
        note()


def test_streaming_keeps_sinks_and_a_window() -> None:
    """Each head keeps the first four and the last ones; with constant tokens, however many were seen."""
    policy = TokenChoice("streaming", tokens=10).policy(Place(0, HEADS, 30, 4))
    for held, seen in ((30, 30), (11, 5000)):
        kept = policy.keep(held, seen)
        assert kept is not None
        assert kept.tolist() == [[*range(SINKS), *range(held - 6, held)]] * HEADS


def test_snapkv_keeps_its_window_and_the_neighbours_of_attention() -> None:
    """Beside the window, the tokens around the most attended one are kept, once, at the prompt's end."""
    policy = TokenChoice("snapkv", tokens=WINDOW * 2).policy(Place(0, 1, 400, 4))
    weights = np.zeros((1, 400))
    weights[0, 100] = 1.0
    weights[0, -WINDOW:] = 50.0
    policy.note(weights)
    kept = policy.keep(400, 400)
    assert kept is not None
    rest = WINDOW - KERNEL
    assert kept[0].tolist() == [*range(rest), *range(98, 103), *range(400 - WINDOW, 400)]
    assert policy.keep(WINDOW * 2 + 1, 401) is None


def test_pooling_is_a_mean_of_five() -> None:
    """Each pooled score is the mean of itself and two on both sides, with 0 beyond the ends."""
    np.testing.assert_allclose(pooled(np.array([[5.0, 0, 0, 10, 0, 0]])), [[1, 3, 3, 2, 2, 2]])


@given(seed=st.integers(0, 999), rows=st.integers(1, 5), slots=st.integers(5, 20))
def test_weights_of_keys_are_those_of_attention(seed: int, rows: int, slots: int) -> None:
    """Summed over a page, the weights of keys equal the masses that attention reports."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, 4, 8), dtype=np.float32)
    pages = rng.standard_normal((slots, 2, 1, HEADS, 8), dtype=np.float32)
    batch = PagedBatch([0, rows], [slots], [range(slots)])
    done = paged_attention(q, list(pages), batch, with_mass=True)
    assert done.mass is not None
    want = done.mass[0].reshape(HEADS, -1, slots).sum(axis=1)
    np.testing.assert_allclose(key_weights(q, pages[:, 0, 0], done.lse), want, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 999), keep=st.floats(0.01, 1))
def test_quest_reads_pages_with_great_keys_and_decoded_ones(seed: int, keep: float) -> None:
    """Each head reads as many full pages of the prompt as hold the budget, and all pages with
    decoded tokens. The page with the greatest key is among them."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((9, 4, HEADS, 8), dtype=np.float32)
    q = rng.standard_normal((4, 8), dtype=np.float32)
    page = int(rng.integers(0, 9))
    keys[page, 2] = 100 * q.reshape(HEADS, 2, 8).mean(axis=1)
    policy = TokenChoice("quest", keep).policy(Place(0, HEADS, 38, 4))
    pages = policy.read(q, np.stack([bounds_of(one) for one in keys]), 12)
    count = math.ceil(max(1, round(38 * keep)) / 4)
    if count >= 9:
        assert pages is None
        return
    assert pages is not None
    for head in pages:
        assert len(set(head)) == len(head) == count + 3
        assert {page, 9, 10, 11} <= set(head)


@given(seed=st.integers(0, 999), tokens=st.integers(2, 16))
def test_bounds_of_a_page_are_never_below_its_scores(seed: int, tokens: int) -> None:
    """For any query the greatest score of a part's keys is at most its bound."""
    rng = np.random.default_rng(seed)
    keys, q = rng.standard_normal((tokens, HEADS, 8), dtype=np.float32), rng.standard_normal(8, dtype=np.float32)
    bounds = bounds_of(keys)
    assert bounds.shape == (PARTS, HEADS, 2, 8)
    for part, bound in zip(np.array_split(keys, PARTS), bounds, strict=True):
        most = np.maximum(q * bound[:, 0], q * bound[:, 1]).sum(axis=-1)
        assert ((part * q).sum(axis=-1) <= most + 1e-4).all()


def test_budgets_never_fall() -> None:
    """The number to keep rises with the tokens seen, so that no token needs to come back."""
    for keep in (0.01, 0.2, 0.5, 0.99, 1.0):
        for budget in (Budget(keep), Budget(keep, tokens=70)):
            counts = [budget.of(seen, prompt=50, least=2) for seen in range(50, 300)]
            assert counts == sorted(counts)
            assert all(count <= seen for seen, count in enumerate(counts, start=50))
            assert budget.tokens in (0, counts[-1])


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_fractions_outside_are_refused(keep: float) -> None:
    """A fraction that is not in (0, 1] is refused by name, value and range."""
    with pytest.raises(InvalidArgument, match=r"token_policy\.keep: .*\(0, 1\]"):
        Request((1,), token_policy=TokenChoice("h2o", keep)).checked()


def test_unknown_names_and_numbers_are_refused() -> None:
    """An unknown policy is refused with the known ones, and a number below the policy's least."""
    with pytest.raises(InvalidArgument, match=r"token_policy\.name: 'h3o' .*h2o, streaming, snapkv, quest"):
        Request((1,), token_policy=TokenChoice("h3o")).checked()
    with pytest.raises(InvalidArgument, match=r"token_policy\.tokens: 4 .*5"):
        TokenChoice("streaming", tokens=SINKS).checked()
    with pytest.raises(InvalidArgument, match=r"token_policy\.tokens: -1"):
        TokenChoice("quest", tokens=-1).checked()
    assert all(TokenChoice(name).checked() for name in POLICIES)
