"""Bounds, scores, top-k and hot slots of granules, against loops over single numbers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.kernels.granule_cases import Clock, draw_chosen, exact_numbers
from tierd.errors import InvalidArgument
from tierd.kernels import granules
from tierd.kernels.granules import ABSENT, GRANULE_TOKENS, HotBuffer, choose

F32 = NDArray[np.float32]
HEADS, DIM = 2, 8


def keys_of(tokens: int, kind: str = "float32", seed: int = 0) -> Any:
    """Keys of both signs and many magnitudes."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], (tokens, HEADS, DIM))
    return (np.exp(rng.uniform(-6, 6, signs.shape)) * signs).astype(kind)


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 200])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_bounds_are_the_nearest_bf16_outside(tokens: int, kind: str) -> None:
    """Every key lies within its granule's bounds, and no nearer bf16 is a bound."""
    keys = keys_of(tokens, getattr(ml_dtypes, kind, kind))
    found = granules.bounds(keys)
    assert found.shape == (-(-tokens // GRANULE_TOKENS), HEADS, 2, DIM)
    as_bf16 = found.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_bf16.astype(np.float32), found)
    for i, (least, greatest) in enumerate(as_bf16.transpose(0, 2, 1, 3)):
        some = keys[i * GRANULE_TOKENS : (i + 1) * GRANULE_TOKENS].astype(np.float32)
        assert (least <= some).all()
        assert (some <= greatest).all()
        up, down = (ml_dtypes.bfloat16(way * math.inf) for way in (1, -1))
        assert (np.nextafter(least, up).astype(np.float32) > some.min(axis=0)).all()
        assert (np.nextafter(greatest, down).astype(np.float32) < some.max(axis=0)).all()


@pytest.mark.parametrize("signs", ["mixed", "against"])
def test_a_score_bounds_every_product(signs: str) -> None:
    """No query head's product with any key exceeds its granule's score, whatever the signs."""
    keys, rng = keys_of(300), np.random.default_rng(1)
    q = rng.standard_normal((3 * HEADS, DIM)).astype(np.float32)
    if signs == "against":  # keys that each query head would like best, and their opposites
        keys = np.abs(keys) * np.sign(q[::3])[None] * rng.choice([-1, 1], (300, 1, 1))
    got = granules.scores(q, granules.bounds(keys))
    for head in range(len(q)):
        products = keys[:, head // 3].astype(np.float64) @ q[head]
        best = [products[at : at + GRANULE_TOKENS].max() for at in range(0, len(products), GRANULE_TOKENS)]
        assert (got[head // 3] >= np.array(best) * (1 - 1e-5 * np.sign(best))).all()


def test_a_score_is_the_sum_of_the_greater_products() -> None:
    """With numbers whose sums are exact a score equals the sum written out."""
    q, limits = exact_numbers((4, DIM), 1), granules.bounds(exact_numbers((150, HEADS, DIM), 2))
    want = np.full((HEADS, len(limits)), -math.inf)
    for head in range(len(q)):
        for i, (least, greatest) in enumerate(limits[:, head // 2]):
            total = sum(max(x * a, x * b) for x, a, b in zip(q[head], least, greatest, strict=True))
            want[head // 2, i] = max(want[head // 2, i], total)
    np.testing.assert_array_equal(granules.scores(q, limits), want)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_what_is_not_finite_is_chosen(odd: float, sign: int) -> None:
    """A granule with a key that is not finite has the score +inf, so it is chosen."""
    keys = keys_of(10 * GRANULE_TOKENS)
    keys[400, 0, 3] = odd
    q = np.ones((HEADS, DIM), np.float32)
    q[:, 3] = sign
    got = granules.scores(q, granules.bounds(keys))
    assert np.flatnonzero(got[0] == math.inf).tolist() == [6]
    assert np.isfinite(got[1]).all()
    assert 6 in choose(got, 2)[0]
    assert np.isposinf(granules.scores(q * math.nan, granules.bounds(keys))).all()


@pytest.mark.parametrize("k", [1, 2, 5, 39, 40, 41])
@pytest.mark.parametrize("forced", [(0, 0), (1, 0), (1, 3)])
def test_the_choice_is_the_exact_top_k(k: int, forced: tuple[int, int]) -> None:
    """Forced granules and the best others are chosen, of equal scores the lower ordinal, in order."""
    first, last = forced
    if k < max(1, first + last):
        with pytest.raises(InvalidArgument, match=r"^k: "):
            choose(np.zeros((1, 40), np.float32), k, forced_first=first, forced_last=last)
        return
    rng = np.random.default_rng(k)
    values = rng.choice(np.array([-math.inf, -1, -0.0, 0.0, 1, math.inf, math.nan], np.float32), (3, 40))
    got = choose(values, k, forced_first=first, forced_last=last)
    assert got.dtype == np.int32
    for row, chosen in zip(values, got, strict=True):

        def rank(i: int, row: F32 = row) -> tuple[bool, float, int]:
            return (first <= i < 40 - last, math.inf * -1 if math.isnan(row[i]) else -row[i], i)

        assert chosen.tolist() == sorted(sorted(range(40), key=rank)[:k])


def test_numpy_and_torch_choose_alike() -> None:
    """Bounds, scores and choices of torch tensors equal those of numpy arrays."""
    torch = pytest.importorskip("torch")
    keys, q = exact_numbers((200, HEADS, DIM), 3), exact_numbers((4, DIM), 4)
    limits = granules.bounds(torch.from_numpy(keys))
    np.testing.assert_array_equal(limits.numpy(), granules.bounds(keys))
    got = granules.scores(torch.from_numpy(q), limits)
    np.testing.assert_array_equal(got.numpy(), granules.scores(q, limits.numpy()))
    np.testing.assert_array_equal(choose(got, 3, forced_last=1).numpy(), choose(got.numpy(), 3, forced_last=1))


def test_hot_slots_follow_a_clock() -> None:
    """Over 10,000 steps slots, misses and state equal those of a clock with a moving hand."""
    rng = np.random.default_rng(5)
    for slots, count, granule_count in ((12, 4, 40), (7, 7, 30), (20, 6, 15), (1, 1, 3)):
        hot = HotBuffer(HEADS, granule_count, slots)
        clocks = [Clock(slots) for _ in range(HEADS)]
        for _ in range(2500):
            chosen = draw_chosen(rng, HEADS, granule_count, int(rng.integers(0, count + 1)))
            got = hot.resolve(chosen)
            for head, clock in enumerate(clocks):
                assert (got.slots[head].tolist(), got.is_miss[head].tolist()) == clock.step(chosen[head].tolist())
                assert clock.owners == [None if granule == ABSENT else granule for granule in hot.owners[head].tolist()]
                assert len({*got.slots[head].tolist()}) == chosen.shape[1]
                assert (hot.where[head, chosen[head]] == got.slots[head]).all()
            assert (hot.where != ABSENT).sum() == (hot.owners != ABSENT).sum()


def test_more_granules_than_hot_slots_are_refused() -> None:
    """A step that chooses more granules than there are slots changes nothing."""
    hot = HotBuffer(HEADS, 9, 4)
    with pytest.raises(InvalidArgument, match=r"^chosen: has shape \[2, 5\]"):
        hot.resolve(draw_chosen(np.random.default_rng(6), HEADS, 9, 5))
    assert (hot.where == ABSENT).all()
