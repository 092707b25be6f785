"""Policies that price a block, against their papers' pseudocode with the rounding of their docstrings."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.named import TOKENS, add
from tests.unit.policies.played import BLOCKS, Ours, accesses, plain_evictions
from tierd.core.index.blocks import Blocks
from tierd.simulator.rivals.gdsf import Gdsf
from tierd.simulator.rivals.hyperbolic import Hyperbolic
from tierd.simulator.rivals.rounding import ROUNDED, level

POSITIONS = 5


def rounded(value: float) -> float:
    """`value`, rounded down to a quarter of its power of two."""
    power = 2 ** (math.frexp(value)[1] - 1)
    return power * (1 + math.floor(4 * (value / power - 1)) / 4)


class PlainGdsf:
    """Pr = Clock + Fr * Cost; Clock is the Pr of the last evicted block."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.priority: dict[int, tuple[float, int]] = {}
        self.clock, self.time = 0.0, 0

    def hit(self, block: int) -> None:
        self.time += 1
        self.uses[block] = self.uses.get(block, 0) + 1
        cost = TOKENS * (1 + block % POSITIONS)
        self.priority[block] = (self.clock + rounded(self.uses[block] * cost), self.time)

    def evict(self) -> int:
        block = min(self.priority, key=lambda b: self.priority[b])
        self.clock = self.priority.pop(block)[0]
        del self.uses[block]
        return block

    def insert(self, block: int) -> None:
        self.hit(block)


class PlainHyperbolic:
    """p = n / t over all blocks instead of a sample."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.came: dict[int, float] = {}
        self.now = 0.0

    def hit(self, block: int) -> None:
        self.now += 1
        self.uses[block] += 1

    def evict(self) -> int:
        def priority(block: int) -> tuple[float, float, float]:
            uses, age = rounded(self.uses[block]), max(self.now - self.came[block], 1e-9)
            return uses / age, uses, self.came[block]

        block = min(self.uses, key=priority)
        del self.uses[block]
        return block

    def insert(self, block: int) -> None:
        self.now += 1
        self.uses[block], self.came[block] = 1, self.now


@given(sequence=accesses, capacity=st.integers(1, 24))
@settings(deadline=None, max_examples=8)
def test_gdsf_is_the_pseudocode_of_its_paper(sequence, capacity):
    """Evictions equal those of GDSF with all sizes equal, costs by position, and rounded worths."""
    ours = plain_evictions(Ours("gdsf", POSITIONS), sequence, capacity)
    assert ours == plain_evictions(PlainGdsf(), sequence, capacity)


@given(sequence=accesses, capacity=st.integers(1, 24))
@settings(deadline=None, max_examples=8)
def test_hyperbolic_is_the_priority_of_its_paper(sequence, capacity):
    """Evictions equal those of the least n / t, if every block has its own epoch."""
    ours = plain_evictions(Ours("hyperbolic"), sequence, capacity)
    assert ours == plain_evictions(PlainHyperbolic(), sequence, capacity)


@given(st.integers(1, 1 << 62))
def test_levels_are_rounded_values(value):
    """A level's value is the number's first three significant bits."""
    assert ROUNDED[level(np.array([value]))] == rounded(float(value))
    assert level(np.array([1, 2])).tolist() == [1, 5]


def test_a_chain_costs_what_its_tail_does():
    """With equal uses, a short sequence is evicted before a long one, the long one from its end."""
    blocks = Blocks()
    long = add(blocks, [(1,) * depth for depth in range(1, 9)])
    short = add(blocks, [(2,)])
    policy = Gdsf(blocks)
    policy.track(long[::-1], 0.0)
    policy.track(short, 1.0)
    assert policy.victims(9, np.zeros(16, bool)).tolist() == [*short.tolist(), *long[::-1].tolist()]


def test_what_leaves_out_of_turn_does_not_age_the_rest():
    """After an operator drops the block of most worth, the next block still counts as new."""
    blocks = Blocks()
    a, b, c, d = add(blocks, [(number,) for number in range(4)]).tolist()
    policy = Gdsf(blocks)
    policy.track(np.array([a, b, c]), 0.0)
    for _ in range(20):
        blocks.touch(np.array([a]), 1.0)
        policy.touch(np.array([a]), 1.0)
    for _ in range(2):
        blocks.touch(np.array([b]), 1.0)
        policy.touch(np.array([b]), 1.0)
    policy.forget(np.array([a]))
    policy.track(np.array([d]), 2.0)
    assert policy.victims(3, np.zeros(BLOCKS, bool)).tolist() == [c, d, b]


def test_epochs_are_shares_of_what_is_tracked():
    """Blocks that come together share a level, and there are tens of levels, not thousands."""
    blocks = Blocks()
    ids = add(blocks, [(number,) for number in range(3200)])
    policy = Hyperbolic(blocks)
    for at in range(0, 3200, 10):
        policy.track(ids[at : at + 10], float(at))
    for at in range(0, 3200, 10):
        policy.forget(ids[at : at + 10])
        policy.track(ids[at : at + 10], 3200.0 + at)
    assert 20 <= len(policy._queues.sizes) <= 40
    policy.forget(ids)
    assert len(policy) == len(policy._queues.sizes) == 0
