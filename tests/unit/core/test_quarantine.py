"""The quarantine of bad pages: it withholds them, is bounded, and does not burden good blocks."""

from __future__ import annotations

import numpy as np

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import BlockStatus, Fault, Reason, StructArray


def condemned(kit: Kit, hashes: StructArray, *, fault: Fault = Fault.DIGEST, position: int = 0) -> StructArray:
    """Condemns the blocks' pages and returns their extents."""
    extents = kit.core.extents(kit.ids(hashes), tier=position)
    plan = kit.took(kit.core.condemn(extents, now=kit.tick(), fault=fault))
    assert set(plan.freed["reason"].tolist()) <= {Reason.CORRUPTED}
    return extents


def withheld(kit: Kit, *, position: int = 0) -> list[tuple[int, int]]:
    """Segment and slot of the quarantined pages, the oldest first."""
    extents = kit.core.quarantined(position)["extent"]
    return list(zip(extents["segment"].tolist(), extents["slot"].tolist(), strict=True))


def test_a_page_found_bad_is_not_given_out_again() -> None:
    """A bad page is in the plan's freed pages, so that tiers retract it. Later reserves get other pages."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5)), chain("a", 4)
    kit.put(a)
    bad = condemned(kit, a[1:2])
    assert withheld(kit) == [(int(bad["segment"][0]), 1)]
    for number in range(20):
        reserved = kit.reserve(chain(f"b{number}", 3))
        assert (
            bad["offset"][0] not in reserved.extents[0]["offset"][reserved.extents[0]["segment"] == bad["segment"][0]]
        )
        kit.commit(reserved)
    assert withheld(kit) == [(int(bad["segment"][0]), 1)]


def test_why_and_since_when_is_kept() -> None:
    """A scrub's finding keeps its fault, a failed copy has Fault.READ, and both keep their time."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5), tier(NVME, 8, quarantine_share=0.5)), chain("a", 2)
    kit.put(a)
    condemned(kit, a[:1], fault=Fault.HEADER)
    scrubbed = kit.now
    kit.took(kit.core.persist(kit.ids(a[1:]), now=kit.tick()))
    kit.land(BlockStatus.CORRUPT)
    found = kit.core.quarantined(0)
    assert found["fault"].tolist() == [Fault.HEADER, Fault.READ]
    assert found["since"].tolist() == [scrubbed, kit.now]
    assert len(kit.core.quarantined(1)) == 0


def test_a_pinned_page_is_withheld_when_it_is_released() -> None:
    """A condemned page is a miss at once, and is withheld when its lease is released."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5)), chain("a", 2)
    kit.put(a)
    acquired = kit.acquire(group(a))
    condemned(kit, a)
    assert (withheld(kit), kit.tiers_of(a)) == ([], [-1, -1])
    kit.release(acquired.lease)
    assert len(withheld(kit)) == 2


def test_a_page_that_nobody_finds_any_more_is_withheld_too() -> None:
    """A bad page of a lease from an ended epoch is withheld, and the next settle of the lease serves
    nothing."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5)), chain("a", 2)
    kit.put(a)
    acquired = kit.acquire(group(a))
    served = kit.settle(acquired)
    kit.forget()
    assert kit.settle(acquired).tokens == served.tokens == 32, "a lease outlives its epoch"
    plan = kit.took(kit.core.condemn(served.groups[0].extents[0][1:], now=kit.tick(), fault=Fault.READ))
    assert (plan.is_empty, withheld(kit)) == (True, [])
    assert kit.settle(acquired).tokens == 0
    assert kit.core.quarantined(0)["fault"].tolist() == [Fault.READ]


def test_the_oldest_come_back_at_the_bound() -> None:
    """At its bound the quarantine drops its oldest pages. A page larger than the bound is not withheld."""
    kit = Kit(tier(HOST, 16, quarantine_share=2 / 16))
    names = [chain(name, 1) for name in "abc"]
    for name in names:
        kit.put(name)
    bad = [condemned(kit, name) for name in names]
    assert withheld(kit) == [(1, int(extent["slot"][0])) for extent in bad[1:]]
    large = chain("large", 1)
    kit.put(large, length=4 * PAGE)
    condemned(kit, large)
    assert withheld(kit) == []
    assert kit.core.tier_stats()[0].quarantined_bytes == 0


def test_condemning_twice_is_once() -> None:
    """A page that a read and a scrub both condemn is withheld once."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5)), chain("a", 1)
    kit.put(a)
    extents = condemned(kit, a)
    assert kit.took(kit.core.condemn(extents, now=kit.tick())).is_empty
    assert len(withheld(kit)) == 1


def test_the_good_copy_stays() -> None:
    """The core drops the bad copy of a block and serves the other copy."""
    kit, a = Kit(tier(HOST, 8, quarantine_share=0.5), tier(NVME, 8, quarantine_share=0.5)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    condemned(kit, a[:1])
    condemned(kit, a[1:], position=1)
    assert kit.tiers_of(a) == [1, 0]
    assert kit.get(group(a)).tokens == 32


def test_a_class_does_not_keep_a_segment_for_one_bad_page() -> None:
    """The core reassigns a segment of only a few quarantined pages before it evicts any good block."""
    kit = Kit(tier(HOST, 8, quarantine_share=0.5))
    small, large = chain("s", 4), chain("l", 4)
    kit.put(small)
    condemned(kit, small[:1])
    kit.took(kit.core.evict(kit.ids(small[1:]), tier=0, now=kit.tick()))
    assert len(withheld(kit)) == 1
    kit.put(large[:3], length=2 * PAGE)
    assert kit.tiers_of(large[:3]) == [0] * 3
    assert withheld(kit) == [(3, 0)]  # the page of the other size in the bad page's place
    kit.put(large[3:], length=2 * PAGE)
    assert withheld(kit) == [(3, 0)]


def test_the_next_life_withholds_all_that_lies_on_bad_bytes() -> None:
    """The next life of a place withholds every small page that overlaps the large bad page."""
    kit = Kit(tier(HOST, 8, segment=8, quarantine_share=0.5))
    large, small = chain("l", 4), chain("s", 6)
    kit.put(large, length=2 * PAGE)
    condemned(kit, large[1:2])
    kit.took(kit.core.evict(kit.ids(large), tier=0, now=kit.tick()))
    kit.put(small)
    assert kit.tiers_of(small) == [0] * 6
    assert withheld(kit) == [(2, 2), (2, 3)]
    kit.core.check()


def test_a_segment_that_is_mostly_bad_stays_withheld() -> None:
    """No put gets the place of a segment that is mostly bad."""
    kit = Kit(tier(HOST, 8, quarantine_share=0.5))
    small = chain("s", 4)
    kit.put(small)
    condemned(kit, small)
    for number in range(4):
        kit.put(chain(f"l{number}", 2), length=2 * PAGE)
    assert len(withheld(kit)) == 4
    stats = kit.core.tier_stats()[0]
    assert (stats.pages_quarantined, stats.quarantined_bytes, stats.used_bytes) == (4, 4 * PAGE, 8 * PAGE)


def test_quarantine_sets_no_demotion_off() -> None:
    """Withheld pages count neither as used nor as room, so watermarks keep their meaning."""
    kit = Kit(tier(HOST, 8, quarantine_share=0.5, high_watermark=0.6, low_watermark=0.5), tier(NVME, 8))
    a = chain("a", 4)
    kit.put(a)
    condemned(kit, a[:3])
    for _ in range(3):
        assert kit.took(kit.core.demote(kit.tick())).is_empty
    assert kit.tiers_of(a) == [-1, -1, -1, 0]


def test_watermarks_are_of_what_is_left() -> None:
    """Demotion begins when the good part of a tier reaches the high watermark."""
    kit = Kit(tier(HOST, 16, quarantine_share=0.5, high_watermark=0.55, low_watermark=0.4), tier(NVME, 16))
    kit.put(chain("bad", 4))
    condemned(kit, chain("bad", 4))
    kit.put(chain("small", 3))
    kit.put(chain("large", 2), length=2 * PAGE)
    assert len(kit.took(kit.core.demote(kit.tick())).transfers) > 0


def test_a_class_that_is_all_bad_takes_nothing_from_others() -> None:
    """A size class with almost only quarantined pages is not short of room, so other sizes stay."""
    kit = Kit(tier(HOST, 8, quarantine_share=0.5, high_watermark=0.6, low_watermark=0.5), tier(NVME, 8))
    small, large = chain("s", 4), chain("l", 1)
    kit.put(small)
    condemned(kit, small[:3])
    kit.took(kit.core.evict(kit.ids(small[3:]), tier=0, now=kit.tick()))
    kit.put(large, length=2 * PAGE)
    assert kit.took(kit.core.demote(kit.tick())).is_empty
    assert kit.tiers_of(large) == [0]


def test_every_held_page_is_named_once() -> None:
    """A walk over a tier by page id returns each page that is held throughout, once, during other puts."""
    kit, a = Kit(tier(HOST, 24, quarantine_share=0.5)), chain("a", 12)
    kit.put(a)
    met, after = [], -1
    while len(held := kit.core.pages_held(0, after=after, limit_bytes=3 * PAGE).blocks):
        extents = kit.core.pages_held(0, after=after, limit_bytes=3 * PAGE).extents
        assert len(held) <= 3
        met += held.tolist()
        after = int(extents["page"][-1])
        if len(met) <= len(a):
            kit.put(chain(f"new{after}", 1))
    assert set(kit.ids(a).tolist()) <= set(met)
    assert len(met) == len(set(met))


def test_a_page_is_sealed_once_its_writer_has_gone() -> None:
    """A page is sealed only when its writer's session has ended; then a scrub's verdict stays true."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.core.open_session(2, domain=1)
    kit.put(a, session=2)
    assert not kit.core.pages_held(0, after=-1, limit_bytes=1 << 20).is_sealed.any()
    kit.took(kit.core.end_session(2, kit.tick()))
    assert kit.core.pages_held(0, after=-1, limit_bytes=1 << 20).is_sealed.all()
    assert np.array_equal(kit.core.pages_held(0, after=-1, limit_bytes=1 << 20).blocks, kit.ids(a))
