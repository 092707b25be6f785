"""Room: the choice of the blocks that the core evicts for a put."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import PUT_BLOCK, BlockStatus, Need, Reason
from tierd.core.plan import PutQuery

RESERVED, NO_ROOM = BlockStatus.RESERVED, BlockStatus.NO_ROOM


def test_the_coldest_leaves_first() -> None:
    """Without free pages, a put evicts the least recently used blocks."""
    kit = Kit(tier(HOST, 8))
    for name in "abcd":
        kit.put(chain(name, 2))
    acquired = kit.acquire(group(chain("a", 2)))
    kit.release(acquired.lease)
    plan = kit.reserve(chain("e", 3)).plan
    assert plan.freed["reason"].tolist() == [Reason.EVICTED] * 3
    assert kit.tiers_of(chain("a", 2)) == [0, 0]
    assert kit.tiers_of(chain("b", 2)) == [-1, -1]
    assert kit.tiers_of(chain("c", 2)) == [0, -1]


def test_a_dropped_block_with_a_far_copy_was_demoted() -> None:
    """A dropped block with a farther copy is DEMOTED and still a hit; one without is EVICTED."""
    kit = Kit(tier(HOST, 4), tier(NVME, 8))
    kit.put(chain("a", 2))
    kit.took(kit.core.persist(kit.ids(chain("a", 2)), now=kit.tick()))
    kit.land()
    kit.put(chain("b", 2))
    reasons = kit.reserve(chain("c", 3)).plan.freed["reason"].tolist()
    assert sorted(reasons) == [Reason.EVICTED, Reason.DEMOTED, Reason.DEMOTED]
    assert kit.tiers_of(chain("a", 2)) == [1, 1]


def test_chains_written_block_by_block_lose_their_tails_first() -> None:
    """The core evicts a chain from its end, even if its head was used longest ago."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 6)
    for number in range(6):
        blocks = np.zeros(1, PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = a[number], 16, PAGE
        parent = a[number - 1].tobytes() if number else bytes(32)
        kit.commit(kit.core.reserve(1, groups=[PutQuery(1, parent, number, blocks)], kind=HOST, now=kit.tick()))
    kit.put(chain("b", 5))
    assert kit.tiers_of(a) == [0, 0, 0, -1, -1, -1]


def test_a_pinned_tail_does_not_bring_the_tier_to_a_halt() -> None:
    """If every evictable block has a pinned descendant, the coldest is evicted all the same."""
    kit, a = Kit(tier(HOST, 4)), chain("a", 4)
    kit.put(a)
    kit.core.pin_blocks(kit.ids(a[3:]))
    assert kit.reserve(chain("b", 2)).statuses[0].tolist() == [RESERVED] * 2
    assert kit.tiers_of(a)[3] == 0


@pytest.mark.parametrize(("other", "wanted", "gone"), [(2, 1, 4), (1, 2, 1)], ids=["of no use", "of the right size"])
def test_what_a_pinned_tail_holds_back_leaves_where_nothing_else_helps(other: int, wanted: int, gone: int) -> None:
    """If nothing else helps, blocks before a pinned tail leave: a segment for another size, else one
    block."""
    kit, a, b, c = Kit(tier(HOST, 32, segment=8)), chain("a", 12), chain("b", 2), chain("c", 8 // other - 2)
    kit.put(a, length=2 * PAGE)
    kit.put(b, length=other * PAGE)
    kit.put(c, length=other * PAGE)
    kit.core.pin_blocks(kit.ids(np.concatenate((a[-1:], c))))
    answer = kit.reserve(chain("d", 1), length=wanted * PAGE)
    assert answer.statuses[0].tolist() == [RESERVED]
    held = kit.core._index.page[0]
    assert (held[kit.ids(a)] >= 0).sum() == len(a) - gone and held[kit.ids(a)][-1] >= 0
    assert (kit.tiers_of(b), kit.tiers_of(c)) == ([0] * 2, [0] * len(c))


def test_what_a_pinned_tail_holds_back_does_not_leave_for_what_follows_it() -> None:
    """A put that continues such a chain gets NO_ROOM, because an eviction would make the chain useless."""
    kit, a, b, c = Kit(tier(HOST, 32, segment=8)), chain("a", 12), chain("b", 2), chain("c", 6)
    kit.put(a, length=2 * PAGE)
    kit.put(b)
    kit.put(c)
    kit.core.pin_blocks(kit.ids(np.concatenate((a[-1:], c))))
    blocks = np.zeros(1, PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = chain("d", 1), 16, 2 * PAGE
    answer = kit.core.reserve(1, groups=[PutQuery(1, a[-1].tobytes(), 12, blocks)], kind=HOST, now=kit.tick())
    assert answer.statuses[0].tolist() == [NO_ROOM]
    assert kit.tiers_of(a) == [0] * 12


def test_windows_lose_their_heads() -> None:
    """In a namespace of LAST_TOKENS queries, old blocks are evicted before later ones."""
    kit, w = Kit(tier(HOST, 8)), chain("w", 6)
    kit.put(w)
    window = group(w, need=Need.LAST_TOKENS, last=32)
    kit.release(kit.acquire(window).lease)
    kit.put(chain("b", 6))
    assert kit.tiers_of(w) == [-1, -1, -1, -1, 0, 0]


def test_classes_trade_memory() -> None:
    """A tier that is full of one class gives a cold segment to another class, repeatedly and both ways."""
    kit = Kit(tier(HOST, 8))
    for turn in range(6):
        length = PAGE if turn % 2 else 2 * PAGE
        count = 8 * PAGE // length
        kit.put(chain(f"small {turn}", count), length=length)
        assert kit.tiers_of(chain(f"small {turn}", count)) == [0] * count
    assert [s.class_bytes for s in kit.core.segments(0)] == [PAGE, PAGE]


def test_domains_and_writers_trade_memory() -> None:
    """A session of another domain gets room in a tier that is full of cold foreign blocks."""
    kit = Kit(tier(HOST, 8))
    kit.core.open_session(2, domain=2)
    kit.put(chain("a", 8))
    kit.put(chain("b", 3), session=2, namespace=2)
    assert kit.tiers_of(chain("b", 3), 2) == [0] * 3
    assert kit.tiers_of(chain("a", 8)).count(0) == 4


def test_a_segment_in_which_something_is_held_is_passed_over() -> None:
    """The core empties the coldest segment without pins. If all have pins: NO_ROOM, and nothing is
    dropped."""
    kit = Kit(tier(HOST, 8))
    kit.put(chain("a", 4))
    kit.put(chain("b", 4))
    first = kit.acquire(group(chain("a", 1)))
    assert kit.reserve(chain("big", 1), length=2 * PAGE).statuses[0].tolist() == [RESERVED]
    assert kit.tiers_of(chain("a", 4)) == [0] * 4
    kit.acquire(group(chain("a", 1)))
    kit.core.abort(1, reservation=first.lease + 1, now=kit.tick())
    kit = Kit(tier(HOST, 8))
    for name in "ab":
        kit.put(chain(name, 4))
        kit.acquire(group(chain(name, 1)))
    answer = kit.reserve(chain("big", 1), length=2 * PAGE)
    assert answer.statuses[0].tolist() == [NO_ROOM]
    assert answer.plan.is_empty


@pytest.mark.parametrize("pages", [256, 4096])
def test_no_room_is_told_after_a_look_at_the_coldest(pages: int) -> None:
    """If every segment has a pin, another class gets NO_ROOM after fewer than 256 named victims."""
    kit = Kit(tier(HOST, pages, segment=64))
    for number in range(pages // 64):
        kit.put(chain(f"{number}", 64))
        kit.acquire(group(chain(f"{number}", 1)))
    named, policy = list[int](), kit.core._index.policies[0]
    victims = policy.victims
    policy.victims = lambda count, held: named.append(count) or victims(count, held)  # type: ignore[method-assign]
    assert kit.reserve(chain("big", 1), length=2 * PAGE).statuses[0].tolist() == [NO_ROOM]
    assert sum(named) < 256


def test_a_segment_without_anything_held_is_found_however_hot_it_is() -> None:
    """If all cold segments have pins, the one segment without a pin gives room, however hot it is."""
    kit = Kit(tier(HOST, 4096, segment=64))
    for number in range(64):
        kit.put(chain(f"{number}", 64))
        if number < 63:
            kit.acquire(group(chain(f"{number}", 1)))
    assert kit.reserve(chain("big", 1), length=2 * PAGE).statuses[0].tolist() == [RESERVED]
    assert kit.tiers_of(chain("63", 64)) == [-1] * 64


def test_operators_pins_are_respected() -> None:
    """An operator's pin blocks eviction for room and by hand, until it is unpinned."""
    kit, a = Kit(tier(HOST, 4)), chain("a", 4)
    kit.put(a)
    assert kit.core.pin_blocks(kit.ids(a)) == 4
    assert kit.core.pin_blocks(kit.ids(a)) == 0
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [NO_ROOM]
    assert not kit.took(kit.core.evict(kit.ids(a), tier=None, now=kit.tick())).freed.size
    assert kit.core.unpin_blocks(kit.ids(a)) == 4
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [RESERVED]


def test_the_order_of_ends_decides_nothing() -> None:
    """The order in which transfers end does not change later decisions."""

    def world(order: list[int]) -> list[bytes]:
        kit = Kit(tier(HOST, 8, high_watermark=0.5, low_watermark=0.25), tier(NVME, 16))
        for name in "abc":
            kit.put(chain(name, 2))
        kit.demote()
        for number in order:
            kit.land(only=[number])
        plans = [kit.reserve(chain("d", 3)).plan, kit.demote(), kit.acquire(group(chain("a", 2))).plan]
        return [p.freed.tobytes() + p.reserved.tobytes() + p.transfers.tobytes() for p in plans]

    assert world([0, 0, 0, 0]) == world([3, 2, 1, 0]) == world([1, 2, 0, 0])


def test_equal_calls_get_equal_answers() -> None:
    """Two cores with the same calls decide the same, byte for byte."""

    def world() -> list[bytes]:
        kit, out = Kit(tier(HOST, 16), tier(NVME, 32)), []
        for turn in range(30):
            reserved = kit.reserve(chain(f"s{turn % 7}", 2 + turn % 5), length=PAGE * (1 + turn % 2))
            out.append(reserved.plan.reserved.tobytes() + reserved.plan.freed.tobytes())
            if reserved.reservation:
                kit.commit(reserved)
            out.append(kit.acquire(group(chain(f"s{turn % 3}", 2))).plan.transfers.tobytes())
            kit.release(*range(3 * turn + 5))
        return out

    assert world() == world()


@pytest.mark.parametrize("seed", range(30))
def test_a_head_goes_after_all_that_hangs_on_it(seed: int) -> None:
    """`tails_first` keeps the order of the victims, but defers each until its last child has gone."""
    dice = np.random.default_rng(seed)
    kit = Kit(tier(HOST, 128))
    stems = [chain(f"{seed}/{i}", 12) for i in range(4)]
    for number in range(16):
        stem, shared = stems[dice.integers(4)], int(dice.integers(0, 12))
        kit.put(np.concatenate((stem[:shared], chain(f"{seed}/tail/{number}", int(dice.integers(1, 8))))))
    index = kit.core._index
    tracked = np.flatnonzero(index.page[0] >= 0)
    victims = dice.permutation(tracked)[: dice.integers(1, len(tracked) + 1)]
    victims = victims if seed % 2 else victims[np.argsort(-index.blocks.position[victims].astype(int), kind="stable")]
    ready: list[int] = []
    while True:  # by brute force: the first victim without remaining children
        gone = set(ready)
        below = [set(tracked[index.blocks.parent[tracked] == block].tolist()) for block in victims.tolist()]
        free = [b for b, children in zip(victims.tolist(), below, strict=True) if b not in gone and children <= gone]
        if not free:
            break
        ready.append(free[0])
    assert kit.core._planner.room.coldest.tails_first(0, victims).tolist() == ready
