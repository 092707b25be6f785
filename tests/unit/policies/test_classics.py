"""Queue policies against the pseudocode of their papers, except for the differences in their
docstrings."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policies.played import Ours, Plain, accesses, plain_evictions
from tierd.policies.eviction.sketch import MOST, SAMPLE_PER_COUNTER, Sketch


class PlainTwoQueue:
    """2Q, full version: Kin = c / 4, Kout = c / 2. The front of a list is at its end."""

    def __init__(self, capacity: int) -> None:
        self.k_in, self.k_out = capacity // 4, capacity // 2
        self.first: list[int] = []
        self.main: list[int] = []
        self.out: list[int] = []

    def hit(self, block: int) -> None:
        if block in self.main:
            self.main.remove(block)
            self.main.append(block)

    def evict(self) -> int:
        if len(self.first) > self.k_in or not self.main:
            self.out.append(self.first[0])
            return self.first.pop(0)
        return self.main.pop(0)

    def insert(self, block: int) -> None:
        was_out = block in self.out
        if was_out:
            self.out.remove(block)
        self.out = self.out[len(self.out) - self.k_out :] if len(self.out) > self.k_out else self.out
        (self.main if was_out else self.first).append(block)


class PlainArc:
    """ARC; REPLACE comes before the adaptation."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def hit(self, block: int) -> None:
        (self.t1 if block in self.t1 else self.t2).remove(block)
        self.t2.append(block)

    def evict(self) -> int:
        if self.t1 and (len(self.t1) > int(self.p) or not self.t2):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]

    def insert(self, block: int) -> None:
        if block in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(block)
            self.t2.append(block)
        elif block in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(block)
            self.t2.append(block)
        else:
            self.t1.append(block)
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.c:
            self.b2.pop(0)


class PlainS3Fifo:
    """S3-FIFO, algorithm 1."""

    def __init__(self, capacity: int) -> None:
        self.share, self.ghosts = capacity // 10, capacity * 9 // 10
        self.small: list[int] = []
        self.main: list[int] = []
        self.left: list[int] = []
        self.freq: Counter[int] = Counter()

    def hit(self, block: int) -> None:
        self.freq[block] = min(self.freq[block] + 1, 3)

    def evict(self) -> int:
        while True:
            if len(self.small) > 0 and (len(self.small) >= self.share or not self.main):
                block = self.small.pop(0)
                if self.freq[block] <= 1:
                    self.left.append(block)
                    self.left = self.left[max(0, len(self.left) - self.ghosts) :]
                    return block
                self.freq[block] = 0
            else:
                block = self.main.pop(0)
                if not self.freq[block]:
                    return block
                self.freq[block] -= 1
            self.main.append(block)

    def insert(self, block: int) -> None:
        self.freq[block] = 0
        if block in self.left:
            self.left.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)


class PlainSieve:
    """SIEVE, algorithm 1. The queue's back is at index 0, and the hand is an index."""

    def __init__(self, _capacity: int) -> None:
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand = 0

    def hit(self, block: int) -> None:
        self.visited.add(block)

    def evict(self) -> int:
        while True:
            self.hand %= len(self.queue)
            block = self.queue[self.hand]
            if block not in self.visited:
                break
            self.visited.remove(block)
            self.hand += 1
        self.queue.pop(self.hand)
        self.hand = 0 if self.hand >= len(self.queue) else self.hand
        return block

    def insert(self, block: int) -> None:
        self.queue.append(block)


class PlainTinyLfu:
    """W-TinyLFU with exact counts. A candidate waits until the next block comes."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.window_size = capacity, max(1, capacity // 100)
        self.window: list[int] = []
        self.waiting: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.seen: Counter[int] = Counter()

    def hit(self, block: int) -> None:
        self.seen[block] = min(self.seen[block] + 1, MOST)
        for queue, to in (
            (self.window, self.window),
            (self.waiting, self.window),
            (self.probation, self.protected),
            (self.protected, self.protected),
        ):
            if block in queue:
                queue.remove(block)
                to.append(block)
                break
        self.overflow()
        while len(self.protected) > int(0.8 * (self.total() - self.window_size)):
            self.probation.append(self.protected.pop(0))

    def total(self) -> int:
        """The greatest number of blocks at any time so far."""
        here = len(self.window + self.waiting + self.probation + self.protected)
        self.most = max(getattr(self, "most", 0), here)
        return self.most

    def overflow(self) -> None:
        while len(self.window) > self.window_size:
            self.waiting.append(self.window.pop(0))

    def evict(self) -> int:
        self.total()
        if not self.waiting:
            for queue in (self.probation, self.protected, self.window):
                if queue:
                    return queue.pop(0)
        candidate = self.waiting[0]
        if self.probation and self.seen[candidate] > self.seen[self.probation[0]]:
            self.probation.append(self.waiting.pop(0))
            return self.probation.pop(0)
        return self.waiting.pop(0)

    def insert(self, block: int) -> None:
        before = self.total()
        self.seen[block] = min(self.seen[block] + 1, MOST)
        self.window.append(block)
        self.overflow()
        if self.total() > before and self.waiting:
            self.probation.append(self.waiting.pop(0))


CLASSICS = {"2q": PlainTwoQueue, "arc": PlainArc, "s3-fifo": PlainS3Fifo, "sieve": PlainSieve}


@pytest.mark.parametrize("name", CLASSICS)
@given(sequence=accesses, capacity=st.integers(1, 24))
@settings(deadline=None, max_examples=8)
def test_a_policy_is_the_pseudocode_of_its_paper(name, sequence, capacity):
    """A policy's evictions equal those of the paper's algorithm on plain lists."""
    model: Plain = CLASSICS[name](capacity)
    assert plain_evictions(Ours(name), sequence, capacity) == plain_evictions(model, sequence, capacity)


@given(sequence=accesses.map(lambda blocks: [block % 16 for block in blocks]), capacity=st.integers(2, 12))
@settings(deadline=None, max_examples=8)
def test_w_tinylfu_is_the_pseudocode_of_its_paper(sequence, capacity):
    """Evictions equal those of W-TinyLFU with exact counts, while the sketch neither ages nor collides."""
    ours, model = Ours("w-tinylfu"), PlainTinyLfu(capacity)
    ours.policy._sketch.widen(1 << 14)
    assert plain_evictions(ours, sequence, capacity) == plain_evictions(model, sequence, capacity)


def test_a_sketch_counts_and_forgets():
    """A sketch counts a name up to collisions in all four counters, and halves counts after a sample of
    uses."""
    sketch = Sketch()
    sketch.widen(1024)
    keys = np.random.default_rng(1).integers(0, 1 << 63, 1000, dtype=np.uint64)
    for _ in range(3):
        sketch.add(keys)
    spared = ((sketch._places(keys) % 1024) >= sketch._halved).all(axis=0)
    counts = sketch.counts(keys)[spared]
    assert len(counts) > 100 and counts.min() >= 3 and np.count_nonzero(counts == 3) > 0.9 * len(counts)
    assert sketch.counts(keys[:0]).shape == (0,)
    for _ in range(20):
        sketch.add(keys[:1])
    assert sketch.counts(keys[:1]) == [MOST]
    for _ in range(SAMPLE_PER_COUNTER):
        sketch.add(np.zeros(1024, dtype=np.uint64))
    assert sketch.counts(keys[1:]).max() < 3


def test_a_sketch_that_widens_keeps_its_counts():
    """A wider sketch keeps every name's count, and halves no counter twice in a pass."""
    sketch, keys = Sketch(), np.random.default_rng(1).integers(0, 1 << 63, 40, dtype=np.uint64)
    for _ in range(3):
        sketch.add(keys)
    before, halved = sketch.counts(keys), sketch._halved / sketch._width
    assert before.max() == 3 and halved > 0
    sketch.widen(1 << 10)
    assert sketch.counts(keys).tolist() == before.tolist()
    assert sketch._halved / sketch._width == halved
