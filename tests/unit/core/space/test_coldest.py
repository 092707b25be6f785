"""The search for victims takes a number of steps that does not grow with the length of chains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import PUT_BLOCK, ROOT, BlockStatus
from tierd.core.index import blocks as blocks_module
from tierd.core.plan import Ids, PutQuery
from tierd.core.space import coldest
from tierd.policies.eviction import EVICTION

POLICIES = sorted(EVICTION)


def waiting(kit: Kit, ids: Ids) -> set[int]:
    """By brute force: those of the blocks that have a pinned descendant."""
    index, out = kit.core._index, set[int]()
    for block in ids[index.held[0][ids]].tolist():
        above = int(index.blocks.parent[block])
        while above >= 0 and above not in out:
            out.add(above)
            above = int(index.blocks.parent[above])
    return out


def counted(kit: Kit) -> list[int]:
    """The victim counts that the core asks the policy for from now on, one per call."""
    asked, policy = list[int](), kit.core._index.policies[0]
    victims: Callable[..., Ids | None] = policy.victims
    policy.victims = lambda count, pinned: asked.append(count) or victims(count, pinned)  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_as_many_are_found_as_may_leave(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any forest with any pins, `find` names enough blocks without pinned descendants, children first."""
    monkeypatch.setattr(coldest, "MOST_REACH", 8)
    dice = np.random.default_rng(seed)
    kit = Kit(tier(HOST, 160, segment=16, eviction=policy))
    stems = [chain(f"{seed}/{i}", 20) for i in range(3)]
    for number in range(12):
        stem, shared = stems[dice.integers(3)], int(dice.integers(0, 20))
        whole = np.concatenate((stem[:shared], chain(f"{seed}/tail/{number}", int(dice.integers(1, 6)))))
        kit.put(whole)
        kit.release(kit.acquire(group(whole[: dice.integers(1, len(whole) + 1)])).lease)
    index = kit.core._index
    tracked = np.flatnonzero(index.page[0] >= 0)
    kit.core.pin_blocks(dice.choice(tracked, 3, replace=False))
    free = set(tracked[~index.held[0][tracked]].tolist()) - waiting(kit, tracked)
    for count in (1, 2, 7, len(free), len(tracked)):
        found = kit.core._planner.room.coldest.find(0, count).tolist()
        assert len(set(found)) == len(found) and set(found) <= free
        assert len(found) == min(count, len(free)) or 2 * len(found) >= count
        for at, block in enumerate(found):
            below = tracked[index.blocks.parent[tracked] == block]
            assert set(below.tolist()) <= set(found[:at])


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_behind_a_pinned_tail_cost_no_search_each(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pinned tail guards the coldest chain, a put asks the policy for at most 8 times its blocks."""
    monkeypatch.setattr(coldest, "MOST_REACH", 64)
    kit = Kit(tier(HOST, 1200, segment=100, eviction=policy))
    for name in "abc":
        kit.put(chain(name, 400))
    kit.core.pin_blocks(kit.ids(chain("a", 400)[-1:]))
    asked = counted(kit)
    answer = kit.reserve(chain("d", 400))
    assert answer.statuses[0].tolist() == [BlockStatus.RESERVED] * 400
    assert len(asked) <= 16 and sum(asked) <= 8 * 400
    assert 0 in kit.tiers_of(chain("a", 400)[:1])


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_beside_flights_cost_no_search_each(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds while the tails of the coldest chains are being demoted."""
    monkeypatch.setattr(coldest, "MOST_REACH", 64)
    host = tier(HOST, 1200, segment=100, eviction=policy, high_watermark=0.8, low_watermark=0.7)
    kit = Kit(host, tier(NVME, 2400, segment=100, eviction=policy))
    for name in "abc":
        kit.put(chain(name, 400))
    kit.took(kit.core.demote(kit.tick()))
    assert kit.flying
    asked = counted(kit)
    assert kit.reserve(chain("d", 400)).statuses[0].tolist() == [BlockStatus.RESERVED] * 400
    assert len(asked) <= 16 and sum(asked) <= 8 * 400


def put_in_parts(kit: Kit, names: Ids, part: int, first: int = 0, *, session: int = 1) -> None:
    """Puts one part after the other, as the SDK does, up to the first part with NO_ROOM."""
    for at in range(first, len(names), part):
        blocks = np.zeros(part, PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = names[at : at + part], 16, PAGE
        query = PutQuery(1, names[at - 1].tobytes() if at else ROOT, at, blocks)
        reserved = kit.core.reserve(session, groups=[query], kind=HOST, now=kit.tick())
        kit.took(reserved.plan)
        if reserved.reservation:
            kit.commit(reserved, session=session)
        if BlockStatus.NO_ROOM in reserved.statuses[0]:
            break


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_prompt_that_does_not_fit_the_longest_prefix_stays(policy: str) -> None:
    """A put in parts evicts other chains, and has no room when only its own chain is left."""
    kit, a = Kit(tier(HOST, 32, segment=8, eviction=policy)), chain("a", 96)
    kit.put(chain("b", 16))
    put_in_parts(kit, a, 8)
    assert kit.tiers_of(a) == [0] * 32 + [-1] * 64


def test_of_a_prompt_longer_than_the_search_goes_up_the_head_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more blocks precede a put than `unguarded` visits, the put evicts none of the unvisited ones."""
    monkeypatch.setattr("tierd.core.space.coldest.MOST_ABOVE", 4)
    kit, a = Kit(tier(HOST, 32, segment=8)), chain("a", 40)
    put_in_parts(kit, a, 8)
    assert kit.tiers_of(a) == [0] * 32 + [-1] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_prompt_that_does_not_fit_what_is_farther_leaves_first(policy: str) -> None:
    """Memory drops first those of a prompt's blocks that NVMe holds, so the core serves the whole prompt."""
    host = tier(HOST, 32, segment=8, eviction=policy, high_watermark=0.01, low_watermark=0.0)
    kit, a = Kit(host, tier(NVME, 128, segment=8, eviction=policy)), chain("a", 40)
    put_in_parts(kit, a[:24], 8)
    kit.took(kit.core.demote(kit.tick()))
    kit.land()
    put_in_parts(kit, a, 8, 24)
    assert -1 not in kit.tiers_of(a)


@pytest.mark.parametrize("policy", POLICIES)
def test_another_chain_is_broken_before_a_prompt_finds_no_room(policy: str) -> None:
    """If another chain's last block is pinned, the put evicts the blocks before it."""
    kit, a, b = Kit(tier(HOST, 32, segment=8, eviction=policy)), chain("a", 40), chain("b", 16)
    kit.put(b)
    kit.core.pin_blocks(kit.ids(b[-1:]))
    put_in_parts(kit, a, 8)
    assert kit.tiers_of(a) == [0] * 31 + [-1] * 9


@pytest.mark.parametrize("policy", ["lru", "reuse-index"])
def test_of_a_prompt_that_does_not_fit_no_middle_leaves_before_the_head(policy: str) -> None:
    """If NVMe holds only a prompt's end, memory drops none of it: earlier blocks would be tips and go
    next."""
    host = tier(HOST, 32, segment=8, eviction=policy, high_watermark=0.01, low_watermark=0.0)
    kit, a = Kit(host, tier(NVME, 128, segment=8, eviction=policy)), chain("a", 40)
    put_in_parts(kit, a[:24], 8)
    kit.core.pin_blocks(kit.ids(a[:16]))
    kit.demote()
    kit.land()
    kit.core.unpin_blocks(kit.ids(a[:16]))
    put_in_parts(kit, a, 8, 24)
    assert kit.tiers_of(a) == [0] * 32 + [-1] * 8


def test_a_tip_takes_no_block_with_it_that_was_used_later() -> None:
    """A cold tail is evicted before a head in later use, and that head only after colder tails."""
    kit, a, b = Kit(tier(HOST, 12)), chain("a", 6), chain("b", 6)
    kit.put(a)
    kit.put(b)
    kit.release(kit.acquire(group(a[:3])).lease)
    index, find = kit.core._index, kit.core._planner.room.coldest
    tips = kit.ids(np.concatenate((a[-1:], b[-1:])))
    found = find._with_parents(0, tips, 12, all_above=False)
    assert found.tolist() == [*kit.ids(a[:2:-1]).tolist(), *kit.ids(b[::-1]).tolist()]
    assert find._with_parents(0, tips, 12, all_above=True).tolist() == [*found.tolist(), *kit.ids(a[2::-1]).tolist()]
    index.blocks.last_used[kit.ids(b[:3])] += 1
    held_back = find._with_parents(0, tips, 11, all_above=True).tolist()
    assert held_back[6:] == [*kit.ids(a[2::-1]).tolist(), *kit.ids(b[2:0:-1]).tolist()]


def test_a_circle_of_parents_ends_no_search() -> None:
    """A pinned cycle of parents costs other blocks no more than a search."""
    kit = Kit(tier(HOST, 8))
    names = chain("circle", 3)
    for number in range(3):
        block = np.zeros(1, PUT_BLOCK)
        block["hash"], block["tokens"], block["length"] = names[number], 16, PAGE
        query = PutQuery(1, names[number - 1].tobytes(), number, block)
        kit.commit(kit.core.reserve(1, groups=[query], kind=HOST, now=kit.tick()))
    kit.put(chain("a", 5))
    assert kit.reserve(chain("b", 4)).statuses[0].tolist() == [BlockStatus.RESERVED] * 4
    kit.core.pin_blocks(kit.ids(names))
    assert kit.reserve(chain("c", 2)).statuses[0].tolist()[0] == BlockStatus.RESERVED


@pytest.mark.parametrize("priority", [0, 90], ids=["nothing said", "a priority"])
def test_what_a_call_touches_above_its_blocks_is_bounded(priority: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit to a growing chain touches at most ABOVE_LIMIT blocks. The chain still loses its tail
    first."""
    monkeypatch.setattr(blocks_module, "ABOVE_LIMIT", 4)
    monkeypatch.setattr("tierd.core.index.priorities.ABOVE_LIMIT", 4)
    kit, a = Kit(tier(HOST, 32, eviction="priority")), chain("a", 24)
    policy, touched = kit.core._index.policies[0], list[int]()
    touch = policy.touch
    policy.touch = lambda blocks, now: touched.append(len(blocks)) or touch(blocks, now)  # type: ignore[method-assign]
    for number in range(24):
        block = np.zeros(1, PUT_BLOCK)
        block["hash"], block["tokens"], block["length"] = a[number], 16, PAGE
        parent = a[number - 1].tobytes() if number else ROOT
        priorities = np.array([priority], np.uint8) if number == 23 and priority else None
        query = PutQuery(1, parent, number, block, priorities)
        kit.commit(kit.core.reserve(1, groups=[query], kind=HOST, now=kit.tick()))
    assert max(touched) <= 4
    raised = kit.core._index.blocks.priority[kit.ids(a)] > 0
    assert raised.sum() == (5 if priority else 0)
    kit.put(chain("b", 20))
    held = [found == 0 for found in kit.tiers_of(a)]
    assert held == sorted(held, reverse=True) and 0 < sum(held) < 24


@pytest.mark.parametrize("policy", POLICIES)
def test_no_segment_is_emptied_that_holds_what_another_writers_put_continues(policy: str) -> None:
    """A writer that continues a prompt gets no segment of it, but NO_ROOM, and the prompt stays whole."""
    kit, a, b = Kit(tier(HOST, 32, segment=8, eviction=policy)), chain("a", 36), chain("b", 4)
    kit.core.open_session(2, domain=1)
    kit.put(b)
    put_in_parts(kit, a[:28], 4)
    put_in_parts(kit, a, 4, 28, session=2)
    assert kit.tiers_of(a) == [0] * 28 + [-1] * 8


@pytest.mark.parametrize("policy", ["lru", "reuse-index"])
def test_a_segment_is_emptied_if_a_farther_tier_has_what_a_put_continues(policy: str) -> None:
    """A writer that continues a prompt may get its segments if NVMe holds their blocks."""
    host = tier(HOST, 32, segment=8, eviction=policy, high_watermark=0.01, low_watermark=0.0)
    kit, a = Kit(host, tier(NVME, 128, segment=8, eviction=policy)), chain("a", 40)
    kit.core.open_session(2, domain=1)
    put_in_parts(kit, a[:32], 8)
    kit.took(kit.core.demote(kit.tick()))
    kit.land()
    put_in_parts(kit, a, 8, 32, session=2)
    assert kit.tiers_of(a)[32:] == [0] * 8
    assert -1 not in kit.tiers_of(a)
