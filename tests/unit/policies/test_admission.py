"""Each admission policy beyond the contract, and the threshold that follows the budget."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests.contract.test_admission import SIZE, chain, known, sizes, used
from tests.depth import count, report
from tierd.core.admission import Chance, Verdict
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.index.blocks import Blocks
from tierd.policies.admission import ADMISSION, learned
from tierd.policies.admission.floor import SAMPLED, Floor
from tierd.policies.admission.learned import FLOOR, Learned
from tierd.policies.admission.tails import NAMESPACE_LIMIT, Tails

SEED = int(os.environ.get("ADMISSION_SEED", "20261122"))
NOBODY = np.zeros(0, np.int64)


def spec(name: str = "learned", *, rate: float = 0.0, burst_s: float = 3600.0) -> TierSpec:
    return TierSpec(TierKind.NVME, 0, 1 << 30, 1 << 20, admission=name, wear_bytes_per_s=rate, wear_burst_s=burst_s)


def verdicts(name: str, blocks: Blocks, uses: int) -> list[int]:
    """The verdicts on a chain of three blocks after `uses` uses."""
    policy, ids = ADMISSION[name](spec(name), blocks, None), chain(blocks, 1, 3)
    policy.touch(ids, 0.0)  # the blocks come
    for now in range(1, uses):
        used(policy, blocks, ids, float(now))
    return policy.admit(ids, sizes(ids), 50.0).tolist()


@pytest.mark.parametrize(("name", "uses"), [("all", 1), ("learned", 1), ("second-touch", 2), ("tinylfu", 2)])
def test_how_many_uses_make_a_write(name: str, uses: int) -> None:
    """`all` and `learned` without a learner write at the first use, the usual filters at the second."""
    assert verdicts(name, Blocks(), uses) == [Verdict.WRITE] * 3
    if uses > 1:
        assert verdicts(name, Blocks(), uses - 1) == [Verdict.UNLIKELY] * 3


def test_second_touch_remembers_whom_it_declined() -> None:
    """A declined block that leaves and returns is written; a new block is not."""
    blocks = Blocks()
    policy, ids = ADMISSION["second-touch"](spec(), blocks, None), chain(blocks, 1, 3)
    assert policy.admit(ids, sizes(ids), 1.0).tolist() == [Verdict.UNLIKELY] * 3
    blocks.fade(ids)
    others = chain(blocks, 10, 3)
    assert policy.admit(others, sizes(others), 2.0).tolist() == [Verdict.UNLIKELY] * 3
    again = chain(blocks, 1, 3)
    assert policy.admit(again, sizes(again), 3.0).tolist() == [Verdict.WRITE] * 3


def test_tinylfu_forgets_what_is_no_longer_used() -> None:
    """After two samples of other uses, two old uses no longer cause a write."""
    blocks = Blocks()
    policy, ids = ADMISSION["tinylfu"](spec(), blocks, None), chain(blocks, 1, 3)
    for now in (0.0, 1.0, 2.0):
        policy.touch(ids, now)
    assert policy.admit(ids, sizes(ids), 3.0).tolist() == [Verdict.WRITE] * 3
    others = known(blocks, list(range(100, 4100)))
    for now in range(20):
        policy.touch(others, 4.0 + now)
    assert policy.admit(ids, sizes(ids), 30.0).tolist() == [Verdict.UNLIKELY] * 3


ROUND = 400
"""Blocks of SIZE bytes per turn: more than the small tier of the tests below holds."""


def rounds(policy: Learned, blocks: Blocks, *, turns: int, used_share: float, first: int = 1) -> list[int]:
    """Offers ROUND new blocks a turn and uses a share of them again. Returns the writes of each turn."""
    written = []
    for turn in range(turns):
        ids = known(blocks, list(range(first + turn * ROUND, first + (turn + 1) * ROUND)))
        written.append(int(np.count_nonzero(policy.admit(ids, sizes(ids), float(turn)) == Verdict.WRITE)))
        used(policy, blocks, ids[: round(used_share * ROUND)], turn + 0.5)
        blocks.fade(ids)
    return written


def small_learned(blocks: Blocks, chance: float) -> Learned:
    """A policy over a tier of half of ROUND blocks. The learner gives each block this chance."""
    small = TierSpec(TierKind.NVME, 0, ROUND // 2 * SIZE, SIZE, admission="learned")
    return Learned(small, blocks, lambda ids, now: np.full(len(ids), chance))


def test_the_floor_stands_while_few_below_it_are_used_again() -> None:
    """Blocks below the floor are written until a tier of them shows few uses; then none is."""
    blocks = Blocks()
    assert rounds(small_learned(blocks, 0.99 * FLOOR), blocks, turns=4, used_share=0.1) == [ROUND, 0, 0, 0]


def test_the_floor_falls_when_more_below_it_are_used_again_than_the_learner_says() -> None:
    """Blocks of little chance are written while more of them than the floor's share are used again."""
    blocks = Blocks()
    policy = small_learned(blocks, 0.99 * FLOOR)
    assert rounds(policy, blocks, turns=4, used_share=0.3) == [ROUND] * 4
    assert rounds(policy, blocks, turns=12, used_share=0.0, first=10_000)[-1] == 0
    assert rounds(policy, blocks, turns=12, used_share=1.0, first=20_000)[-1] == ROUND


def test_blocks_at_the_floor_are_written_whether_it_stands_or_not() -> None:
    """A chance of FLOOR is enough for a write, and such blocks are no evidence."""
    blocks = Blocks()
    assert rounds(small_learned(blocks, FLOOR), blocks, turns=4, used_share=0.0) == [ROUND] * 4


@pytest.mark.parametrize("used_share", [0.1, 0.3])
def test_a_sample_of_a_large_tier_tells_as_well(used_share: float) -> None:
    """From a bounded sample of a large tier, the floor measures the share of blocks used again."""
    floor, rng, step = Floor(FLOOR, 20 * SAMPLED * SIZE), np.random.default_rng(SEED), SAMPLED
    for _ in range(count(test=50, nightly=400, weekly=400)):
        names = rng.integers(0, 1 << 63, step, np.uint64)
        floor.offered(names, np.ones(step, bool), np.full(step, SIZE))
        floor.used(names[: round(used_share * step)])
        assert len(floor) <= SAMPLED
    assert floor.stands() == (used_share < FLOOR)


def demand(chance: Chance | None, *, rate: float, per_s: int, span_s: int, step_s: int = 5) -> tuple[int, list[int]]:
    """Offers about `per_s` new blocks a second. Returns the written bytes and block numbers."""
    blocks, written, numbers = Blocks(), 0, []
    policy = Learned(spec(rate=rate), blocks, chance)
    policy.touch(NOBODY, 0.0)
    for now in range(step_s, span_s, step_s):
        ids = known(blocks, list(range(1 + now * per_s, 1 + (now + step_s) * per_s)))
        passed = policy.admit(ids, sizes(ids), float(now)) == Verdict.WRITE
        numbers += (blocks.hash[ids[passed], 0]).tolist()
        policy.wrote(int(passed.sum()) * SIZE, float(now))
        written += int(passed.sum()) * SIZE
        blocks.fade(ids)
    return written, numbers


def random_chance(blocks_seed: int = SEED) -> Chance:
    rng = np.random.default_rng(blocks_seed)
    return lambda ids, now: FLOOR + (1 - FLOOR) * rng.beta(2.0, 3.0, len(ids))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_what_is_written_meets_the_budget(share: float) -> None:
    """Of random chances the policy writes within 5 % of the budget and never above it."""
    per_s, span_s = 20, 3600 * count(test=1, nightly=8, weekly=24)
    rate = share * per_s * SIZE
    written, _ = demand(random_chance(), rate=rate, per_s=per_s, span_s=span_s)
    report("admission.budget", share=share, used=round(written / (rate * span_s), 3), seed=SEED)
    assert 0.95 * rate * span_s <= written <= rate * span_s


def test_it_is_the_best_that_is_written() -> None:
    """With a budget for three in ten, the mean written chance is near that of the best three tenths."""
    passed: list[float] = []
    rng = np.random.default_rng(SEED)
    drawn: dict[int, float] = {}

    def chance(ids: np.ndarray, now: float) -> np.ndarray:
        values = rng.random(len(ids))
        drawn.update({int(now) * 20 + 1 + row: value for row, value in enumerate(values)})
        return values

    _, numbers = demand(chance, rate=0.3 * 20 * SIZE, per_s=20, span_s=3600)
    passed = [drawn[number] for number in numbers]
    best = np.sort(np.array(list(drawn.values())))[-len(passed) :]
    report("admission.best", mean=round(float(np.mean(passed)), 3), ideal=round(float(best.mean()), 3), seed=SEED)
    assert np.mean(passed) >= 0.97 * best.mean()


def test_a_budget_above_the_demand_lets_everything_through() -> None:
    """If the refill is twice the demand, no block above the floor is declined."""
    written, _ = demand(random_chance(), rate=2.0 * 20 * SIZE, per_s=20, span_s=1800)
    assert written >= 0.98 * 20 * 1795 * SIZE


def test_the_price_of_a_write_is_the_least_chance_that_passed() -> None:
    """Uniform chances and a budget for 0.3 give a price near 0.7. No budget, or one for all, gives 0.0."""
    for share, price in ((0.3, 0.7), (0.0, 0.0), (3.0, 0.0)):
        rng, blocks = np.random.default_rng(SEED), Blocks()
        policy = Learned(spec(rate=share * 20 * SIZE), blocks, lambda ids, now, rng=rng: rng.random(len(ids)))
        policy.touch(NOBODY, 0.0)
        for now in range(5, count(test=1800, nightly=3600, weekly=3600), 5):
            ids = known(blocks, list(range(1, 101)))
            passed = policy.admit(ids, sizes(ids), float(now)) == Verdict.WRITE
            policy.wrote(int(passed.sum()) * SIZE, float(now))
            blocks.fade(ids)
        assert policy.price() == pytest.approx(price, abs=0.05)


def test_a_demand_that_grows_tenfold_is_met_at_once() -> None:
    """After a tenfold jump in demand, writes stay within the budget and are the better part."""
    rng, blocks = np.random.default_rng(SEED), Blocks()
    values: np.ndarray = np.zeros(0)
    policy = Learned(spec(rate=10.0 * SIZE), blocks, lambda ids, now: values[: len(ids)])
    policy.touch(NOBODY, 0.0)
    passed: list[float] = []
    for now in range(5, 3600, 5):
        ids = known(blocks, list(range(1, 1 + 5 * (20 if now < 1800 else 200))))
        values = FLOOR + (1 - FLOOR) * rng.random(len(ids))
        yes = policy.admit(ids, sizes(ids), float(now)) == Verdict.WRITE
        policy.wrote(int(yes.sum()) * SIZE, float(now))
        passed += values[yes].tolist() if now > 2100 else []
        blocks.fade(ids)
    report("admission.tenfold", written=len(passed), mean=round(float(np.mean(passed)), 3), seed=SEED)
    assert 0.9 * 10 * 1500 <= len(passed) <= 1.1 * 10 * 1500
    assert np.mean(passed) >= 0.9, "of the best twentieth the mean would be 0.975"


def test_no_tail_is_written_without_its_head() -> None:
    """With equal chances and half a budget, the written part of a chain begins at its first block."""
    blocks, gaps, some = Blocks(), 0, 0
    policy = Learned(spec(rate=20.0 * SIZE), blocks)
    policy.touch(NOBODY, 0.0)
    for now in range(1, 601):
        ids, yes = chain(blocks, 1 + 100 * now, 40), []
        for part in (ids[:24], ids[24:]):  # like demotion: in parts, the last block first
            yes += (policy.admit(part, sizes(part), float(now)) == Verdict.WRITE).tolist()
            policy.wrote(sum(yes[-len(part) :]) * SIZE, float(now))
        some += int(any(yes))
        gaps += int(any(yes) and not all(yes[yes.index(True) :]))
        blocks.fade(ids)
    report("admission.chains", some=some, gaps=gaps)
    assert some >= 250 and gaps <= 0.02 * some


def test_namespaces_that_passed_are_forgotten() -> None:
    """The memory of namespaces is bounded."""
    blocks = Blocks()
    tails = Tails(blocks)
    ids = known(blocks, list(range(1, 2001)))
    for start in range(0, 2 * NAMESPACE_LIMIT, 2000):
        blocks.namespace[ids] = np.arange(start, start + 2000)
        tails.are_short(ids)
    assert len(tails._most_tokens) <= NAMESPACE_LIMIT


def test_a_chain_that_cannot_be_paid_whole_is_written_from_its_head() -> None:
    """A budget of ten blocks writes the first ten of forty, though the tail is asked about first."""
    blocks = Blocks()
    policy = Learned(spec(rate=1.0 * SIZE), blocks)
    policy.touch(NOBODY, 0.0)
    ids, written = chain(blocks, 1, 40), []
    for part in (ids[:16], ids[16:32], ids[32:]):
        yes = policy.admit(part, sizes(part), 10.0) == Verdict.WRITE
        policy.wrote(int(yes.sum()) * SIZE, 10.0)
        blocks.kept[part[yes]] = True
        written += blocks.position[part[yes]].tolist()
    assert sorted(written) == list(range(10))


def test_what_a_store_has_need_not_be_paid_again() -> None:
    """If the store has the head of a chain, only the tail must fit the budget."""
    blocks = Blocks()
    policy = Learned(spec(rate=1.0 * SIZE), blocks)
    policy.touch(NOBODY, 0.0)
    ids = chain(blocks, 1, 40)
    blocks.kept[ids[4:]] = True
    assert (policy.admit(ids[:4], sizes(ids[:4]), 5.0) == Verdict.WRITE).all()


def under_budget(blocks: Blocks, ids: np.ndarray, *, paid: int) -> Learned:
    """A policy that can pay `paid` blocks at time 1."""
    policy = Learned(spec(rate=float(paid * SIZE)), blocks, None)
    policy.touch(ids, 0.0)
    return policy


def test_parents_that_go_round_are_paid_once() -> None:
    """In a cycle of parents each block precedes the others and is paid once."""
    blocks = Blocks()
    ids = known(blocks, [1, 2], parents=[2, 1])
    assert under_budget(blocks, ids, paid=2).admit(ids, sizes(ids), 1.0).tolist() == [Verdict.WRITE] * 2
    assert under_budget(blocks, ids, paid=1).admit(ids, sizes(ids), 1.0).tolist() == [Verdict.BUDGET] * 2


def test_a_bill_is_of_so_many_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail with more than BEFORE_LIMIT blocks before it waits; its head is written when asked about."""
    monkeypatch.setattr(learned, "BEFORE_LIMIT", 16)
    blocks = Blocks()
    ids = chain(blocks, 1, 40)
    policy = under_budget(blocks, ids, paid=40)
    verdicts = np.concatenate([policy.admit(part, sizes(part), 1.0) for part in (ids[:20], ids[20:])])
    assert (verdicts[:20] == Verdict.BUDGET).all() and (verdicts[-9:] == Verdict.WRITE).all()


def test_a_chain_that_cannot_be_paid_is_walked_once() -> None:
    """Verdicts on 200 blocks at the end of a long chain take under 20 times as long as on one."""
    blocks = Blocks()
    ids, took_s = chain(blocks, 1, 20_000), []
    for asked in (ids[:1], ids[:200]):
        policy = under_budget(blocks, ids, paid=15_000)
        began = time.perf_counter()
        assert set(policy.admit(asked, sizes(asked), 1.0).tolist()) == {Verdict.BUDGET}
        took_s.append(time.perf_counter() - began)
    report("verdicts at the end of a chain of 20,000", one_s=took_s[0], two_hundred_s=took_s[1])
    assert took_s[1] < 20 * took_s[0]
