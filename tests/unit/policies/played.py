"""A small cache under a policy, and under an equivalent plain program."""

from __future__ import annotations

import random
from typing import Protocol

import numpy as np
from hypothesis import strategies as st

from tests.named import add
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction import EVICTION
from tierd.simulator.rivals import RIVALS

BLOCKS = 32
NONE_PINNED = np.zeros(BLOCKS, dtype=bool)
ACCESSES = 300


def drawn(seed: int) -> list[int]:
    """Accesses to blocks by number with skewed popularity, which changes half way."""
    chooser = random.Random(seed)
    ranks = [int(BLOCKS * chooser.random() ** 3) for _ in range(ACCESSES)]
    return [rank if at < ACCESSES // 2 else BLOCKS - 1 - rank for at, rank in enumerate(ranks)]


accesses = st.integers(0, 1 << 32).map(drawn)
"""Long enough that every list of a policy fills and turns over. Hypothesis' short sequences show
little."""


class Plain(Protocol):
    """A paper's pseudocode. The cache asks for a victim before it inserts a block."""

    def hit(self, block: int) -> None: ...

    def evict(self) -> int: ...

    def insert(self, block: int) -> None: ...


def plain_evictions(policy: Plain, sequence: list[int], capacity: int) -> list[int]:
    """The evictions, in order, of a cache of this size over the sequence."""
    held: set[int] = set()
    left = []
    for block in sequence:
        if block in held:
            policy.hit(block)
            continue
        if len(held) == capacity:
            left.append(policy.evict())
            held.remove(left[-1])
        policy.insert(block)
        held.add(block)
    return left


class Ours:
    """One of tierd's policies with the same interface. Time is the number of the access."""

    def __init__(self, name: str, positions: int = 1) -> None:
        """positions: block n follows n % positions blocks that no cache holds."""
        self.blocks = Blocks()
        add(self.blocks, [(number,) * (1 + number % positions) for number in range(BLOCKS)])
        self.policy = {**EVICTION, **RIVALS}[name](self.blocks)
        self.now = 0.0

    def hit(self, block: int) -> None:
        self.now += 1
        self.blocks.touch(np.array([block]), self.now)
        self.policy.touch(np.array([block]), self.now)

    def evict(self) -> int:
        victims = self.policy.victims(1, NONE_PINNED)
        assert victims is not None
        self.policy.forget(victims)
        return int(victims[0])

    def insert(self, block: int) -> None:
        self.now += 1
        self.policy.track(np.array([block]), self.now)
