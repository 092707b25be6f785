"""The core's reports of requests become groups of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, chain, tier
from tierd.core.core import Core
from tierd.core.formats.model import StructArray
from tierd.core.index.blocks import Names, words
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.core.plan import GroupQuery
from tierd.policies.named import NamedPolicies
from tierd.policies.reuse.features import GROUPS, NOTHING, SHARED, first_group
from tierd.policies.reuse.hazard import EDGES_S
from tierd.policies.reuse.learner import REFIT_EVERY
from tierd.policies.reuse.traffic import ABOVE, KEPT, READ_SHARE, REFIT_PAUSE_S, UNKNOWN_BLOCKS

TOKENS = 16


class Taught:
    """A host tier under reuse-index. traffic: assigns the groups of its blocks."""

    def __init__(self) -> None:
        policies = NamedPolicies()
        self.core = Core([tier(HOST, 64, eviction="reuse-index")], policies=policies, session_share=1.0)
        self.driver = InstantDriver(self.core, tier_count=1)
        assert policies.traffic is not None
        self.traffic = policies.traffic
        self.now = 0.0

    def serve(self, hashes: StructArray, *, tokens: int = 0) -> None:
        """A whole request: gets the held blocks and puts the rest."""
        self.now += 1.0
        self.driver.request(sequence(hashes, tokens), now=self.now)

    def answer(self, hashes: StructArray, first: int) -> None:
        """Puts the blocks from number `first` on, without a get."""
        lease = self.driver._store(sequence(hashes), first=first, now=self.now)
        self.core.release(1, leases=[lease], now=self.now)

    def groups(self, hashes: StructArray) -> list[int]:
        """The learner's group of each block, -1 if it has none."""
        blocks = self.core._index.blocks
        ids = blocks.find(Names(np.ones(len(hashes), np.uint32), words(hashes)))
        return (blocks.group[ids].astype(int) - 1).tolist()


def sequence(hashes: StructArray, tokens: int = 0) -> Sequence:
    return Sequence(1, hashes, tokens or TOKENS * len(hashes), TOKENS, PAGE)


@pytest.fixture
def kit() -> Taught:
    return Taught()


def test_a_first_request_is_in_the_group_of_its_size(kit: Taught) -> None:
    """All whole blocks of a first request are one part."""
    a = chain("a", 5)
    kit.serve(a)
    assert kit.groups(a) == [first_group(5)] * 5


def test_a_short_last_block_is_worth_nothing(kit: Taught) -> None:
    """A short last block is in the group of worth 0; the blocks before it are not."""
    a = chain("a", 3)
    kit.serve(a, tokens=40)
    assert kit.groups(a) == [first_group(2)] * 2 + [NOTHING]


def test_what_several_sessions_ask_for_is_shared(kit: Taught) -> None:
    """A prefix of two sessions is in a shared group; the blocks after it are not."""
    one, other = chain("a", 12), chain("a", 12).copy()
    other[3:] = chain("b", 9)
    kit.serve(one)
    kit.serve(other)
    assert kit.groups(other)[:3] == [SHARED[0]] * 3
    assert set(kit.groups(other)[3:]).isdisjoint(SHARED)


def test_what_was_evicted_is_remembered(kit: Taught) -> None:
    """A prefix that a second session asks for is shared, although the first copy was evicted."""
    one, other = chain("a", 12), chain("a", 12).copy()
    other[3:] = chain("b", 9)
    kit.serve(one)
    held = [kit.core.find_block(1, name.tobytes()) for name in one]
    kit.core.evict(np.array(held, np.int64), tier=0, now=kit.now)
    kit.serve(other)
    assert kit.groups(other)[:3] == [SHARED[0]] * 3


def test_an_answer_goes_on_as_its_question(kit: Taught) -> None:
    """Blocks that were put without a get are in the group of the block before them, and of its session."""
    a = chain("a", 6)
    kit.serve(a[:4])
    kit.answer(a, 4)
    assert kit.groups(a) == [first_group(4)] * 6
    kit.serve(a)
    assert len(set(kit.groups(a))) == 1 and set(kit.groups(a)).isdisjoint(SHARED)


def test_a_short_end_of_an_answer_is_worth_nothing_and_what_precedes_it_goes_on(kit: Taught) -> None:
    """A short last block is worth 0; the rest of a long answer is in the question's group, also if
    evicted."""
    a = chain("a", 9)
    kit.serve(a[:3])
    lease = kit.driver._store(sequence(a, 8 * TOKENS + 5), first=3, now=kit.now)
    kit.core.release(1, leases=[lease], now=kit.now)
    assert kit.groups(a) == [first_group(3)] * 8 + [NOTHING]
    kit.core.evict(np.array([kit.core.find_block(1, name.tobytes()) for name in a], np.int64), tier=0, now=kit.now)
    kit.serve(a[:8])
    assert kit.groups(a[:8]) == [kit.groups(a[:1])[0]] * 8 and kit.groups(a[:1]) != [first_group(8)]


def test_an_answer_to_what_nobody_asked_for_is_unknown(kit: Taught) -> None:
    """Blocks that were put without any question are in no group, nor are the blocks after them."""
    a = chain("a", 4)
    kit.answer(a, 0)
    assert kit.groups(a) == [-1] * 4
    kit.answer(chain("a", 6), 4)
    assert kit.groups(chain("a", 6)) == [-1] * 6


def test_a_session_shares_nothing_with_itself(kit: Taught) -> None:
    """The blocks of a session that grows again and again are never shared."""
    for blocks in (6, 8, 10, 12):
        kit.serve(chain("a", blocks))
    assert set(kit.groups(chain("a", 12))).isdisjoint(SHARED)


def test_what_nothing_is_known_of_is_worth_what_new_ones_are(kit: Taught) -> None:
    """A block in no group, as after a restart, has the worth of a first request's block."""
    ages = np.array([0.0, 10.0, 100.0])
    unknown = kit.traffic.prices(np.zeros(3, np.int64), ages)[0]
    new = kit.traffic.prices(np.full(3, first_group(UNKNOWN_BLOCKS) + 1), ages)[0]
    assert unknown.tolist() == new.tolist() and (unknown > 0).all()


def test_one_price_is_that_of_many(kit: Taught) -> None:
    """`price` equals `prices` at every age edge, and its validity ends exactly when the worth may change."""
    ages = np.concatenate((EDGES_S, np.nextafter(EDGES_S[1:], 0.0), [1e6]))
    groups = np.arange(len(ages)) % (GROUPS + 1)
    worths, changes_s = kit.traffic.prices(groups, ages)
    one = [kit.traffic.price(*pair) for pair in zip(groups.tolist(), ages.tolist(), strict=True)]
    assert one == list(zip(worths.tolist(), changes_s.tolist(), strict=True))
    assert (changes_s > ages).all() and changes_s[0] == EDGES_S[1]
    last = np.where(np.isinf(changes_s), 1e9, np.nextafter(changes_s, 0.0))
    assert kit.traffic.prices(groups, last)[0].tolist() == worths.tolist()


def test_above_a_store_worth_is_what_would_be_lost(kit: Taught) -> None:
    """A block on the store is worth the spared read, one that it declines its full worth.
    A block that it may take is worth less than full. The least threshold counts."""
    groups, ages = np.arange(1, 40), np.full(39, 5.0)
    worth, chance = kit.traffic.prices(groups, ages)[0], kit.traffic.learner.chance(groups - 1, ages)
    price = float(np.median(chance))
    kit.traffic.thresholds[:] = [lambda: price, lambda: 1.0]
    for number in range(REFIT_EVERY):
        kit.serve(chain(f"a{number}", 1))
    worth, chance = kit.traffic.prices(groups, ages)[0], kit.traffic.learner.chance(groups - 1, ages)
    kept, above = (kit.traffic.prices(groups + marks, ages)[0] for marks in (ABOVE + KEPT, ABOVE))
    assert np.allclose(kept, READ_SHARE * worth)
    taken = chance > price
    assert taken.any() and not taken.all()
    assert np.allclose(above[~taken], worth[~taken])
    assert (above[taken] < worth[taken]).all() and (above[taken] > kept[taken]).all()
    one = [kit.traffic.price(int(group), 5.0)[0] for group in groups + ABOVE]
    assert np.allclose(one, above)


def test_many_requests_at_once_make_one_table(kit: Taught) -> None:
    """Prices are refitted after REFIT_EVERY requests and the pause, also if the clock goes back."""

    def hear(count: int) -> int:
        for number in range(count):
            kit.driver.request(sequence(chain(f"a{number}", 1)), now=kit.now)
        return kit.traffic.version

    assert hear(REFIT_EVERY - 1) == 0
    assert hear(1) == 1
    assert hear(3 * REFIT_EVERY) == 1
    kit.now += REFIT_PAUSE_S
    assert hear(1) == 2
    assert hear(REFIT_EVERY - 1) == 2
    kit.now -= 3.0
    assert hear(1) == 3


def test_only_a_wear_budget_has_a_price() -> None:
    """Only a store with a wear budget has a price. Memory, not the store, gets its `kept` changes."""
    for rate, count in ((0.0, 0), (1.0, 1)):
        policies = NamedPolicies()
        tiers = [
            tier(HOST, 8, eviction="reuse-index"),
            tier(NVME, 8, eviction="reuse-index", admission="learned", wear_bytes_per_s=rate),
        ]
        Core(tiers, policies=policies, session_share=1.0)
        assert policies.traffic is not None and len(policies.traffic.thresholds) == count
        assert len(policies.traffic.above) == 1


def test_groups_that_ask_for_different_lengths(kit: Taught) -> None:
    """Of two attention groups with different lengths, every held block has a group."""
    long, short = chain("a", 5), chain("b", 3)
    kit.serve(long)
    kit.serve(short)
    for asked in ((long, short), (short, long)):
        groups = [GroupQuery((1,), hashes, TOKENS, TOKENS * len(hashes)) for hashes in asked]
        lease = kit.core.acquire(1, groups=groups, kind=HOST, now=9.0).lease
        kit.core.release(1, leases=[lease], now=9.0)
        assert min(kit.groups(long) + kit.groups(short)) >= 0
