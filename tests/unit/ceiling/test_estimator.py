"""The estimator: prefixes, hot blocks, tiers, bounds on memory and work, a rate that falls and rises."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tierd.ceiling import estimator
from tierd.ceiling.estimator import FACTORS, RISE_MINUTES, Estimator, Level, Shares
from tierd.core.plan import Bytes, GroupQuery
from tierd.testing import chain

TOKENS = 16
MEMORY = Level(is_store=False, by_worth=False, grows=True)
STORE = Level(is_store=True, by_worth=False, grows=True)
GPU = Level(is_store=False, by_worth=False, grows=False)


def made(*blocks: float, levels: Sequence[Level] = (MEMORY,)) -> Estimator:
    """An estimator of LRU tiers that hold so many blocks."""
    beside = Estimator(levels, None, 0.0)
    beside.resize(blocks)
    return beside


def ask(beside: Estimator, hashes: Bytes, *, at_s: float = 0.0, short: int = 0) -> None:
    """A request for these blocks, worked on at once. short: tokens that the last block lacks."""
    group = GroupQuery((1,), hashes, tokens_per_block=TOKENS, tokens=TOKENS * len(hashes) - short)
    beside.ask([group], [at_s])
    while beside.waits:
        for _ in beside.steps(at_s):
            pass


def day(beside: Estimator, now: float = 0.0) -> Shares:
    return beside.shares(now)[-1]


def hits(beside: Estimator, now: float = 0.0) -> list[int]:
    """Tokens served at each factor."""
    found = day(beside, now)
    return [round(share * found.tokens) for share in found.by_factor]


def missed(beside: Estimator, now: float = 0.0) -> int:
    """Tokens that tiers without limit would not serve."""
    return day(beside, now).tokens - hits(beside, now)[-1]


def test_a_tier_holds_what_its_size_allows() -> None:
    """Of eight blocks used again, tiers of 4, 8, 16 and 32 blocks hold four, all, all, all."""
    beside = made(8)
    for _ in range(2):
        ask(beside, chain(1, 8))
    assert hits(beside) == [4 * TOKENS, *[8 * TOKENS] * 4]


def test_a_request_hits_until_its_first_missing_block() -> None:
    """A block behind a missing one is no hit, although it is held."""
    beside = made(64)
    ask(beside, chain(1, 4)[1:])
    ask(beside, chain(1, 4))
    assert hits(beside) == [0] * 5


def test_requests_of_one_batch_find_one_another() -> None:
    """A block that an earlier request of the same batch used is a hit."""
    beside = made(64)
    group = GroupQuery((1,), chain(1, 4), tokens_per_block=TOKENS, tokens=4 * TOKENS)
    beside.ask([group, group], [0.0, 0.0])
    for _ in beside.steps(0.0):
        pass
    assert hits(beside) == [4 * TOKENS] * 5


def test_equal_hashes_of_two_namespaces_are_two_blocks() -> None:
    """A block of one namespace is no hit in another one."""
    beside = made(64)
    for namespace in (1, 2):
        group = GroupQuery((namespace,), chain(1, 4), tokens_per_block=TOKENS, tokens=4 * TOKENS)
        beside.ask([group], [0.0])
    for _ in beside.steps(0.0):
        pass
    assert hits(beside) == [0] * 5


def test_what_leaves_the_memory_is_found_in_the_store() -> None:
    """Memory of 4 blocks and a store of 12 hold 16 blocks, but no short last block in the store."""
    beside = made(4, 12, levels=(MEMORY, STORE))
    ask(beside, chain(1, 16), short=1)
    ask(beside, chain(2, 4))
    ask(beside, chain(1, 16), short=1)
    same = hits(beside)[FACTORS.index(1.0)]
    assert same == 12 * TOKENS
    again = made(4, 12, levels=(MEMORY, STORE))
    ask(again, chain(1, 1), short=1)
    ask(again, chain(2, 4))
    ask(again, chain(1, 1), short=1)
    assert hits(again)[FACTORS.index(1.0)] == 0


def test_copies_ahead_take_space_of_the_store() -> None:
    """A quarter of the memory's blocks are in the store too: 8 and 16 blocks hold 22 together."""
    beside = made(8, 16, levels=(dataclasses.replace(MEMORY, copied=0.25), STORE))
    for _ in range(2):
        ask(beside, chain(1, 32))
    assert hits(beside)[FACTORS.index(1.0)] == 22 * TOKENS


def test_the_memory_of_a_gpu_does_not_grow() -> None:
    """Factors apply to host memory and stores; a GPU's memory stays as it is."""
    beside = made(8, 2, levels=(GPU, MEMORY))
    for _ in range(2):
        ask(beside, chain(1, 16))
    assert hits(beside) == [9 * TOKENS, 10 * TOKENS, 12 * TOKENS, 16 * TOKENS, 16 * TOKENS]


def test_a_hot_block_is_a_hit_though_the_sample_may_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all tokens are of one block: the estimate says so whether or not it is in the sample."""
    monkeypatch.setattr(estimator, "HELD", 1024)
    for seed in range(6):
        beside = made(1024)
        assert beside.sample.bits == 2
        hot = chain(-1 - seed, 1)
        for number in range(800):
            ask(beside, np.concatenate((hot, chain(number, 1))))
        assert day(beside).by_factor[-1] == pytest.approx(0.5, abs=0.05)


def test_work_in_a_minute_is_bounded() -> None:
    """Too many blocks in a minute halve the rate, until few enough of them are in the sample."""
    beside = made(4096)
    assert beside.sample.bits == 0
    for number in range(60):
        ask(beside, chain(number, 256), at_s=number)
    rate = beside.sample.bits
    assert 1 <= rate <= 3
    for number in range(60):
        ask(beside, chain(number, 256), at_s=60 + number)
    assert beside.sample.bits == rate
    assert len(beside.sample) <= estimator.SAMPLED_PER_MINUTE


def test_a_sample_that_says_nothing_is_not_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """If work must be so short that too few blocks are left, requests do not count."""
    monkeypatch.setattr(estimator, "SAMPLED_PER_MINUTE", 64)
    beside = made(64)
    for number in range(8):
        ask(beside, chain(number, 64))
    assert beside.is_blind
    before = day(beside).tokens
    ask(beside, chain(0, 64))
    assert day(beside).tokens == before < 8 * 64 * TOKENS


def test_the_work_of_one_request_is_bounded() -> None:
    """A request of very many blocks thins the sample until its work is short."""
    beside = made(1024)
    ask(beside, chain(1, 3 * estimator.SAMPLED_PER_MINUTE))
    assert beside.sample.bits == 2


def test_the_rate_rises_after_a_quiet_hour_and_new_blocks_count_an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that come into the sample by a rise are no misses before they can have been seen."""
    monkeypatch.setattr(estimator, "SAMPLED_PER_MINUTE", 256)
    beside = made(512)
    asked = [chain(number, 96) for number in range(4)]
    for hashes in asked:
        ask(beside, hashes)
    assert beside.sample.bits == 1
    ask(beside, asked[0])
    first = missed(beside)
    for minute in range(1, 3 * RISE_MINUTES):
        ask(beside, asked[minute % 4], at_s=60.0 * minute)
        assert missed(beside, 60.0 * minute) == first
    assert beside.sample.bits == 0
    ask(beside, chain(4, 96), at_s=60.0 * minute)
    assert missed(beside, 60.0 * minute) == first + 96 * TOKENS


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample forgets what was used longest ago."""
    monkeypatch.setattr(estimator, "ROWS", 64)
    beside = made(16)
    for number in range(20):
        ask(beside, chain(number, 16))
        assert len(beside.sample) <= 64
    ask(beside, chain(19, 16))
    ask(beside, chain(0, 16))
    assert hits(beside) == [8 * TOKENS, *[16 * TOKENS] * 4]


def test_larger_tiers_are_sampled_more_thinly() -> None:
    """No miniature holds more than HELD blocks, whatever the tiers hold."""
    beside = made(1e7)
    assert 4e7 / (1 << beside.sample.bits) <= estimator.HELD < 8e7 / (1 << beside.sample.bits)
    assert beside.held == 1e7 / (1 << beside.sample.bits)


def test_without_requests_there_is_no_share() -> None:
    """A window without tokens has no shares, and the daemon's own share is 0."""
    beside = made(8)
    assert [(window.by_factor, window.measured, window.tokens) for window in beside.shares(0.0)] == [((), 0.0, 0)] * 3


def test_windows_roll() -> None:
    """A request counts for 15 minutes in the first window, an hour in the second, a day in the
    third."""
    beside = made(8)
    ask(beside, chain(1, 8))
    beside.measured(96, 128, 0.0)
    counted = [[window.tokens for window in beside.shares(at_s)] for at_s in (899.0, 901.0, 3601.0, 86401.0)]
    assert counted == [[128, 128, 128], [0, 128, 128], [0, 0, 128], [0, 0, 0]]
    assert [window.measured for window in beside.shares(3601.0)] == [0.0, 0.0, 0.75]
    assert [window.covered_s for window in beside.shares(3601.0)] == [900.0, 3600.0, 3601.0]
