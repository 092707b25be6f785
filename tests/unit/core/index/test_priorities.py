"""Priorities and retention of puts in the core: their reach, their lifetime, and the policies that use
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, TOKENS, Kit, chain, commit_blocks, group, tier
from tierd.core.formats.model import PRIORITY_DEFAULT, PUT_BLOCK, RETENTION_LIMIT_S, ROOT, BlockStatus
from tierd.core.index.priorities import raise_before, said_by
from tierd.core.plan import PutQuery, Start
from tierd.policies.eviction import EVICTION


def query(
    hashes: np.ndarray,
    priorities: Sequence[int] | None = None,
    retention_s: Sequence[int] | None = None,
    first: int = 0,
) -> PutQuery:
    """A put of a chain's blocks from number `first` on. One value applies to all blocks."""
    blocks = np.zeros(len(hashes) - first, PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = hashes[first:], TOKENS, PAGE
    given = None if priorities is None else np.full(len(blocks), priorities, np.uint8)
    times = None if retention_s is None else np.full(len(blocks), retention_s, np.uint32)
    return PutQuery(1, hashes[first - 1].tobytes() if first else ROOT, first, blocks, given, times)


def put(kit: Kit, hashes: np.ndarray, *said: Sequence[int], first: int = 0) -> None:
    """Reserves and commits."""
    asked = query(hashes, *said, first=first)
    reserved = kit.core.reserve(1, groups=[asked], kind=HOST, now=kit.tick())
    kit.took(reserved.plan)
    if reserved.reservation:
        kit.commit(reserved)


def said(kit: Kit, hashes: np.ndarray) -> list[int]:
    """Priority + 1 of each block, 0 for none."""
    return kit.core.describe(kit.ids(hashes))["priority"].tolist()


def held(kit: Kit, hashes: np.ndarray) -> list[bool]:
    """For each block, if any tier holds it."""
    return (kit.ids(hashes) >= 0).tolist()


def full(pages: int = 8, **more: object) -> Kit:
    """A core of one host tier under the `priority` policy."""
    return Kit(tier(HOST, pages, segment=pages, eviction="priority", **more))


def test_the_lowest_priority_leaves_first() -> None:
    """Low priority is evicted before the default, and the default before high, regardless of last use."""
    kit = full(6)
    high, low, plain = chain("high", 2), chain("low", 2), chain("plain", 2)
    put(kit, high, [90])
    put(kit, plain)
    put(kit, low, [10])
    put(kit, chain("new", 2))
    assert (held(kit, high), held(kit, plain), held(kit, low)) == ([True] * 2, [True] * 2, [False] * 2)
    put(kit, chain("newer", 2))
    assert (held(kit, high), held(kit, plain)) == ([True] * 2, [False] * 2)


def test_time_runs_out_while_nothing_happens() -> None:
    """After a long pause, the first put evicts blocks whose retention ended, without a use in between."""
    kit = full(4)
    kept, plain = chain("kept", 2), chain("plain", 2)
    put(kit, kept, [90], [100])
    put(kit, plain)
    kit.now += 1000
    put(kit, chain("new", 2))
    assert (held(kit, kept), held(kit, plain)) == ([False] * 2, [True] * 2)


def test_a_block_keeps_those_before_it() -> None:
    """A tail's priority applies to its whole chain. Tails are still evicted before their parents."""
    kit = full(6)
    kept = chain("kept", 4)
    put(kit, kept[:2])
    put(kit, kept, [90, 80], first=2)
    assert said(kit, kept) == [91, 91, 91, 81]
    put(kit, chain("plain", 2))
    put(kit, chain("new", 3))
    assert held(kit, kept) == [True, True, True, False]


@pytest.mark.parametrize("stronger", [0, 3, 15, 16, 17, 79, 80, 81, 200, 398])
def test_a_word_goes_up_a_long_chain(stronger: int) -> None:
    """A priority reaches every earlier block up to the first with a stronger one, and none beyond."""
    kit, long = full(500), chain("long", 400)
    put(kit, long, [40] * 400)
    put(kit, long[: stronger + 1], [90], first=stronger)
    put(kit, long, [60], first=399)
    assert said(kit, long) == [91] * (stronger + 1) + [61] * (399 - stronger)


def test_a_word_goes_round_a_circle_once() -> None:
    """In a cycle of parents, the priority of a block behind it reaches each block once."""
    kit, ring, tail = full(8), chain("ring", 3), chain("tail", 1)
    for number in range(3):
        asked = query(ring[: number + 1], first=number)
        reserved = kit.core.reserve(
            1, groups=[replace(asked, parent=ring[number - 1].tobytes())], kind=HOST, now=kit.tick()
        )
        kit.commit(reserved)
    behind = replace(query(tail, [90]), parent=ring[2].tobytes())
    kit.commit(kit.core.reserve(1, groups=[behind], kind=HOST, now=kit.tick()))
    assert said(kit, ring) == [91] * 3
    blocks, ids = kit.core._index.blocks, kit.ids(ring)
    blocks.priority[ids] = 0
    assert sorted(raise_before(blocks, kit.ids(tail), blocks.unix_s + kit.now).tolist()) == sorted(ids.tolist())


def test_the_core_keeps_a_parent_of_low_priority_for_its_child() -> None:
    """A prefix of low priority stays until its default child is evicted, so no useless block stays."""
    kit = full(6)
    low = chain("low", 4)
    put(kit, low[:2], [0])
    put(kit, low, first=2)
    assert said(kit, low) == [1, 1, 0, 0]
    put(kit, chain("plain", 2))
    for number in range(6):
        put(kit, chain(f"new {number}", 1))
        there = held(kit, low)
        assert there == sorted(there, reverse=True)
    assert not any(there)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (([50],), ([90],), 91),
        (([90],), ([50],), 91),
        (([90],), (), 91),
        (([90], [5]), ([50],), 51),
        (([10],), ([35],), 36),
        ((), ([10],), 0),
        ((), ([36],), 37),
    ],
)
def test_a_later_put_raises_and_never_lowers(first: tuple, second: tuple, result: int) -> None:
    """A later put can raise a block's priority, not lower it. An expired one counts as none."""
    kit, one = full(), chain("one", 2)
    put(kit, one, *first)
    kit.now += 100
    put(kit, one, *second)
    assert said(kit, one) == [result] * 2


def test_a_later_put_gives_more_time_and_never_less() -> None:
    """Of equal priorities the core keeps the later end."""
    kit, one = full(), chain("one", 1)
    put(kit, one, [90], [1000])
    (ends,) = kit.core.describe(kit.ids(one))["until_s"].tolist()
    put(kit, one, [90], [10])
    assert kit.core.describe(kit.ids(one))["until_s"].tolist() == [ends]
    put(kit, one, [90], [2000])
    assert kit.core.describe(kit.ids(one))["until_s"].tolist() > [ends + 900]
    put(kit, one, [90])
    assert kit.core.describe(kit.ids(one))["until_s"].tolist() == [0]


def test_what_is_raised_is_evicted_as_what_it_is_now() -> None:
    """A second put with a priority saves a block from the eviction that was due."""
    kit, one, other = full(4), chain("one", 2), chain("other", 2)
    put(kit, one)
    put(kit, other)
    put(kit, one, [90])
    acquired = kit.acquire(group(other))
    kit.took(kit.core.release(1, leases=[acquired.lease], now=kit.tick()))
    put(kit, chain("new", 2))
    assert (held(kit, one), held(kit, other)) == ([True] * 2, [False] * 2)


def test_a_get_says_nothing() -> None:
    """A get does not extend a block's retention."""
    kit, kept = full(), chain("kept", 1)
    put(kit, kept, [90], [1000])
    (ends,) = kit.core.describe(kit.ids(kept))["until_s"].tolist()
    kit.now += 500
    kit.took(kit.core.release(1, leases=[kit.acquire(group(kept)).lease], now=kit.tick()))
    assert kit.core.describe(kit.ids(kept))["until_s"].tolist() == [ends]


def test_the_same_block_twice_in_a_put() -> None:
    """A put that names an existing block twice, with two priorities, sets the greater one."""
    kit, one = full(), chain("one", 1)
    put(kit, one)
    reserved = kit.core.reserve(1, groups=[query(one, [90]), query(one, [50])], kind=HOST, now=kit.tick())
    assert [s.tolist() for s in reserved.statuses] == [[BlockStatus.EXISTS]] * 2
    assert said(kit, one) == [91]


def test_private_pages_have_what_their_reservation_said() -> None:
    """Private pages keep the priorities of their reservation, each its own."""
    kit, names = full(), chain("named", 2)
    asked = query(np.zeros((2, 32), np.uint8), [90, 40])
    reserved = kit.core.reserve(1, groups=[asked], kind=HOST, now=kit.tick())
    begun = kit.core.begin_commit(
        1, reservation=reserved.reservation, blocks=commit_blocks(names, [0, 1]), now=kit.tick()
    )
    kit.finish_commit(begun)
    assert said(kit, names) == [91, 41]


def test_of_two_writers_the_second_raises() -> None:
    """The second writer of a block gets EXISTS, and its priority still counts."""
    kit, one = full(), chain("one", 1)
    first, second = (
        kit.core.reserve(1, groups=[query(one, priority)], kind=HOST, now=kit.tick()) for priority in (None, [90])
    )
    kit.commit(first)
    assert kit.commit(second).statuses.tolist() == [BlockStatus.EXISTS]
    assert said(kit, one) == [91]


def test_words_outlive_demotion_and_promotion() -> None:
    """A block keeps its priority and end through NVMe and back to memory."""
    kit = Kit(
        tier(HOST, 4, segment=4, eviction="priority", high_watermark=0.25, low_watermark=0.0),
        tier(NVME, 16, eviction="priority"),
    )
    kept = chain("kept", 2)
    put(kit, kept, [30], [5000])
    while not kit.demote().is_empty:
        kit.land()
    put(kit, chain("new", 4))
    assert kit.tiers_of(kept) == [1, 1]
    before = kit.core.describe(kit.ids(kept))[["priority", "until_s"]].tolist()
    kit.acquire(group(kept))
    kit.land()
    assert kit.tiers_of(kept) == [0, 0]
    assert kit.core.describe(kit.ids(kept))[["priority", "until_s"]].tolist() == before == [(31, 5001)] * 2


def test_words_outlive_a_restart() -> None:
    """Stored priorities hold after a restart, by Unix time. The greater of two tiers' counts; parents are
    raised."""
    kept, start = chain("kept", 3), Start(unix_s=1e9)
    old = Kit(tier(HOST, 8, eviction="priority"), tier(NVME, 8, eviction="priority"), start=start)
    put(old, kept[:2])
    put(old, kept, [90], [1000], first=2)
    old.took(old.core.persist(old.ids(kept), now=old.tick()))
    old.land()
    metas = old.core.metas(old.ids(kept))
    metas["priority"][:2] = metas["until_s"][:2] = 0
    assert metas["until_s"].tolist() == [0, 0, 10**9 + 1000 + 4]
    new = Kit(
        tier(HOST, 8, eviction="priority"),
        tier(NVME, 8, eviction="priority"),
        start=Start(generation=1000, segment=1000, unix_s=1e9 + 500),
    )
    segments, extents = old.core.segments(0), old.core.extents(old.ids(kept), tier=0)
    assert new.core.adopt(0, segments=segments, extents=extents, metas=metas, now=0.0).all()
    metas["priority"] = metas["until_s"] = 0
    segments, extents = old.core.segments(1), old.core.extents(old.ids(kept), tier=1)
    assert new.core.adopt(1, segments=segments, extents=extents, metas=metas, now=0.0).all()
    new.core.check()
    assert said(new, kept) == [91] * 3
    put(new, chain("plain", 5))
    put(new, chain("new", 5))
    assert new.tiers_of(kept) == [0] * 3
    new.now += 1000
    put(new, chain("newer", 5))
    assert new.tiers_of(kept) == [1] * 3


@pytest.mark.parametrize("eviction", sorted(set(EVICTION) - {"priority"}))
def test_other_policies_go_by_other_things(eviction: str) -> None:
    """Under other policies, puts with and without priorities keep the same blocks."""
    left = []
    for is_said in (False, True):
        kit = Kit(tier(HOST, 8, segment=8, eviction=eviction))
        names = [chain(f"chain {number}", 3) for number in range(5)]
        for turn, number in enumerate((0, 1, 0, 2, 1, 3, 0, 4, 2)):
            put(kit, names[number], *([[50 + turn]] if is_said and number < 2 else []))
        left.append([held(kit, one) for one in names])
    assert left[0] == left[1]


@pytest.mark.parametrize("years", [11, 20, 60])
def test_words_from_beyond_a_clock_that_was_set_back(years: int) -> None:
    """An end later than any put can set, as after a clock was set back, counts as expired."""
    now = 1.8e9
    word = said_by(np.full(1, 90, np.uint8), np.full(1, RETENTION_LIMIT_S, np.uint32), time_s=now)
    assert word.priorities(now).tolist() == [90]
    back = now - years * 366 * 86400
    assert word.priorities(back).tolist() == [PRIORITY_DEFAULT]
    assert not word.hold(back).any()
