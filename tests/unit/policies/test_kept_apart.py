"""Policies that keep some blocks longer: shared prefixes, and blocks with much attention."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.named import TOKENS, Path, add
from tests.unit.policies.played import Ours, accesses, plain_evictions
from tierd.core.eviction import Eviction
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.attention import HALF_LIFE_S, MOST_CREDIT, Attention
from tierd.policies.eviction.prefix_separation import SHARED, PrefixSeparation


class PlainRounds:
    """LRU in which a block returns to the front once per credit. First blocks of sequences have three."""

    def __init__(self, *, positions: int) -> None:
        self.queue: list[list[int]] = []
        self.positions = positions

    def insert(self, block: int) -> None:
        self.queue.append([block, MOST_CREDIT if block % self.positions == 0 else 0])

    def hit(self, block: int) -> None:
        self.queue = [entry for entry in self.queue if entry[0] != block]
        self.insert(block)

    def evict(self) -> int:
        while self.queue[0][1]:
            block, credit = self.queue.pop(0)
            self.queue.append([block, credit - 1])
        return self.queue.pop(0)[0]


class PlainLru:
    def __init__(self) -> None:
        self.queue: list[int] = []

    def insert(self, block: int) -> None:
        self.queue.append(block)

    def hit(self, block: int) -> None:
        self.queue.remove(block)
        self.queue.append(block)

    def evict(self) -> int:
        return self.queue.pop(0)


class Requests:
    """A cache under a policy that serves whole sequences, as the core does."""

    def __init__(self, policy: type, capacity: int) -> None:
        self.blocks, self.capacity = Blocks(), capacity
        self.policy: Eviction = policy(self.blocks)
        self.held: dict[Path, int] = {}
        self.now = 0.0

    def use(self, path: Path, *, last_tokens: int = TOKENS) -> int:
        """The number of hits of this sequence."""
        self.now += 1
        chain = [path[: depth + 1] for depth in range(len(path))]
        found = [self.held[p] for p in chain if p in self.held]
        used = np.array(found[::-1], np.int64)
        self.blocks.touch(used, self.now)
        self.policy.touch(used, self.now)
        new = chain[len(found) :]
        self._make_room(len(new), used)
        ids = [int(add(self.blocks, [p], tokens=last_tokens if p == path else TOKENS)[0]) for p in new]
        self.blocks.places[ids] = 1
        self.held.update(zip(new, ids, strict=True))
        self.policy.track(np.array(ids[::-1], np.int64), self.now)
        self.policy.touch(used, self.now)
        return len(found)

    def _make_room(self, count: int, used: np.ndarray) -> None:
        pinned = np.zeros(len(self.blocks.hits), bool)
        pinned[used] = True
        missing = max(0, len(self.held) + count - self.capacity)
        victims = self.policy.victims(missing, pinned)
        assert victims is not None
        self.policy.forget(victims)
        gone = set(victims.tolist())
        self.held = {path: block for path, block in self.held.items() if block not in gone}


def flood(cache: Requests, turn: int, sequences: int) -> None:
    """Conversations of three blocks that no request continues."""
    for number in range(sequences):
        cache.use((1000 * turn + number,) * 3)


SYSTEM = (1, 2, 3, 4)
"""A prefix that conversations share."""


@given(sequence=accesses, capacity=st.integers(1, 24))
@settings(deadline=None, max_examples=8)
def test_prefix_separation_without_shared_prefixes_is_lru(sequence, capacity):
    """Evictions equal those of LRU while no block has two children."""
    ours = plain_evictions(Ours("prefix-separation"), sequence, capacity)
    assert ours == plain_evictions(PlainLru(), sequence, capacity)


def test_a_shared_prefix_gets_a_reserve_when_it_is_missed():
    """A first flood evicts the prefix. After its miss, the next flood does not."""
    cache = Requests(PrefixSeparation, capacity=40)
    for tail in (10, 11):
        cache.use((*SYSTEM, tail, tail))
    flood(cache, 1, 20)
    assert cache.use((*SYSTEM, 12)) == 0, "recency alone keeps nothing through a flood"
    flood(cache, 2, 20)
    assert cache.use((*SYSTEM, 13)) == len(SYSTEM)


def test_a_reserve_that_tails_ask_for_shrinks():
    """If tails return instead, the reserve shrinks to nothing and the prefix is evicted again."""
    cache = Requests(PrefixSeparation, capacity=40)
    for tail in (10, 11):
        cache.use((*SYSTEM, tail, tail))
    flood(cache, 1, 20)
    cache.use((*SYSTEM, 12))
    for turn in (2, 2, 2, 2):
        flood(cache, turn, 18)
    assert cache.use((*SYSTEM, 13)) == 0


def test_a_conversation_that_goes_on_shares_nothing():
    """A full block in place of a short last one, and blocks after it, make no block shared."""
    cache = Requests(PrefixSeparation, capacity=40)
    cache.use((5, 6, 70), last_tokens=TOKENS // 2)
    cache.use((5, 6, 7, 80), last_tokens=TOKENS // 2)
    cache.use((5, 6, 7, 8, 9))
    assert cache.policy._queues.size(SHARED) == 0
    cache.use((5, 6, 7, 100))
    assert cache.policy._queues.size(SHARED) == 3


@given(sequence=accesses, capacity=st.integers(1, 24))
@settings(deadline=None, max_examples=8)
def test_attention_without_reports_is_lru_in_rounds(sequence, capacity):
    """Evictions equal those of LRU that skips the first blocks of sequences three times."""
    ours = plain_evictions(Ours("attention", positions=2), sequence, capacity)
    assert ours == plain_evictions(PlainRounds(positions=2), sequence, capacity)


def attended(mass: dict[int, float], *, now: float = 1.0) -> tuple[Attention, list[int]]:
    """Six blocks of one chain, the first of which is a sink, after a report of `mass`."""
    blocks = Blocks()
    ids = add(blocks, [(1,) * depth for depth in range(1, 7)])
    policy = Attention(blocks)
    policy.track(ids[::-1], 0.0)
    for depth, value in mass.items():
        blocks.attention[ids[depth]] += value
    policy.touch(ids[::-1], now)
    return policy, ids.tolist()


def test_heavy_hitters_stay_with_what_precedes_them():
    """A block with most of the attention and its prefix are evicted after all later blocks."""
    policy, ids = attended({1: 1, 2: 1, 3: 16, 4: 1, 5: 1})
    assert policy.victims(6, np.zeros(16, bool)).tolist() == [ids[5], ids[4], ids[3], ids[2], ids[1], ids[0]]
    policy.track(np.array(add(policy._blocks, [(2,), (2, 2), (2, 3)])[1:]), 2.0)
    first = policy.victims(4, np.zeros(16, bool)).tolist()
    assert set(first) & set(ids) == {ids[5], ids[4]}


def test_attention_decays():
    """An old heavy hitter counts as light at its next use."""
    policy, ids = attended(dict.fromkeys(range(6), 8.0))
    old = ids[5]
    blocks = policy._blocks
    other = add(blocks, [(3,), (3, 3)])
    policy.track(other[::-1], 2.0)
    later = 20 * HALF_LIFE_S
    blocks.attention[other] += 8.0
    policy.touch(other[::-1], later)
    policy.touch(np.array([old]), later)
    assert policy._rounds.credit[old] == 0 and policy._rounds.credit[other[1]] > 0
