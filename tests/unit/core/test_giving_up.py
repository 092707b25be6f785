"""Puts into tiers that must give up blocks or segments."""

from __future__ import annotations

import numpy as np

from tests.unit.core.kit import HOST, NVME, PAGE, TOKENS, Kit, chain, group, tier
from tierd.core.formats.model import PUT_BLOCK
from tierd.core.plan import PutQuery
from tierd.core.requests.put_request import wish_ahead, wish_of


def test_pages_ahead_are_as_many_wishes_of_one() -> None:
    """A wish for n puts ahead equals the wish for n times the same query."""
    blocks = np.zeros(3, PUT_BLOCK)
    blocks["tokens"], blocks["length"] = [16, 16, 5], [PAGE, PAGE, 100]
    said = np.asarray([1, 2, 3], np.uint8), np.asarray([0, 7, 9], np.uint32)
    query = PutQuery(4, bytes(range(32)), 2, blocks, *said)
    one = wish_ahead(query, puts=3, session=5, domain=6, time_s=1e9)
    other = wish_of([query] * 3, session=5, domain=6, time_s=1e9)
    for name in one.__slots__:
        assert np.array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name))), name


def test_a_segment_that_a_client_could_write_to_ends_when_it_empties() -> None:
    """The daemon loads into a new life of a dead writer's emptied segment, although the key is the same."""
    kit, a, b = Kit(tier(HOST, 4), tier(NVME, 8)), chain("a", 4), chain("b", 4)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick()))
    kit.core.open_session(2, domain=1)
    kit.put(b, session=2)
    kit.took(kit.core.end_session(2, kit.tick()))
    got = kit.acquire(group(a))
    assert got.tokens == 4 * TOKENS
    assert [segment.replaces is not None for segment in got.plan.segments] == [True]


def test_a_head_waits_for_a_child_that_stays() -> None:
    """A block with two children is not a victim while one of them stays."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    kit.put(a[:2])
    kit.put(a[[0, 2]])
    head, one, other = kit.ids(a).tolist()
    tails_first = kit.core._planner.room.coldest.tails_first
    assert tails_first(0, np.asarray([one, head])).tolist() == [one]
    assert tails_first(0, np.asarray([one, other, head])).tolist() == [one, other, head]
