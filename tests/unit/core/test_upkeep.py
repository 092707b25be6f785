"""Session ends, restarts, verdicts, epochs, operators and listings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.core import Core
from tierd.core.formats.model import EXTENT, UNVERIFIED, BlockStatus, Reason
from tierd.errors import InvalidArgument, NotFound
from tierd.policies.named import NamedPolicies

READY, RESERVED, FAILED = BlockStatus.READY, BlockStatus.RESERVED, BlockStatus.FAILED


def survivors(kit: Kit, tier_number: int):
    """The report of a tier after a crash: segments, extents, metas."""
    ids = kit.core.blocks(tier=tier_number)
    extents = kit.core.extents(ids, tier=tier_number)
    metas = kit.core.metas(ids)
    for name in ("generation", "segment", "offset"):
        metas[name] = extents[name]
    return kit.core.segments(tier_number), extents, metas


def reborn(kit: Kit, *tiers, sessions=()) -> tuple[Kit, list[np.ndarray]]:
    """A new core that adopted every page of an old one."""
    new, taken = Kit(*tiers), []
    for session in sessions:
        new.core.open_session(session, domain=1)
    for number in range(len(tiers)):
        segments, extents, metas = survivors(kit, number)
        taken.append(new.core.adopt(number, segments=segments, extents=extents, metas=metas, now=0.0))
        new.core.check()
    return new, taken


def test_what_survived_is_held_again() -> None:
    """After adopt every block is at its old place in its chain, and new numbers are above the old ones."""
    specs, a = (tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    kit = Kit(*specs)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a[:2]), now=kit.tick()))
    kit.land()
    new, taken = reborn(kit, *specs)
    assert [t.tolist() for t in taken] == [[True] * 4, [True] * 2]
    assert new.tiers_of(a) == [0] * 4
    assert new.core.extents(new.ids(a[:2]), tier=1)["page"].min() >= 0
    assert new.core.describe(new.ids(a))["position"].tolist() == [0, 1, 2, 3]
    assert new.core.children(int(new.ids(a)[0])).tolist() == [int(new.ids(a)[1])]
    plan = new.reserve(chain("b", 1)).plan
    assert plan.reserved["generation"][0] > kit.core.extents(kit.ids(a), tier=0)["generation"].max()
    assert plan.segments[0].segment > max(s.segment for t in (0, 1) for s in kit.core.segments(t))
    assert new.get(group(a)).groups[0].extents["flags"].tolist() == [[UNVERIFIED] * 4]


def test_survivors_that_contradict_are_left_out() -> None:
    """Adopt refuses single pages: duplicate places or names, bad places or segments, conflicting digests."""
    specs, a = (tier(HOST, 8), tier(NVME, 8)), chain("a", 6)
    kit = Kit(*specs)
    kit.put(a)
    segments, extents, metas = survivors(kit, 0)
    extents["slot"][1] = extents["slot"][0]
    extents["segment"][1] = extents["segment"][0]
    metas["hash"][2] = metas["hash"][0]
    extents["slot"][3] = 77
    extents["segment"][4] = 1234
    new = Kit(*specs)
    taken = new.core.adopt(0, segments=segments, extents=extents, metas=metas, now=0.0)
    new.core.check()
    assert taken.tolist() == [True, False, False, False, False, True]
    far = [replace(segments[0], tier=1, class_bytes=2 * PAGE)]
    extents, metas = extents[[0, 5]], metas[[0, 5]]
    extents["segment"], extents["slot"] = far[0].segment, [0, 1]
    metas["digest"][1] = 1
    assert new.core.adopt(1, segments=far, extents=extents, metas=metas, now=0.0).tolist() == [True, False]
    new.core.check()


def test_chains_mend_over_several_tiers() -> None:
    """A tail that is adopted before its head is linked when another tier's head is adopted."""
    specs, a = (tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    kit = Kit(*specs)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a[:2]), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a[:2]), tier=0, now=kit.tick()))
    new, _ = reborn(kit, *specs)
    assert new.tiers_of(a) == [1, 1, 0, 0]
    assert new.core._index.blocks.parent[new.ids(a)].tolist() == [-1, *new.ids(a)[:3].tolist()]
    new.release(new.acquire(group(a)).lease)
    new.land()
    assert new.tiers_of(a) == [0] * 4


def test_a_session_that_lived_through_a_restart_keeps_what_it_held() -> None:
    """Restored pins and reservations belong to their session until it ends."""
    specs, a = (tier(HOST, 8),), chain("a", 2)
    kit = Kit(*specs)
    kit.core.open_session(5, domain=1)
    kit.put(a, session=5)
    reserved = kit.reserve(chain("b", 4), session=5)
    segments, extents, metas = survivors(kit, 0)
    new = Kit(*specs)
    new.core.open_session(5, domain=1)
    new.core.adopt(0, segments=segments, extents=extents, metas=metas, now=0.0)
    stranger = np.zeros(1, EXTENT)
    stranger["segment"] = 99
    held = new.core.restore(
        5, pinned=np.concatenate((extents, stranger)), reserved=np.concatenate((reserved.extents[0], stranger)), now=1.0
    )
    new.core.check()
    assert (held.pinned.tolist(), held.reserved.tolist()) == ([True, True, False], [True] * 4 + [False])
    assert not new.took(new.core.evict(new.ids(a), tier=None, now=2.0)).freed.size
    given = new.reserve(chain("c", 4), session=5).extents[0]
    assert not set(zip(given["segment"].tolist(), given["slot"].tolist(), strict=True)) & set(
        zip(reserved.extents[0]["segment"].tolist(), reserved.extents[0]["slot"].tolist(), strict=True)
    )
    new.took(new.core.end_session(5, 3.0))
    assert new.took(new.core.evict(new.ids(a), tier=None, now=4.0)).freed.size == 2
    assert new.core.tier_stats()[0].assigned_bytes == 0


def test_what_a_living_writer_left_empty_is_there_for_others() -> None:
    """After a restart a segment without pages of its live writer is free for others; one with pages stays."""
    spec, a = tier(HOST, 8), chain("a", 8)
    kit = Kit(spec)
    kit.put(a)
    kit.took(kit.core.evict(kit.ids(a[:4]), tier=0, now=kit.tick()))
    kit.reserve(chain("b", 1))
    held = kit.core.extents(kit.ids(a[4:]), tier=0)[:1]
    kit.took(kit.core.evict(kit.ids(a[5:]), tier=0, now=kit.tick()))
    assert len(kit.core.segments(0)) == 2
    segments, extents, metas = survivors(kit, 0)
    new = Kit(spec)
    new.core.open_session(2, domain=1)
    new.core.adopt(0, segments=segments, extents=extents[:0], metas=metas[:0], now=0.0)
    new.core.restore(1, pinned=held[:0], reserved=held, now=0.0)
    new.core.close_empty(0)
    new.core.check()
    assert new.reserve(chain("c", 8), session=2).statuses[0].tolist() == [RESERVED] * 4 + [BlockStatus.NO_ROOM] * 4


def test_a_page_of_an_ended_epoch_stays_its_readers() -> None:
    """After a restart no put gets a page of an ended epoch that a live session pins."""
    spec, a = tier(HOST, 8), chain("a", 8)
    kit = Kit(spec)
    kit.core.open_session(2, domain=1)
    kit.put(a, session=2)
    segments, extents, metas = survivors(kit, 0)
    new = Kit(spec)
    new.core.adopt(0, segments=segments, extents=extents[:0], metas=metas[:0], now=0.0)
    restored = new.core.restore(1, pinned=extents[:1], reserved=extents[:0], now=0.0)
    assert restored.pinned.tolist() == [True]
    new.core.close_empty(0)
    new.core.check()
    given = new.reserve(chain("b", 8)).extents[0]
    assert not (
        (given["segment"] == extents["segment"][0]) & (given["slot"] == extents["slot"][0]) & (given["page"] >= 0)
    ).any()


def test_a_page_of_an_ended_epoch_is_kept_for_each_of_its_readers() -> None:
    """Over a restart a page of an ended epoch stays until both its readers' sessions end."""
    spec, a = tier(HOST, 8), chain("a", 2)
    kit = Kit(spec)
    kit.put(a)
    segments, extents, metas = survivors(kit, 0)
    new = Kit(spec)
    new.core.open_session(2, domain=1)
    new.core.adopt(0, segments=segments, extents=extents[:0], metas=metas[:0], now=0.0)
    for session in (1, 2):
        assert new.core.restore(session, pinned=extents, reserved=extents[:0], now=0.0).pinned.all()
        new.core.check()
    new.core.close_empty(0)
    assert not new.took(new.core.end_session(1, 1.0)).freed.size
    new.core.check()
    assert sorted(new.took(new.core.end_session(2, 2.0)).freed["extent"]["slot"].tolist()) == sorted(
        extents["slot"].tolist()
    )
    new.core.check()
    assert new.core.tier_stats()[0].assigned_bytes == 0


def test_only_the_page_that_was_held_is_restored() -> None:
    """A pin on a page with a new generation is not restored, because the page holds another block."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.put(a)
    segments, extents, metas = survivors(kit, 0)
    new = Kit(tier(HOST, 8))
    new.core.open_session(5, domain=1)
    new.core.adopt(0, segments=segments, extents=extents, metas=metas, now=0.0)
    stale = extents.copy()
    stale["generation"][1] -= np.uint64(1)
    held = new.core.restore(5, pinned=stale, reserved=np.zeros(0, EXTENT), now=1.0)
    new.core.check()
    assert held.pinned.tolist() == [True, False]
    assert [used.pages_pinned for used in new.core.tier_stats()] == [1]


def test_the_end_of_a_session_frees_what_it_held() -> None:
    """A session's end drops its leases, reservations and share; committed blocks stay. It is idempotent."""
    kit, a = Kit(tier(HOST, 16)), chain("a", 2)
    kit.put(a)
    kit.acquire(group(a))
    kit.reserve(chain("b", 3))
    plan = kit.took(kit.core.end_session(1, kit.tick()))
    assert plan.freed["reason"].tolist() == [Reason.SESSION_ENDED] * 3
    assert not plan.freed["was_ready"].any()
    assert kit.tiers_of(a) == [0, 0]
    assert kit.core.stats().leases == kit.core.stats().reservations == kit.core.stats().sessions == 0
    assert kit.core.end_session(1, kit.tick()).is_empty
    with pytest.raises(NotFound):
        kit.acquire(group(a))


def test_a_session_id_is_used_once_at_a_time() -> None:
    """Opening an open session, or session 0, is refused."""
    kit = Kit(tier(HOST, 8))
    for session in (0, -1, 1):
        with pytest.raises(InvalidArgument):
            kit.core.open_session(session, domain=1)


def test_an_epoch_bump_lets_leases_finish() -> None:
    """Forgotten blocks are misses. Unpinned pages are freed at once, pinned ones at their release."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    acquired = kit.acquire(group(a[:2]))
    served = kit.settle(acquired)
    plan = kit.forget()
    assert plan.freed["reason"].tolist() == [Reason.EPOCH_BUMPED] * 6
    assert plan.retired["generation"].tolist() == served.groups[0].extents["generation"][0].tolist()
    assert kit.tiers_of(a) == [-1] * 4
    assert kit.core.find_block(1, a[0].tobytes()) is None
    assert (
        kit.core.settle(acquired.lease, now=kit.tick()).groups[0].extents.tolist() == served.groups[0].extents.tolist()
    )
    freed = kit.release(acquired.lease).freed
    assert freed["reason"].tolist() == [Reason.EPOCH_BUMPED] * 2
    assert sorted(h.tobytes() for h in freed["hash"]) == sorted(h.tobytes() for h in a[:2])
    assert kit.core.stats().blocks == 0


def test_an_epoch_bump_during_a_transfer() -> None:
    """Blocks that are forgotten in flight do not arrive, and no page stays behind."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.forget()
    freed = kit.land().freed
    assert freed["reason"].tolist() == [Reason.EPOCH_BUMPED] * 4
    assert [stats.used_bytes for stats in kit.core.tier_stats()] == [0, 0]


def test_a_condemned_page_is_never_found_again() -> None:
    """Other copies of a condemned page are hits; pinned, it is freed at release. Stale extents do nothing."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    acquired = kit.acquire(group(a[:1]))
    extents = kit.core.extents(kit.ids(a), tier=0)
    plan = kit.took(kit.core.condemn(extents, now=kit.tick()))
    assert plan.freed["reason"].tolist() == [Reason.CORRUPTED]
    assert kit.tiers_of(a) == [1, 1]
    assert kit.release(acquired.lease).freed["reason"].tolist() == [Reason.CORRUPTED]
    assert kit.get(group(a)).tokens == 32
    assert kit.took(kit.core.condemn(extents, now=kit.tick())).is_empty
    kit.core.verified(extents)
    assert kit.tiers_of(a) == [0, 0]


def test_what_a_store_has_lost_is_written_again() -> None:
    """A lost page is freed, not quarantined, and `persist` rewrites it. Stale generations are ignored."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8, quarantine_share=1.0)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    extents = kit.core.extents(kit.ids(a), tier=1)
    lost = extents.copy()
    lost["page"] = -1
    plan = kit.took(kit.core.lose(lost[:1], now=kit.tick()))
    assert plan.freed["reason"].tolist() == [Reason.FAILED]
    assert plan.freed["was_ready"].all()
    assert [(info["tiers"], len(kit.core.quarantined(1))) for info in kit.core.describe(kit.ids(a))] == [(1, 0), (3, 0)]
    assert len(kit.took(kit.core.persist(kit.ids(a), now=kit.tick())).transfers) == 1
    kit.land()
    assert kit.core.describe(kit.ids(a))["tiers"].tolist() == [3, 3]
    assert kit.took(kit.core.lose(lost, now=kit.tick())).freed["extent"]["generation"].tolist() == [
        int(extents["generation"][1])
    ]


def test_a_page_is_lost_while_blocks_fly_to_it_and_from_it() -> None:
    """A transfer into a lost page brings nothing; one from it condemns nothing, and the last one frees it."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8, quarantine_share=1.0)), chain("a", 1)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    target = kit.flying[0]["target"].reshape(1)
    assert kit.took(kit.core.lose(target, now=kit.tick())).is_empty
    assert kit.land().freed["reason"].tolist() == [Reason.FAILED]
    assert kit.core.describe(kit.ids(a))["tiers"].tolist() == [1]
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick()))
    kit.acquire(group(a))
    lost = kit.core.extents(kit.ids(a), tier=1)
    plan = kit.took(kit.core.lose(lost, now=kit.tick()))
    assert (len(plan.freed), plan.retired["generation"].tolist()) == (0, lost["generation"].tolist())
    assert kit.took(kit.core.lose(lost, now=kit.tick())).is_empty
    assert Reason.FAILED in kit.land(BlockStatus.CORRUPT).freed["reason"].tolist()
    assert len(kit.core.quarantined(1)) == 0
    assert kit.tiers_of(a) == [-1]


def test_an_operators_pin_outlives_a_tier_out_of_service() -> None:
    """A pinned block that is put again while its tier is out of service stays pinned."""
    kit, a = Kit(tier(HOST, 8), tier(HOST, 8, index=1)), chain("a", 2)
    kit.put(a)
    assert (kit.tiers_of(a), kit.core.pin_blocks(kit.ids(a[:1]))) == ([1, 1], 1)
    kit.core.set_serving(1, False)
    kit.put(a)
    assert kit.tiers_of(a) == [0, 0]
    kit.core.check()
    kit.core.set_serving(1, True)
    kit.took(kit.core.evict(kit.ids(a), tier=None, now=kit.tick()))
    assert [place >= 0 for place in kit.tiers_of(a)] == [True, False]
    assert kit.core.unpin_blocks(kit.ids(a[:1])) == 1
    kit.core.check()


def test_listings_tell_what_is_held() -> None:
    """Listings give operators filters, prefixes, pages, pins, hits and tiers of blocks."""
    kit, a, b = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 3), chain("b", 2)
    kit.put(a)
    kit.put(b, namespace=2)
    kit.took(kit.core.persist(kit.ids(a[:1]), now=kit.tick()))
    kit.land()
    kit.acquire(group(a[:2]))
    ids = kit.ids(a)
    assert kit.core.blocks(namespace=1).tolist() == sorted(ids.tolist())
    assert kit.core.blocks(tier=1).tolist() == [ids[0]]
    assert kit.core.blocks(pinned=True).tolist() == sorted(ids[:2].tolist())
    assert kit.core.find_by_prefix(a[0].tobytes().hex()[:9]).tolist() == [ids[0]]
    with pytest.raises(InvalidArgument):
        kit.core.find_by_prefix("no hex")
    rows = kit.core.describe(ids)
    assert rows["tiers"].tolist() == [3, 1, 1]
    assert rows["pins"].tolist() == [1, 1, 0]
    assert rows["hits"].tolist() == [1, 1, 0]
    pages = kit.core.pages(int(ids[0]))
    assert pages["extent"]["tier"].tolist() == [0, 1]
    assert pages["pins"].tolist() == [1, 0]
    assert kit.core.children(int(ids[0])).tolist() == [ids[1]]
    stats = kit.core.tier_stats()[0]
    assert (stats.pages_ready, stats.pages_pinned, stats.used_bytes) == (5, 2, 5 * PAGE)
    assert [(c.class_bytes, c.segments, c.pages, c.pages_free) for c in stats.classes] == [(PAGE, 2, 8, 3)]
    assert kit.core.session_stats()[0].pinned_bytes == (2 * PAGE, 0)


def test_a_block_that_returns_is_the_parent_of_its_children() -> None:
    """A lost head that is put again precedes its tail again, and is evicted after it."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 4)
    kit.put(a)
    before = kit.ids(a)
    kit.took(kit.core.evict(before[:1], tier=None, now=kit.tick()))
    assert kit.tiers_of(a) == [-1, 0, 0, 0]
    kit.put(a)
    assert kit.ids(a).tolist() == before.tolist()
    kit.put(chain("b", 5))
    assert kit.tiers_of(a)[0] == 0


def test_a_daemon_of_ten_thousand_lives_stays_small() -> None:
    """Ids, page columns and the table do not grow with the number of past blocks."""
    core = Core([tier(HOST, 64)], policies=NamedPolicies(), session_share=1.0)
    kit = Kit(tier(HOST, 64))
    kit.core = core
    core.open_session(1, domain=1)
    for number in range(300):
        kit.put(chain(f"{number}", 32))
    assert core.stats().blocks == 64
    assert core._index.blocks.top <= 200
    assert core._index.tiers[0].top == 64
    assert core._index.blocks.table._slots.words.size <= 1024


def test_what_is_forgotten_is_written_and_brought_nowhere() -> None:
    """After an epoch ends no transfer of its blocks is planned. A put evicts its pages, without demotion."""
    kit, a = Kit(tier(HOST, 8, high_watermark=0.2, low_watermark=0.1), tier(NVME, 16)), chain("a", 4)
    kit.put(a)
    ids = kit.ids(a)
    kit.took(kit.core.persist(ids[:2], now=kit.tick()))
    kit.land()
    assert kit.core.forget_namespaces([1], now=kit.tick()).blocks == 4
    assert kit.took(kit.core.demote(kit.tick())).is_empty
    assert kit.took(kit.core.persist(ids, now=kit.tick())).is_empty
    assert kit.took(kit.core.evict(ids, tier=None, now=kit.tick())).is_empty
    assert kit.core.stats().blocks == len(kit.core.blocks()) == 0
    kit.core.open_session(2, domain=1)
    plan = kit.reserve(chain("b", 8), session=2, namespace=2).plan
    assert set(plan.freed["reason"].tolist()) == {Reason.EVICTED}


def test_an_id_that_has_another_block_is_not_freed_with_the_forgotten() -> None:
    """`free_forgotten` skips ids that new blocks reuse, and blocks of other ended namespaces."""
    kit, old, other, new = Kit(tier(HOST, 8)), chain("a", 6), chain("c", 2), chain("b", 3)
    kit.put(old)
    kit.put(other, namespace=3)
    before = set(kit.ids(old).tolist())
    kit.took(kit.core.forget_namespaces([1], now=kit.tick()).plan)
    kit.took(kit.core.forget_namespaces([3], now=kit.tick()).plan)
    kit.put(new, namespace=2)
    assert before & set(kit.ids(new, namespace=2).tolist()), "an id is used again"
    (ids,) = kit.core.pieces()
    freed = kit.took(kit.core.free_forgotten(ids, namespaces=[1], now=kit.tick())).freed
    assert set(freed["namespace"].tolist()) <= {1}
    assert len(kit.core.blocks(namespace=2)) == 3
    assert kit.core.tier_stats()[0].pages_ready == 3 + 2
    kit.took(kit.core.free_forgotten(ids, namespaces=[3], now=kit.tick()))
    assert kit.core.tier_stats()[0].pages_ready == 3
    assert kit.core._index.blocks.forgotten_count == 0
