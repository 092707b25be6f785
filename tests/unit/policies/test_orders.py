"""Each eviction policy against the plainest equivalent program."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.index.blocks import Blocks
from tierd.policies.eviction import order as order_module
from tierd.policies.eviction.lfu import AgedLfu
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.order import UseOrder

NONE_PINNED = np.zeros(64, dtype=bool)
accesses = st.lists(st.integers(0, 15), min_size=1, max_size=300)


def evictions(policy: Lru | AgedLfu, sequence: list[int], capacity: int) -> list[int]:
    """The evictions, in order, of a cache of this size over the sequence."""
    held: set[int] = set()
    left = []
    for now, block in enumerate(sequence):
        one = np.array([block])
        if block in held:
            policy.touch(one, now)
            continue
        if len(held) == capacity:
            victims = policy.victims(1, NONE_PINNED)
            assert victims is not None
            policy.forget(victims)
            held.remove(int(victims[0]))
            left.append(int(victims[0]))
        policy.track(one, now)
        held.add(block)
    return left


def plain_lru(sequence: list[int], capacity: int) -> list[int]:
    held: list[int] = []
    left = []
    for block in sequence:
        if block in held:
            held.remove(block)
        elif len(held) == capacity:
            left.append(held.pop(0))
        held.append(block)
    return left


def plain_aged_lfu(sequence: list[int], capacity: int) -> list[int]:
    """The pseudocode of the paper: K = F + L, L := K of the evicted block."""
    uses: dict[int, int] = {}
    keys: dict[int, tuple[int, int]] = {}
    left, age = [], 0
    for now, block in enumerate(sequence):
        if block not in keys and len(keys) == capacity:
            victim = min(keys, key=lambda b: keys[b])
            age = keys.pop(victim)[0]
            del uses[victim]
            left.append(victim)
        uses[block] = uses.get(block, 0) + 1
        keys[block] = (uses[block] + age, now)
    return left


@given(sequence=accesses, capacity=st.integers(1, 8))
def test_lru_is_the_textbook_lru(sequence, capacity):
    """Evictions equal those of a list that is kept in order of use."""
    assert evictions(Lru(Blocks()), sequence, capacity) == plain_lru(sequence, capacity)


@given(sequence=accesses, capacity=st.integers(1, 8))
def test_lfu_is_the_pseudocode_of_its_paper(sequence, capacity):
    """Evictions equal those of LFU-DA written down as in the paper."""
    assert evictions(AgedLfu(Blocks()), sequence, capacity) == plain_aged_lfu(sequence, capacity)


def test_ageing_lets_go_of_past_fame():
    """A block with a hundred old uses is evicted once later evictions outnumber its uses."""
    policy = AgedLfu(Blocks())
    policy.track(np.array([0]), 0.0)
    for now in range(100):
        policy.touch(np.array([0]), now)
    left = evictions_from(policy, range(1, 400))
    assert 0 in left and left.index(0) > 50


def evictions_from(policy: AgedLfu, fresh: range) -> list[int]:
    """Adds fresh blocks one by one, each used twice, to a cache of two."""
    left, pinned = [], np.zeros(fresh.stop, dtype=bool)
    for block in fresh:
        policy.track(np.array([block]), 0.0)
        policy.touch(np.array([block]), 0.0)
        if len(policy) > 2:
            victims = policy.victims(1, pinned)
            assert victims is not None
            policy.forget(victims)
            left.append(int(victims[0]))
    return left


def test_dropping_a_hot_block_does_not_age_the_rest():
    """After an operator drops the most used block, the next block still counts as new."""
    policy = AgedLfu(Blocks())
    policy.track(np.array([0, 1, 2]), 0.0)
    for now in range(50):
        policy.touch(np.array([0]), now)
    policy.touch(np.array([1]), 50)
    policy.touch(np.array([1]), 51)
    policy.forget(np.array([0]))
    policy.track(np.array([3]), 52)
    victims = policy.victims(3, NONE_PINNED)
    assert victims is not None and victims.tolist() == [2, 3, 1]


def test_a_log_of_uses_stays_in_proportion_to_its_blocks():
    """A hundred thousand uses of a hundred blocks keep the log at most 512 entries long."""
    stamps = np.zeros(100, dtype=np.int64)
    order, chooser = UseOrder(), random.Random(1)
    for i in range(10_000):
        blocks = np.array(chooser.sample(range(100), 10))
        stamps[blocks] = np.arange(10) + 10 * i + 1
        order.append(blocks, 10 * i + 1, stamps)
    assert len(order) <= 512
    expected = np.argsort(stamps)[: np.count_nonzero(stamps)]
    found = order.oldest(100, stamps, np.zeros(100, dtype=bool))
    assert found.tolist() == [b for b in expected.tolist() if stamps[b]]


def test_pieces_of_a_log_are_packed_and_joined_without_a_change_of_order(monkeypatch: pytest.MonkeyPatch):
    """In pieces of 32 entries `victims` keeps the order of last use, and dead entries are dropped."""
    monkeypatch.setattr(order_module, "PIECE_ENTRIES", 32)
    monkeypatch.setattr(order_module, "FIRST_ENTRIES", 8)
    policy, chooser, last = Lru(Blocks()), random.Random(5), dict[int, tuple[int, bool, int]]()
    for turn in range(3_000):
        blocks = list(dict.fromkeys(min(299, int(chooser.paretovariate(0.4))) for _ in range(20)))
        if turn % 7 == 0:
            gone = [b for b in blocks if b in last]
            policy.forget(np.array(gone, np.int64))
            last = {b: at for b, at in last.items() if b not in gone}
            continue
        policy.track(np.array([b for b in blocks if b not in last], np.int64), 0.0)
        policy.touch(np.array([b for b in blocks if b in last], np.int64), 0.0)
        last |= {b: (turn, b in last, number) for number, b in enumerate(blocks)}
        wanted = chooser.randint(1, len(last))
        found = policy.victims(wanted, np.zeros(300, bool))
        assert found is not None and found.tolist() == sorted(last, key=last.__getitem__)[:wanted]
        assert len(policy._order) <= 4 * len(last) + 64
