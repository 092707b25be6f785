"""The duel of the order by worth and LRU: its decision, its window and its cost."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.depth import count, report
from tests.named import add, numbered
from tests.unit.policies.test_reuse_index import numbered_metas
from tierd.core.formats.model import TierKind
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction import shadows
from tierd.policies.eviction.duel import WINDOW_SHARE, Duel
from tierd.policies.eviction.lru import Lru
from tierd.policies.reuse import Traffic

NAMES, PLACES = 64, 16


def duel(blocks: Blocks, *, kind: TierKind = TierKind.HOST, by_worth: bool) -> Duel:
    """A duel with a fixed decision."""
    policy = Duel(blocks, Traffic(blocks), kind)
    policy._shadows.leads = by_worth
    return policy


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int64)


@pytest.mark.parametrize("seed", range(count(test=6, nightly=100, weekly=1_000)))
def test_durable_blocks_stay_on_a_store_as_long_as_under_lru(seed: int) -> None:
    """Under the order by worth, a store evicts a durable block no sooner than LRU."""
    dice, blocks = np.random.default_rng(seed), numbered(NAMES)
    blocks.durable[:NAMES] = dice.random(NAMES) < dice.choice([0.2, 0.8])
    policy, plain, here, there = duel(blocks, kind=TierKind.NVME, by_worth=True), Lru(blocks), set[int](), set[int]()
    free, left = np.zeros(NAMES, bool), 0
    for now in range(600):
        block, gone = int(NAMES * dice.random() ** 2), ids()
        blocks.group[block] = dice.integers(1, 40)
        blocks.last_used[block] = now
        for cache, held in ((policy, here), (plain, there)):
            if block in held:
                cache.touch(ids(block), float(now))
                continue
            if len(held) == PLACES:
                victims = cache.victims(1, free)
                assert victims is not None
                cache.forget(victims)
                held -= set(victims.tolist())
                gone = victims if cache is policy else gone
            cache.track(ids(block), float(now))
            held.add(block)
        left += len(gone)
        assert not any(blocks.durable[one] and one in there for one in gone.tolist())
    assert left > 50


@pytest.mark.parametrize("kind", [TierKind.HOST, TierKind.NVME])
@pytest.mark.parametrize("seed", range(count(test=4, nightly=60, weekly=600)))
def test_each_block_waits_or_is_in_the_order_by_worth(
    seed: int, kind: TierKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block is in exactly one place: the window, the durable queue or the order by worth."""
    monkeypatch.setattr("tierd.policies.eviction.duel.WINDOW_SHARE", 1 / 8)
    dice, blocks, here = np.random.default_rng(seed), numbered(600), np.zeros(600, bool)
    policy = duel(blocks, kind=kind, by_worth=bool(seed % 2))
    for now in range(150):
        some = dice.permutation(600)[: int(dice.choice([1, 3, 40, 300]))]
        blocks.durable[some[: len(some) // 2]] = True
        blocks.touch(some, float(now))
        verb = dice.integers(3)
        if verb == 0:
            policy.forget(some[here[some]])
        elif verb == 1:
            policy.touch(some[here[some]], float(now))
        else:
            policy.track(some[~here[some]], float(now))
        here[some] = here[some] if verb == 1 else verb == 2
        held, stop = np.flatnonzero(here), policy._lru.next_stamp
        waiting, _ = policy._used(policy._ripe, stop)
        parts = [waiting, *(held[which.has(held)] for which in (policy._kept, policy._worth))]
        assert sorted(np.concatenate(parts).tolist()) == held.tolist()
        assert len(policy) == len(held) == len(waiting) + len(policy._kept) + len(policy._worth)
        assert set(policy.victims(len(held), np.zeros(600, bool)).tolist()) == set(held.tolist())  # type: ignore[union-attr]


def test_the_newest_are_the_last_to_leave() -> None:
    """Worthless blocks stay while they are in the window, the last 256th, and are evicted first after it."""
    blocks = Blocks()
    known = add(blocks, [(number,) for number in range(600)])
    policy = duel(blocks, by_worth=True)
    blocks.group[known], window = 8, int(WINDOW_SHARE * 500)
    blocks.group[known[500 - window : 500]] = 1  # the group of worth 0
    policy.track(known[:500], 0.0)
    free = np.zeros(600, bool)
    assert set(policy.victims(500, free)[-window:].tolist()) == set(known[500 - window : 500].tolist())  # type: ignore[index]
    policy.track(known[500:], 1.0)
    assert set(policy.victims(window, free).tolist()) == set(known[500 - window : 500].tolist())  # type: ignore[union-attr]


def test_shadows_stay_small_and_no_seed_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is bounded for any tier size, and does not depend on the seed of the keys."""
    monkeypatch.setattr(shadows, "SAMPLED", 64)
    seen = []
    for seed in (1, 2):
        dice, blocks = np.random.default_rng(0), Blocks(seed=seed)
        known = add(blocks, [(number,) for number in range(2_000)])
        policy = duel(blocks, by_worth=False)
        policy.track(known, 0.0)
        for now in range(1, 100):
            some = dice.permutation(2_000)[:20]
            blocks.touch(some, float(now))
            policy.forget(some[:10])
            policy.touch(some[10:], float(now))
            policy.track(some[:10], float(now))
        shadow = policy._shadows
        assert 0 < len(shadow._lru) <= 64 and 0 < len(shadow._worth) <= 64
        assert len(shadow._row) <= 128 and len(shadow._key) <= 4_500
        seen.append((shadow.horizon, shadow._bits, sorted(shadow._spread[list(shadow._row.values())].tolist())))
    assert seen[0] == seen[1] and seen[0][0] > 0


@pytest.mark.parametrize("by_worth", [False, True])
def test_victims_cost_what_they_are_and_not_what_there_is(by_worth: bool) -> None:
    """64 victims of 100,000 blocks cost a few times those of 4,000, with new and pinned blocks in the way."""
    took_us = []
    for size in (4_000, 100_000):
        blocks, known = Blocks(), np.arange(size)
        blocks.add(numbered_metas(size), 0.0)
        policy = duel(blocks, by_worth=by_worth)
        for start in range(0, size, 500):
            policy.track(known[start : start + 500], start / 500)
        pinned = np.zeros(size, bool)
        pinned[::7] = True
        policy.victims(64, pinned)
        times = []
        for _ in range(15):
            begun = time.thread_time()
            assert policy.victims(64, pinned) is not None
            times.append(time.thread_time() - begun)
        took_us.append(min(times) * 1e6)
    report("64 victims", by_worth=by_worth, small_us=round(took_us[0]), large_us=round(took_us[1]))
    assert took_us[1] < 4 * took_us[0] + 100
