"""Demotion, persistence, and the effects of ended transfers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import DEVICE, HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import BlockStatus, Reason, StructArray
from tierd.core.plan import Ids
from tierd.core.space import demotion
from tierd.errors import NotFound

READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT


def test_demotion_runs_from_high_to_low() -> None:
    """Above the high watermark demotion writes the coldest blocks down to the low one, and evicts none."""
    kit = Kit(tier(HOST, 16, high_watermark=0.7, low_watermark=0.5), tier(NVME, 16))
    kit.put(chain("a", 11))
    assert kit.demote().is_empty
    kit.put(chain("b", 1))
    plan = kit.demote()
    assert plan.transfers["reason"].tolist() == [Reason.DEMOTION] * 4
    assert kit.demote().is_empty
    assert not kit.land().freed.size
    assert kit.demote().is_empty
    assert kit.tiers_of(chain("a", 11)) == [0] * 11
    kit.took(kit.core.evict(kit.ids(chain("a", 11)), tier=0, now=kit.tick()))
    assert kit.tiers_of(chain("a", 11)) == [-1] * 7 + [1] * 4


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core looks at four blocks each time, so that a tier of dozens is a large one."""
    for module in ("demotion", "room", "unsaved"):
        monkeypatch.setattr(f"tierd.core.space.{module}.MOST_REACH", 4)


@pytest.fixture
def large(few: None) -> Kit:
    """A kit whose host tier of 64 pages exceeds the blocks that the core looks at each time.
    Above a share of 0.6 demotion writes blocks until those above 0.5 are clean."""
    return Kit(tier(HOST, 64, high_watermark=0.6, low_watermark=0.5), tier(NVME, 96))


def saved(kit: Kit, hashes: StructArray) -> list[bool]:
    """For each block of a chain, if the store has it once demotion ends."""
    while not kit.demote(limit=3).is_empty:
        kit.land()
    return (kit.core._index.page[1][kit.ids(hashes)] >= 0).tolist()


def test_a_large_tier_keeps_its_watermarks_too(large: Kit) -> None:
    """In a large tier only the coldest blocks above the low watermark are clean, also after new puts."""
    a, b, c = (chain(name, 20) for name in "abc")
    for hashes in (a, b, c):
        large.put(hashes)
    assert [sum(saved(large, hashes)) for hashes in (a, b, c)] == [20, 8, 0]
    assert saved(large, b) == [False] * 12 + [True] * 8  # the last block of a chain is its coldest
    d = chain("d", 30)
    large.put(d)
    assert [int(np.sum(large.core._index.page[0][large.ids(each)] >= 0)) for each in (a, b, c, d)] == [0, 14, 20, 30]
    assert [sum(saved(large, hashes)) for hashes in (a, b, c, d)] == [20, 20, 18, 0]


@pytest.mark.usefixtures("few")
def test_a_budget_of_wear_is_not_asked_for_all_at_once() -> None:
    """Above a store with a wear budget, demotion asks for only the coldest few of a large tier."""
    store = tier(NVME, 96, wear_bytes_per_s=1e9)
    kit = Kit(tier(HOST, 64, high_watermark=0.6, low_watermark=0.5), store)
    kit.put(chain("a", 60))
    assert sum(saved(kit, chain("a", 60))) <= 4


def test_what_a_store_loses_of_a_large_tier_is_written_again(large: Kit) -> None:
    """After a store loses its blocks, demotion writes the coldest again without a new put."""
    chains = [chain(name, 20) for name in "abc"]
    for hashes in chains:
        large.put(hashes)
    assert [sum(saved(large, hashes)) for hashes in chains] == [20, 8, 0]
    store = large.core._index.tiers[1]
    large.took(large.core.lose(store.extents(np.flatnonzero(store.block[: store.top] >= 0)), now=large.tick()))
    assert [sum(saved(large, hashes)) for hashes in chains] == [20, 8, 0]


@pytest.mark.usefixtures("few")
def test_what_can_go_nowhere_keeps_nothing_from_being_written() -> None:
    """A cold block that is too long for the store stays unsaved, and demotion writes the others."""
    kit = Kit(tier(HOST, 64, high_watermark=0.6, low_watermark=0.5), tier(NVME, 96, segment=1))
    kit.put(chain("long", 1), length=2 * PAGE)
    a = chain("a", 48)
    kit.put(a)
    assert sum(saved(kit, a)) >= 17


@pytest.mark.usefixtures("few")
def test_a_store_that_goes_makes_a_large_tier_unsaved_again() -> None:
    """If a store goes out of service, demotion writes its blocks to another, down to the low watermark."""
    kit = Kit(tier(HOST, 64, high_watermark=0.6, low_watermark=0.5), tier(NVME, 64), tier(NVME, 64, index=1))
    a = chain("a", 60)
    kit.put(a)
    saved(kit, a)
    held = [kit.core._index.page[store] for store in (1, 2)]
    before = [int((page[kit.ids(a)] >= 0).sum()) for page in held]
    assert sum(before) == 28 and min(before) > 4
    kit.core.set_serving(1, False)
    saved(kit, a)
    assert int((held[1][kit.ids(a)] >= 0).sum()) == 28


@pytest.mark.usefixtures("few")
def test_a_search_writes_no_more_than_the_low_mark_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the unsaved blocks are larger than the rest, demotion still stops at the low watermark."""
    monkeypatch.setattr("tierd.core.space.unsaved.LOOKS", 1)
    kit = Kit(tier(HOST, 128, segment=16, high_watermark=0.6, low_watermark=0.5), tier(NVME, 256, segment=32))
    small, large = chain("small", 48), [chain(f"{name}", 1) for name in range(5)]
    kit.put(small)
    kit.took(kit.core.persist(kit.ids(small), now=kit.tick()))
    kit.land()
    for hashes in large:
        kit.put(hashes, length=16 * PAGE)
    assert [sum(saved(kit, hashes)) for hashes in large] == [1, 0, 0, 0, 0]


def test_a_large_tier_is_not_looked_through_for_nothing(large: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a large tier is clean, demotion searches no further until enough new blocks came."""
    for name in range(6):
        large.put(chain(f"{name}", 10))
    saved(large, chain("0", 10))
    unsaved, searched = large.core._demotion._unsaved, list[int]()
    search = unsaved._search

    def count_searches(tier: int, over_bytes: float, *, count: int) -> Ids:
        searched.append(count)
        return search(tier, over_bytes, count=count)

    monkeypatch.setattr(unsaved, "_search", count_searches)
    for name in range(3):
        large.put(chain(f"more {name}", 1))
        saved(large, chain("0", 1))
    assert not searched
    for name in range(8):
        large.put(chain(f"still more {name}", 2))
        saved(large, chain("0", 1))
    assert searched


def test_room_is_made_of_what_is_clean() -> None:
    """A put into a full tier drops blocks that demotion wrote ahead, and loses nothing."""
    kit = Kit(tier(HOST, 8, high_watermark=0.7, low_watermark=0.5), tier(NVME, 16))
    kit.put(chain("a", 8))
    kit.demote()
    kit.land()
    reserved = kit.reserve(chain("b", 4))
    assert reserved.plan.freed["reason"].tolist() == [Reason.DEMOTED] * 4
    assert kit.tiers_of(chain("a", 8)) == [0] * 4 + [1] * 4


def test_demotion_goes_on_between_the_watermarks() -> None:
    """With a limit, later calls continue to the low watermark below the high one."""
    kit = Kit(tier(HOST, 16, high_watermark=0.9, low_watermark=0.5), tier(NVME, 16))
    kit.put(chain("a", 15))
    assert [len(kit.demote(limit=3).transfers) for _ in range(4)] == [3, 3, 1, 0]


@pytest.mark.parametrize(
    ("most_bytes", "sent"), [(3 * PAGE, [3, 3, 1, 0]), (3 * PAGE - 1, [2, 2, 2, 1]), (1, [1, 1, 1, 1])]
)
def test_a_plan_of_demotion_has_few_bytes(monkeypatch: pytest.MonkeyPatch, most_bytes: int, sent: list[int]) -> None:
    """A plan sends blocks up to its byte limit, and at least one. The next plans go on."""
    monkeypatch.setattr(demotion, "PLAN_BYTES", most_bytes)
    kit = Kit(tier(HOST, 16, high_watermark=0.9, low_watermark=0.5), tier(NVME, 16))
    kit.put(chain("a", 15))
    assert [len(kit.demote().transfers) for _ in sent] == sent


def test_the_far_copy_makes_the_next_demotion_free() -> None:
    """A promoted block keeps its NVMe page, and leaves host memory without another write."""
    kit = Kit(tier(HOST, 8, high_watermark=0.5, low_watermark=0.25), tier(NVME, 16))
    a = chain("a", 5)
    kit.put(a)
    assert len(kit.demote().transfers) == 3
    kit.land()
    assert kit.demote().is_empty
    kit.took(kit.core.evict(kit.ids(a[2:]), tier=0, now=kit.tick()))
    kit.release(kit.acquire(group(a)).lease)
    kit.land()
    assert kit.demote().is_empty
    assert (
        kit.took(kit.core.evict(kit.ids(a[2:]), tier=0, now=kit.tick())).freed["reason"].tolist() == [Reason.ADMIN] * 3
    )
    assert kit.tiers_of(a) == [0, 0, 1, 1, 1]


def test_a_chain_of_tiers_drains_step_by_step() -> None:
    """Device blocks go to the host, host blocks to NVMe. The last tier evicts its coldest for room."""
    kit = Kit(
        tier(DEVICE, 4, high_watermark=0.5, low_watermark=0.25),
        tier(HOST, 4, high_watermark=0.5, low_watermark=0.25),
        tier(NVME, 8),
    )
    for number in range(8):
        kit.put(chain(f"{number}", 3), kind=DEVICE)
        while not kit.demote().is_empty:
            while kit.flying:
                kit.land()
    assert [stats.pages_ready for stats in kit.core.tier_stats()] == [4, 4, 8]
    assert kit.core.stats().freed.keys() == {"DEMOTED", "EVICTED"}


def test_without_a_farther_tier_nothing_leaves_before_it_must() -> None:
    """The last tier in service fills up, whatever its watermarks; a put then evicts the coldest."""
    kit = Kit(tier(HOST, 4, high_watermark=0.5, low_watermark=0.25), tier(NVME, 8))
    kit.put(chain("a", 4))
    kit.core.set_serving(1, False)
    assert kit.demote().is_empty
    assert kit.reserve(chain("b", 1)).plan.freed["reason"].tolist() == [Reason.EVICTED]
    assert kit.tiers_of(chain("a", 4)) == [0, 0, 0, -1]


def test_headroom_is_cleared_of_the_coldest() -> None:
    """A put may use the headroom. Demotion then evicts the coldest blocks from it."""
    kit = Kit(tier(HOST, 8, headroom_bytes=2 * PAGE))
    kit.put(chain("a", 6))
    assert kit.demote().is_empty
    assert not kit.reserve(chain("b", 2)).plan.freed.size
    assert kit.demote().freed["reason"].tolist() == [Reason.EVICTED] * 2
    assert kit.tiers_of(chain("a", 6)) == [0, 0, 0, 0, -1, -1]
    assert kit.demote().is_empty


def test_headroom_waits_for_what_is_being_written() -> None:
    """Over a store demotion writes the coldest blocks first, and then frees them for headroom."""
    kit = Kit(tier(HOST, 8, headroom_bytes=2 * PAGE, high_watermark=1.0, low_watermark=1.0), tier(NVME, 16))
    for name in "abcdefgh":
        kit.put(chain(name, 1))
    for name in "cdefgh":
        kit.took(kit.core.persist(kit.ids(chain(name, 1)), now=kit.tick()))
        kit.land()
    plan = kit.demote()
    assert (len(plan.transfers), len(plan.freed)) == (2, 0)
    assert kit.demote().is_empty
    kit.land()
    assert kit.demote().freed["reason"].tolist() == [Reason.DEMOTED] * 2
    assert [kit.tiers_of(chain(name, 1)) for name in "abc"] == [[1], [1], [0]]


def test_headroom_waits_for_nothing_that_cannot_be_written() -> None:
    """Without a writable store the headroom is cleared of blocks without a copy."""
    kit = Kit(tier(HOST, 8, headroom_bytes=2 * PAGE), tier(NVME, 16))
    kit.put(chain("a", 8))
    kit.core.set_writable(1, False)
    assert kit.demote().freed["reason"].tolist() == [Reason.EVICTED] * 2


def test_two_full_tiers_do_not_hand_each_other_the_same_blocks() -> None:
    """Above a full store demotion ends: it rewrites no block that the store evicted before its next use."""
    kit = Kit(tier(HOST, 8, high_watermark=0.2, low_watermark=0.1), tier(NVME, 4))
    for name in "abc":
        kit.put(chain(name, 4))
        for _ in range(20):
            plan = kit.demote()
            kit.land()
            if plan.is_empty:
                break
        assert plan.is_empty


def test_a_full_far_tier_drops_its_coldest() -> None:
    """A write into a full far tier evicts its coldest blocks."""
    kit = Kit(tier(HOST, 4, high_watermark=0.5, low_watermark=0.25), tier(NVME, 4))
    for name in "abc":
        kit.put(chain(name, 2))
        kit.took(kit.core.persist(kit.ids(chain(name, 2)), now=kit.tick()))
        kit.land()
        kit.took(kit.core.evict(kit.ids(chain(name, 2)), tier=0, now=kit.tick()))
    assert [kit.tiers_of(chain(name, 2)) for name in "abc"] == [[-1, -1], [1, 1], [1, 1]]


def test_a_far_tier_full_of_pins_stops_demotion_but_not_puts() -> None:
    """If the far tier has no free page, blocks stay near; a put then evicts the coldest."""
    kit = Kit(tier(HOST, 4, high_watermark=0.5, low_watermark=0.25), tier(NVME, 4))
    kit.put(chain("a", 4))
    kit.took(kit.core.persist(kit.ids(chain("a", 4)), now=kit.tick()))
    kit.land()
    kit.core.pin_blocks(kit.ids(chain("a", 4)))
    kit.took(kit.core.evict(kit.ids(chain("a", 4)), tier=0, now=kit.tick()))
    kit.core.set_serving(0, True)
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [BlockStatus.NO_ROOM]
    kit.core.unpin_blocks(kit.ids(chain("a", 4)))
    kit.put(chain("b", 4))
    kit.core.pin_blocks(kit.ids(chain("a", 4)))
    kit.took(kit.core.evict(kit.ids(chain("b", 4)), tier=1, now=kit.tick()))
    kit.demote()
    assert kit.reserve(chain("c", 1)).statuses[0].tolist() == [BlockStatus.RESERVED]


def test_blocks_that_no_far_segment_can_hold_do_not_block_the_way() -> None:
    """A block longer than the far tier's segments stays near; demotion writes the others."""
    kit = Kit(tier(HOST, 16, high_watermark=0.5, low_watermark=0.1, segment=8), tier(NVME, 16, segment=1))
    kit.put(chain("big", 1), length=4 * PAGE)
    kit.put(chain("a", 8))
    assert len(kit.demote().transfers) > 0
    kit.land()
    assert kit.demote().is_empty
    assert kit.tiers_of(chain("big", 1)) == [0]


@pytest.mark.parametrize("status", [FAILED, CORRUPT])
def test_a_demotion_that_fails_keeps_the_block(status: int) -> None:
    """A failed write keeps the near page READY; a near page with corrupt bytes is a miss from then on."""
    kit, a = Kit(tier(HOST, 4, high_watermark=0.5, low_watermark=0.5), tier(NVME, 8)), chain("a", 3)
    kit.put(a)
    kit.demote()
    freed = kit.land(status).freed["reason"].tolist()
    if status is FAILED:
        assert freed == [Reason.FAILED]
        assert kit.tiers_of(a) == [0, 0, 0]
    else:
        assert sorted(freed) == [Reason.CORRUPTED, Reason.FAILED]
        assert kit.tiers_of(a) == [0, 0, -1]


def test_persist_writes_each_block_once() -> None:
    """`persist` writes blocks without an NVMe page, skips written ones and waits for those in flight."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    kit.put(a)
    first = kit.took(kit.core.persist(kit.ids(a[:2]), now=kit.tick()))
    assert first.transfers["reason"].tolist() == [Reason.DURABLE] * 2
    kit.land(only=[0])
    second = kit.took(kit.core.persist(np.append(kit.ids(a), [-1, 10**6]), now=kit.tick()))
    assert len(second.transfers) == 2
    assert second.waits.tolist() == [int(first.transfers["id"][1])]
    kit.land()
    assert kit.core.extents(kit.ids(a), tier=1)["page"].min() >= 0
    assert kit.took(kit.core.persist(kit.ids(a), now=kit.tick())).is_empty
    assert kit.tiers_of(a) == [0] * 4


def test_device_blocks_are_persisted_over_the_host() -> None:
    """A block that only the device holds reaches nvme in two chained transfers."""
    kit, a = Kit(tier(DEVICE, 8), tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a, kind=DEVICE)
    plan = kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    assert plan.transfers["target"]["tier"].tolist() == [1, 1, 2, 2]
    assert plan.transfers["after"].tolist()[2:] == plan.transfers["id"].tolist()[:2]


def test_an_unknown_transfer_is_an_error_and_changes_nothing() -> None:
    """Finishing a transfer twice, or an unknown one, raises NotFound before any change."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a)
    ids = kit.took(kit.core.persist(kit.ids(a), now=kit.tick())).transfers["id"]
    for wrong in ([int(ids[0]), 99], [int(ids[0]), int(ids[0])]):
        with pytest.raises(NotFound):
            kit.core.finish(np.asarray(wrong, np.uint64), statuses=np.full(2, READY, np.uint16), now=kit.tick())
    kit.land()
    assert kit.core.stats().transfers == 0


def test_pages_hold_what_the_target_needs() -> None:
    """A transfer's target has the source's length, its tier's page class and a new generation."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a, length=1000)
    plan = kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    assert plan.transfers["target"]["length"].tolist() == [1000, 1000]
    assert plan.segments[0].class_bytes == 2 * PAGE
    assert plan.reserved["generation"].tolist() == plan.transfers["target"]["generation"].tolist()
    generations = [*plan.transfers["source"]["generation"].tolist(), *plan.reserved["generation"].tolist()]
    assert len(set(generations)) == 4
