"""Lookup, acquire, settle, release, prefetch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.core.kit import DEVICE, HOST, NVME, PAGE, TOKENS, Kit, chain, commit_blocks, group, tier
from tierd.core.formats.model import BlockStatus, Need, Reason, StructArray
from tierd.core.plan import Allowance
from tierd.errors import InvalidArgument, NotFound

READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT


def far(kit: Kit, hashes, namespace: int = 1) -> None:
    """Puts blocks and keeps them in NVMe alone."""
    kit.put(hashes, namespace=namespace)
    kit.took(kit.core.persist(kit.ids(hashes, namespace), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(hashes, namespace), tier=0, now=kit.tick()))


def test_lookup_tells_how_much_and_from_where() -> None:
    """A lookup returns the longest held prefix, the nearest tier of every block, and tokens per tier."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 6)
    far(kit, a[:4])
    kit.get(group(a[:2]))
    found = kit.core.lookup([group(a)], kit.now)
    assert found.tokens == 64
    assert found.tier_of[0].tolist() == [[0, 0, 1, 1, -1, -1]]
    assert found.tier_tokens == [32, 32]


def test_a_lease_holds_the_prefix_near() -> None:
    """Acquire promotes far blocks, settle gives their pages in order, and the pins last until release."""
    kit, a = Kit(tier(HOST, 4), tier(NVME, 16)), chain("a", 4)
    far(kit, a)
    acquired = kit.acquire(group(chain("a", 5)))
    assert (acquired.tokens, acquired.whole, acquired.tier_tokens) == (64, True, [0, 64])
    assert acquired.plan.transfers["reason"].tolist() == [Reason.DEMAND] * 4
    kit.land()
    served = kit.settle(acquired)
    assert served.tokens == 64
    assert (served.groups[0].first, served.groups[0].count) == (0, 4)
    assert served.groups[0].extents["tier"].tolist() == [[0] * 4]
    assert served.groups[0].blocks.tolist() == [kit.ids(a).tolist()]
    assert not kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick())).freed.size
    kit.release(acquired.lease)
    assert kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick())).freed.size == 4


def test_what_does_not_fit_is_cut_to_a_shorter_prefix() -> None:
    """If not all blocks fit near, a leading part is promoted, and `whole` is False."""
    kit, a = Kit(tier(HOST, 4), tier(NVME, 16)), chain("a", 4)
    far(kit, a)
    lease = kit.commit(kit.reserve(chain("b", 2)), lease=True).lease
    kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick()))
    acquired = kit.acquire(group(a))
    assert (acquired.tokens, acquired.whole) == (0, False)
    assert acquired.lease == 0
    kit.release(lease)
    kit.took(kit.core.evict(kit.ids(chain("b", 2)), tier=None, now=kit.tick()))
    kit.core.end_session(1, kit.tick())
    kit.core.open_session(2, domain=1)
    answer = kit.acquire(group(a), session=2)
    assert (answer.tokens, answer.whole) == (64, True)


def test_a_share_cuts_a_lease() -> None:
    """A session's pins stay within its share. A page that it already pins costs nothing more."""
    kit, a = Kit(tier(HOST, 8), share=0.5), chain("a", 4)
    kit.put(a)
    kit.put(chain("b", 4))
    first, again = kit.acquire(group(a)), kit.acquire(group(a))
    assert (first.tokens, again.tokens) == (64, 64)
    other = kit.acquire(group(chain("b", 4)))
    assert (other.tokens, other.whole, other.lease) == (0, False, 0)
    kit.release(first.lease)
    assert kit.acquire(group(chain("b", 4))).tokens == 0
    kit.release(again.lease)
    assert kit.acquire(group(chain("b", 3))).tokens == 48


@pytest.mark.parametrize("status", [FAILED, CORRUPT])
def test_a_failed_transfer_shortens_the_lease(status: int) -> None:
    """A lease ends before the first block that did not arrive. A corrupt copy is a miss from then on."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    far(kit, a)
    acquired = kit.acquire(group(a))
    kit.land(status, only=[2])
    kit.land()
    served = kit.settle(acquired)
    assert served.tokens == 32
    assert served.groups[0].count == 2
    assert kit.core.session_stats()[0].pinned_bytes[0] == 2 * PAGE
    assert kit.core.settle(acquired.lease, now=kit.tick()).tokens == 32
    assert kit.tiers_of(a) == [0, 0, -1 if status is CORRUPT else 1, 0]


def test_a_lease_of_which_nothing_arrived_is_gone() -> None:
    """If the first block cannot be served, settle answers 0 tokens and the lease needs no release."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    far(kit, a)
    acquired = kit.acquire(group(a))
    kit.land(FAILED)
    assert kit.settle(acquired).tokens == 0
    assert kit.core.stats().leases == 0
    assert kit.core.settle(acquired.lease, now=kit.tick()).tokens == 0


def test_settle_before_the_transfers_ended_serves_what_is_there() -> None:
    """Settle counts transfers in flight as failed. They continue without the lease."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 4)
    far(kit, a)
    acquired = kit.acquire(group(a))
    kit.land(only=[0])
    assert kit.settle(acquired).tokens == 16
    kit.land()
    assert kit.tiers_of(a) == [0] * 4


def test_one_flight_for_one_block() -> None:
    """A second request for a block in flight waits for the first one's transfer and makes none."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 3)
    kit.core.open_session(2, domain=1)
    far(kit, a)
    first, second = kit.acquire(group(a[:2])), kit.acquire(group(a), session=2)
    assert len(second.plan.transfers) == 1
    assert second.plan.waits.tolist() == first.plan.transfers["id"].tolist()
    kit.land()
    assert [kit.settle(lease).tokens for lease in (first, second)] == [32, 48]


def test_a_session_may_end_while_its_blocks_are_on_their_way() -> None:
    """The transfers of an ended session finish. Their blocks are near, and can be evicted."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    far(kit, a)
    acquired = kit.acquire(group(a))
    kit.took(kit.core.end_session(1, kit.tick()))
    kit.land()
    assert kit.core.settle(acquired.lease, now=kit.tick()).tokens == 0
    assert kit.tiers_of(a) == [0, 0]
    assert kit.took(kit.core.evict(kit.ids(a), tier=0, now=kit.tick())).freed.size == 2


def test_a_window_needs_only_its_last_tokens() -> None:
    """A sliding-window group is served from its last blocks, and the lease pins only those."""
    kit, a, w = Kit(tier(HOST, 16)), chain("a", 4), chain("w", 4)
    kit.put(a)
    kit.put(w, namespace=2)
    kit.took(kit.core.evict(kit.ids(w[:2], 2), tier=None, now=kit.tick()))
    served = kit.get(group(a), group(w, namespaces=(2,), need=Need.LAST_TOKENS, last=20))
    assert served.tokens == 64
    assert [(g.first, g.count) for g in served.groups] == [(0, 4), (2, 2)]
    assert kit.get(group(a), group(w, namespaces=(2,), need=Need.LAST_TOKENS, last=33)).tokens == 0


def test_a_state_is_the_one_block_at_the_end() -> None:
    """A recurrent group is served at the last token count whose state block is held."""
    kit, a, s = Kit(tier(HOST, 16)), chain("a", 4), chain("s", 4)
    kit.put(a)
    kit.put(s, namespace=2)
    kit.took(kit.core.evict(kit.ids(s[3:], 2), tier=None, now=kit.tick()))
    served = kit.get(group(a), group(s, namespaces=(2,), need=Need.LAST_STATE))
    assert served.tokens == 48
    assert [(g.first, g.count) for g in served.groups] == [(0, 3), (2, 1)]


def test_every_rank_must_have_a_block() -> None:
    """A group with several ranks serves the tokens that every rank can serve; extents are rank-major."""
    kit, a = Kit(tier(HOST, 16)), chain("a", 4)
    kit.put(a, namespace=1)
    kit.put(a[:3], namespace=2)
    served = kit.get(group(a, namespaces=(1, 2)))
    assert served.tokens == 48
    assert served.groups[0].extents.shape == (2, 3)
    assert served.groups[0].blocks.tolist() == [kit.ids(a[:3], 1).tolist(), kit.ids(a[:3], 2).tolist()]


def test_a_failure_in_one_group_shortens_all() -> None:
    """A failed transfer cuts every group to the common count. A window moves to earlier blocks if they are
    near."""
    kit, a, w = Kit(tier(HOST, 16), tier(NVME, 16)), chain("a", 4), chain("w", 4)
    far(kit, a)
    kit.put(w, namespace=2)
    window = group(w, namespaces=(2,), need=Need.LAST_TOKENS, last=16)
    acquired = kit.acquire(group(a), window)
    kit.land(FAILED, only=[3])
    kit.land()
    served = kit.settle(acquired)
    assert served.tokens == 48
    assert [(g.first, g.count) for g in served.groups] == [(0, 3), (2, 1)]
    kit.release(acquired.lease)
    assert kit.core.tier_stats()[0].pages_pinned == 0


def test_pages_being_written_ahead_serve() -> None:
    """A get is served from the near page of a block that is being demoted, and that page stays."""
    kit = Kit(tier(HOST, 4, high_watermark=0.5, low_watermark=0.25), tier(NVME, 8))
    a = chain("a", 3)
    kit.put(a)
    assert len(kit.demote().transfers) == 2
    acquired = kit.acquire(group(a))
    assert len(acquired.plan.transfers) == 0
    assert not kit.land().freed.size
    assert kit.settle(acquired).tokens == 48
    kit.release(acquired.lease)
    assert kit.demote().is_empty
    assert kit.tiers_of(a) == [0, 0, 0]


def test_nvme_reaches_the_device_over_the_host() -> None:
    """A far block comes to the device in two transfers, the second after the first."""
    kit, a = Kit(tier(DEVICE, 8), tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=1, now=kit.tick()))
    acquired = kit.acquire(group(a), kind=DEVICE)
    moves = acquired.plan.transfers
    assert moves["source"]["tier"].tolist() == [2, 2, 1, 1]
    assert moves["target"]["tier"].tolist() == [1, 1, 0, 0]
    assert moves["after"].tolist() == [0, 0, *moves["id"][:2].tolist()]
    kit.land()
    assert kit.settle(acquired).tokens == 32
    assert kit.tiers_of(a) == [0, 0]


def far_kit(*, hosts: int = 8, devices: int = 1, blocks: int = 2) -> tuple[Kit, StructArray]:
    """Blocks that only a store holds, below devices and a host tier of `hosts` pages."""
    kit = Kit(*(tier(DEVICE, 8, index=i) for i in range(devices)), tier(HOST, hosts), tier(NVME, 8))
    a, host = chain("a", blocks), devices
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=host, now=kit.tick()))
    return kit, a


def test_a_direct_way_leaves_the_host_out() -> None:
    """On a direct path from store to device a block takes one transfer and no page of the host."""
    kit, a = far_kit(hosts=4)
    kit.core.set_direct(0, frozenset({2}))
    kept = kit.reserve(chain("b", 4))
    acquired = kit.acquire(group(a), kind=DEVICE)
    moves = acquired.plan.transfers
    assert moves["source"]["tier"].tolist() == [2, 2] and moves["target"]["tier"].tolist() == [0, 0]
    assert moves["after"].tolist() == [0, 0] and set(acquired.plan.reserved["tier"].tolist()) == {0}
    kit.land()
    assert kit.settle(acquired).tokens == 32
    assert [stats.pages_ready for stats in kit.core.tier_stats()] == [2, 0, 2]
    assert kept.reservation


def test_what_the_host_has_comes_from_there() -> None:
    """A block in host memory comes from there, even if a direct path from the store exists."""
    kit, a = far_kit()
    kit.core.set_direct(0, frozenset({2}))
    kit.get(group(a[:1]))
    assert kit.acquire(group(a), kind=DEVICE).plan.transfers["source"]["tier"].tolist() == [1, 2]


def test_each_device_has_its_own_ways() -> None:
    """A store with a direct path to one device reaches another device over the host."""
    kit, a = far_kit(devices=2)
    kit.core.set_direct(0, frozenset({3}))
    moves = kit.acquire(group(a), kind=tier(DEVICE, 8, index=1)).plan.transfers
    assert moves["source"]["tier"].tolist() == [3, 3, 2, 2] and moves["target"]["tier"].tolist() == [2, 2, 1, 1]
    kit, b = far_kit(devices=2, blocks=8)
    kit.core.set_direct(0, frozenset({3}))
    moves = kit.acquire(group(b), kind=DEVICE).plan.transfers
    ways = set(zip(moves["source"]["tier"].tolist(), moves["target"]["tier"].tolist(), strict=True))
    assert ways == {(3, 0), (3, 2), (2, 1)}


def test_a_way_that_ends_is_planned_no_more() -> None:
    """A direct transfer that fails keeps the far copy. After the path ends, plans go over the host."""
    kit, a = far_kit()
    kit.core.set_direct(0, frozenset({2}))
    acquired = kit.acquire(group(a), kind=DEVICE)
    kit.core.set_direct(0, frozenset())
    kit.land(FAILED)
    assert kit.settle(acquired).tokens == 0 and kit.tiers_of(a) == [2, 2]
    assert kit.acquire(group(a), kind=DEVICE).plan.transfers["source"]["tier"].tolist() == [2, 2, 1, 1]


def test_one_of_two_devices_is_wanted() -> None:
    """A put goes to the named device only; its blocks reach another device over the host.
    With DEVICE as kind, a get uses the nearest device that holds them."""
    one, two = tier(DEVICE, 8), tier(DEVICE, 8, index=1)
    kit, a, b = Kit(one, two, tier(HOST, 8)), chain("a", 2), chain("b", 8)
    kit.put(a, kind=one)
    kit.put(b, kind=two)
    assert kit.tiers_of(a) == [0, 0] and kit.tiers_of(b) == [1] * 8
    kit.took(kit.core.evict(kit.ids(b), tier=1, now=kit.tick()))
    acquired = kit.acquire(group(a), kind=two)
    moves = acquired.plan.transfers
    assert moves["source"]["tier"].tolist() == [0, 0, 2, 2]
    assert moves["target"]["tier"].tolist() == [2, 2, 1, 1]
    assert moves["after"].tolist() == [0, 0, *moves["id"][:2].tolist()]
    kit.land()
    assert kit.settle(acquired).groups[0].extents["tier"].tolist() == [[1, 1]]
    assert kit.get(group(a), kind=DEVICE).groups[0].extents["tier"].tolist() == [[0, 0]]


def test_a_broken_chain_of_transfers_leaves_nothing_behind() -> None:
    """If the first of two chained transfers fails, both pages are freed after both end, in either order."""
    for order in ([[0], [0]], [[1], [0]]):
        kit, a = Kit(tier(DEVICE, 8), tier(HOST, 8), tier(NVME, 8)), chain("a", 1)
        kit.put(a)
        kit.took(kit.core.persist(kit.ids(a), now=kit.tick()))
        kit.land()
        kit.took(kit.core.evict(kit.ids(a), tier=1, now=kit.tick()))
        acquired = kit.acquire(group(a), kind=DEVICE)
        for part in order:
            kit.land(FAILED, only=part)
        assert kit.settle(acquired).tokens == 0
        assert [t.used_bytes for t in kit.core.tier_stats()[:2]] == [0, 0]


def test_a_host_page_can_be_wanted_from_the_device() -> None:
    """A get of host pages copies down a block that only the device holds."""
    kit, a = Kit(tier(DEVICE, 8), tier(HOST, 8)), chain("a", 2)
    kit.put(a, kind=DEVICE)
    served = kit.get(group(a), kind=HOST)
    assert served.tokens == 32
    assert served.groups[0].extents["tier"].tolist() == [[1, 1]]


def test_a_tier_out_of_service_is_not_there() -> None:
    """A tier out of service gives misses and is no target. Back in service, it holds its blocks as before."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    far(kit, a)
    kit.core.set_serving(1, False)
    assert kit.tiers_of(a) == [-1, -1]
    assert kit.acquire(group(a)).lease == 0
    kit.core.set_serving(1, True)
    kit.core.set_serving(0, False)
    assert kit.acquire(group(a)).lease == 0
    assert kit.tiers_of(a) == [1, 1]


def test_a_shut_tier_is_not_read_from() -> None:
    """The core plans no transfer from a shut tier: it cuts the answer and reports `shut`.
    It still serves blocks that are near or in flight."""
    kit, a, b = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 4), chain("b", 2)
    far(kit, a)
    kit.put(b)
    ask = {"kind": HOST, "shut": frozenset({1})}
    near = kit.core.acquire(1, groups=[group(a[:2])], kind=HOST, now=kit.tick())
    assert len(kit.took(near.plan).transfers) == 2
    cut = kit.core.acquire(1, groups=[group(a)], now=kit.tick(), **ask)
    assert (cut.tokens, cut.whole, cut.shut, len(cut.plan.transfers)) == (32, False, True, 0)
    kit.core.release(1, leases=[near.lease, cut.lease], now=kit.tick())
    none = kit.core.acquire(1, groups=[group(a[2:])], now=kit.tick(), **ask)
    assert (none.lease, none.shut, len(none.plan.transfers)) == (0, True, 0)
    shut = Allowance(frozenset({1}))
    plan = kit.core.prefetch(1, groups=[group(a[2:])], kind=HOST, now=kit.tick(), allowance=shut)
    assert len(plan.transfers) == 0
    whole = kit.core.acquire(1, groups=[group(b)], now=kit.tick(), **ask)
    assert (whole.tokens, whole.whole, whole.shut) == (32, True, False)


def test_prefetch_holds_nothing() -> None:
    """Prefetch plans the same transfers as acquire, and keeps no lease and no pin after they end."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 3)
    far(kit, a)
    plan = kit.took(kit.core.prefetch(1, groups=[group(a)], kind=HOST, now=kit.tick()))
    assert plan.transfers["reason"].tolist() == [Reason.PREFETCH] * 3
    again = kit.took(kit.core.prefetch(1, groups=[group(a)], kind=HOST, now=kit.tick()))
    assert len(again.transfers) == 0
    kit.land()
    assert kit.core.tier_stats()[0].pages_pinned == 0
    assert kit.core.stats().leases == 0


def test_a_domain_sees_only_its_own() -> None:
    """A session misses blocks of another trust domain, even under its own namespace id."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.put(a)
    kit.core.open_session(2, domain=2)
    assert kit.acquire(group(a), session=2).lease == 0


def test_a_block_asked_for_twice_is_pinned_once_per_lease_and_place() -> None:
    """A query that names a block in two groups is served, and release undoes exactly its pins."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.put(a)
    acquired = kit.acquire(group(a), group(a))
    assert kit.settle(acquired).tokens == 32
    kit.release(acquired.lease)
    assert kit.core.tier_stats()[0].pages_pinned == 0


def test_releasing_what_is_not_held_is_no_fault() -> None:
    """Release skips unknown, foreign and released leases. An unknown session is NotFound."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.core.open_session(2, domain=1)
    kit.put(a)
    lease = kit.acquire(group(a)).lease
    kit.release(lease, 77, session=2)
    assert kit.core.stats().leases == 1
    kit.release(lease, lease)
    kit.release(lease)
    with pytest.raises(NotFound):
        kit.core.release(9, leases=[lease], now=1.0)


@pytest.mark.parametrize(
    "asked",
    [
        [],
        [group(np.zeros((2, 31), np.uint8))],
        [group(chain("a", 2), namespaces=())],
        [group(chain("a", 2), tokens=33)],
        [group(chain("a", 2), tokens=16)],
        [group(chain("a", 2), last=-1)],
    ],
)
def test_a_question_that_cannot_be_meant_is_refused(asked) -> None:
    """No groups, a wrong hash width, no ranks and inconsistent counts raise InvalidArgument."""
    with pytest.raises(InvalidArgument):
        Kit(tier(HOST, 8)).core.lookup(asked, 0.0)


def test_an_empty_sequence_is_served_with_nothing() -> None:
    """A sequence of no blocks hits 0 tokens and gets no lease."""
    kit = Kit(tier(HOST, 8))
    empty = group(chain("a", 0))
    assert kit.core.lookup([empty], 0.0).tokens == 0
    assert kit.acquire(empty).lease == 0


def test_using_a_prefix_keeps_its_head_longest() -> None:
    """After an acquire the last blocks of a sequence are evicted first, promoted or not."""
    kit, a, b = Kit(tier(HOST, 8), tier(NVME, 16)), chain("a", 6), chain("b", 5)
    far(kit, a)
    far(kit, b)
    for asked in (a[:3], a, b):
        acquired = kit.acquire(group(asked))
        kit.land()
        kit.release(acquired.lease)
    assert kit.tiers_of(a) == [0, 0, 0, 1, 1, 1]


def test_tokens_need_not_end_on_a_block() -> None:
    """Groups with blocks of different sizes are served at one count, inside a block of the coarser group."""
    kit, a, c = Kit(tier(HOST, 16)), chain("a", 3), chain("c", 2)
    kit.put(a)
    kit.put(c, namespace=2)
    coarse = replace(group(c, namespaces=(2,)), tokens_per_block=32, tokens=64)
    served = kit.get(group(a), coarse)
    assert served.tokens == 3 * TOKENS
    assert [g.count for g in served.groups] == [3, 2]


def test_a_settled_lease_gives_up_what_is_condemned() -> None:
    """A second settle after a page was condemned serves the blocks before it."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 4)
    kit.put(a)
    acquired = kit.acquire(group(a))
    served = kit.settle(acquired)
    kit.took(kit.core.condemn(served.groups[0].extents[0][2:3], now=kit.tick()))
    assert kit.settle(acquired).tokens == 32
    kit.release(acquired.lease)
    kit.core.check()


def test_a_share_counts_the_page_and_not_the_block() -> None:
    """A block shorter than its reservation counts against a session's pins by its whole page."""
    kit, a = Kit(tier(HOST, 32, segment=16), share=0.5), chain("a", 2)
    reserved = kit.reserve(a, length=8 * PAGE)
    blocks = commit_blocks(a, [0, 1], length=100)
    kit.finish_commit(kit.core.begin_commit(1, reservation=reserved.reservation, blocks=blocks, now=1.0))
    kit.core.open_session(2, domain=1)
    kit.reserve(chain("b", 4), session=2)
    assert kit.acquire(group(a), session=2).tokens == TOKENS


def test_a_lease_does_not_grow() -> None:
    """A later put does not extend a lease: on new pages it serves the same tokens as before."""
    kit, a = Kit(tier(HOST, 16)), chain("a", 4)
    kit.put(a[:2])
    acquired = kit.acquire(group(a))
    served = kit.settle(acquired)
    assert served.tokens == 2 * TOKENS
    kit.took(kit.core.condemn(served.groups[0].extents[0], now=kit.tick()))
    kit.put(a)
    again = kit.settle(acquired)
    assert (again.tokens, again.groups[0].count) == (2 * TOKENS, 2)
    assert again.groups[0].extents["generation"].min() > served.groups[0].extents["generation"].max()
    kit.release(acquired.lease)
