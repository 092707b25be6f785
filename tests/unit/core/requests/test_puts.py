"""Reserve and commit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, TOKENS, Kit, chain, commit_blocks, group, tier
from tierd.core.formats.model import PUT_BLOCK, ROOT, UNVERIFIED, BlockStatus, Reason, StructArray, TierKind
from tierd.core.plan import PutQuery
from tierd.errors import InvalidArgument, NotFound

MISS, READY, RESERVED, EXISTS, NO_ROOM, REJECTED, FAILED = (
    getattr(BlockStatus, name) for name in ("MISS", "READY", "RESERVED", "EXISTS", "NO_ROOM", "REJECTED", "FAILED")
)


def held(kit: Kit, names: StructArray) -> int:
    return int((kit.ids(names) >= 0).sum())


def statuses(reserved) -> list[int]:
    return reserved.statuses[0].tolist()


def test_nothing_is_visible_before_commit() -> None:
    """Reserved blocks are misses for every session until their commit finishes."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    reserved = kit.reserve(a)
    begun = kit.core.begin_commit(1, reservation=reserved.reservation, blocks=None, now=1.0)
    assert kit.tiers_of(a) == [-1, -1, -1]
    kit.finish_commit(begun)
    assert kit.tiers_of(a) == [0, 0, 0]


def test_a_commit_is_all_or_nothing() -> None:
    """If one block is not ok, none is published and every page is freed."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    begun = kit.core.begin_commit(1, reservation=kit.reserve(a).reservation, blocks=None, now=1.0)
    ok = np.asarray([True, False, True])
    answer = kit.core.finish_commit(
        begun, digests=np.zeros((3, 16), np.uint8), ok=ok, lease=True, keep_open=False, now=2.0
    )
    kit.took(answer.plan)
    assert answer.statuses.tolist() == [FAILED] * 3
    assert answer.lease == 0
    assert answer.plan.freed["reason"].tolist() == [Reason.FAILED] * 3
    assert kit.tiers_of(a) == [-1, -1, -1]


def test_failed_pages_can_be_committed_again_if_kept_open() -> None:
    """With keep_open a failed commit keeps its pages reserved, and the next commit may succeed."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    reserved = kit.reserve(a)
    begun = kit.core.begin_commit(1, reservation=reserved.reservation, blocks=None, now=1.0)
    assert len(kit.finish_commit(begun, good=False, keep_open=True).plan.freed) == 0
    assert kit.commit(reserved).statuses.tolist() == [READY, READY]


def test_the_first_commit_of_a_name_wins() -> None:
    """The second writer of a block gets EXISTS and the first one's page, and loses its own page."""
    kit, a = Kit(tier(HOST, 16)), chain("a", 2)
    kit.core.open_session(2, domain=1)
    mine, other = kit.reserve(a), kit.reserve(a, session=2)
    first, second = kit.commit(mine), kit.commit(other, session=2)
    assert second.statuses.tolist() == [EXISTS, EXISTS]
    assert second.extents["generation"].tolist() == first.extents["generation"].tolist()
    assert second.plan.freed["reason"].tolist() == [Reason.DUPLICATE] * 2
    assert second.blocks.tolist() == first.blocks.tolist()


def test_a_name_twice_in_one_commit_is_one_block() -> None:
    """Within a commit the first of two equal names is READY and the second EXISTS, on one page."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 1)
    reserved = kit.reserve(np.concatenate((a, a)))
    assert statuses(reserved) == [RESERVED, RESERVED]
    answer = kit.commit(reserved)
    assert answer.statuses.tolist() == [READY, EXISTS]
    assert len(set(answer.extents["generation"].tolist())) == 1


def test_a_name_twice_in_one_commit_has_its_page_also_out_of_service() -> None:
    """Out of service, the second of two equal names gets the first one's page. The lease pins both."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    reserved = kit.reserve(np.concatenate((a, a)))
    kit.core.set_serving(0, serving=False)
    answer = kit.commit(reserved, lease=True)
    assert answer.statuses.tolist() == [READY, READY, EXISTS, EXISTS]
    assert answer.extents[2:].tolist() == answer.extents[:2].tolist()
    assert answer.extents["page"].tolist() == [0, 1, 0, 1]
    assert answer.lease


def test_what_is_held_anywhere_need_not_be_written() -> None:
    """Reserve answers EXISTS for a block that only a farther tier holds."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    kit.put(a)
    kit.took(kit.core.persist(kit.ids(a), now=5.0))
    kit.land()
    kit.took(kit.core.evict(kit.ids(a), tier=0, now=6.0))
    reserved = kit.reserve(chain("a", 3))
    assert statuses(reserved) == [EXISTS, EXISTS, RESERVED]
    assert reserved.extents[0]["tier"].tolist() == [1, 1, 0]


def test_a_full_tier_gives_what_it_has() -> None:
    """Reserve gives a leading part, and NO_ROOM from the first block without a page on."""
    kit = Kit(tier(HOST, 8))
    assert statuses(kit.reserve(chain("a", 10))) == [RESERVED] * 8 + [NO_ROOM] * 2
    assert statuses(kit.reserve(chain("b", 1))) == [NO_ROOM]


def test_a_session_keeps_to_its_share() -> None:
    """The pages that a session reserves and pins stay within its share. Other sessions still get room."""
    kit = Kit(tier(HOST, 16), share=0.5)
    kit.core.open_session(2, domain=1)
    kit.commit(kit.reserve(chain("a", 3)), lease=True)
    assert statuses(kit.reserve(chain("b", 9))) == [RESERVED] * 5 + [NO_ROOM] * 4
    assert statuses(kit.reserve(chain("c", 4), session=2)) == [RESERVED] * 4


def test_a_block_larger_than_a_segment_has_no_room() -> None:
    """A page never spans two segments: a larger block is NO_ROOM, without an error."""
    kit = Kit(tier(HOST, 8))
    assert statuses(kit.reserve(chain("a", 1), length=5 * PAGE)) == [NO_ROOM]


def test_blocks_of_other_lengths_get_pages_of_their_own() -> None:
    """A short last block takes a small page in a segment of its class, beside the others' segment."""
    kit, a = Kit(tier(HOST, 16)), chain("a", 3)
    blocks = np.zeros(3, PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = a, [16, 16, 5], [2 * PAGE, 2 * PAGE, 1000]
    reserved = kit.core.reserve(1, groups=[PutQuery(1, ROOT, 0, blocks)], kind=HOST, now=1.0)
    kit.took(reserved.plan)
    assert sorted(s.class_bytes for s in reserved.plan.segments) == [PAGE, 2 * PAGE]
    kit.commit(reserved)
    served = kit.get(group(a, tokens=37))
    assert served.tokens == 37
    assert served.groups[0].extents["length"].tolist() == [[2 * PAGE, 2 * PAGE, 1000]]
    assert served.groups[0].tokens.tolist() == [16, 16, 5]


def test_private_pages_are_named_at_commit() -> None:
    """A client can commit private pages one by one, and gives their names and real lengths at commit."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    reserved = kit.reserve(np.zeros((3, 32), np.uint8))
    assert statuses(reserved) == [RESERVED] * 3
    with pytest.raises(InvalidArgument, match="private"):
        kit.core.begin_commit(1, reservation=reserved.reservation, blocks=None, now=1.0)
    begun = kit.core.begin_commit(
        1, reservation=reserved.reservation, blocks=commit_blocks(a, [2, 0], length=100), now=1.0
    )
    assert begun.extents["length"].tolist() == [100, 100]
    assert begun.metas["parent"][1].tolist() == a[0].tolist()
    answer = kit.finish_commit(begun, keep_open=True)
    assert answer.statuses.tolist() == [READY, READY]
    assert answer.extents["slot"].tolist() == [2, 0]
    left = kit.took(kit.core.abort(1, reservation=reserved.reservation, now=3.0))
    assert left.freed["extent"]["slot"].tolist() == [1]


def test_all_private_pages_are_named_in_another_order() -> None:
    """A commit may name private pages in any order: each block is in the page named for it."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    reserved = kit.reserve(np.zeros((3, 32), np.uint8))
    begun = kit.core.begin_commit(1, reservation=reserved.reservation, blocks=commit_blocks(a, [2, 0, 1]), now=1.0)
    assert begun.metas["hash"].tolist() == a.tolist()
    assert begun.metas["offset"].tolist() == [2 * PAGE, 0, PAGE]
    assert kit.finish_commit(begun).statuses.tolist() == [READY] * 3
    assert kit.get(group(a)).groups[0].extents["slot"].tolist() == [[2, 0, 1]]


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        (commit_blocks(chain("a", 2), [0, 0]), "twice"),
        (commit_blocks(chain("a", 1), [9]), "beyond"),
        (commit_blocks(chain("a", 1), [0], length=PAGE + 1), "above"),
        (commit_blocks(chain("a", 1), [0], length=0), "0"),
        (commit_blocks(np.zeros((1, 32), np.uint8), [0]), "zeros"),
        (np.zeros(1, PUT_BLOCK), "dtype"),
    ],
)
def test_a_commit_that_cannot_be_meant_changes_nothing(blocks, what) -> None:
    """A commit of wrong records is refused, and the reservation stays as it was."""
    kit = Kit(tier(HOST, 8))
    reserved = kit.reserve(chain("a", 2))
    with pytest.raises(InvalidArgument, match=what):
        kit.core.begin_commit(1, reservation=reserved.reservation, blocks=blocks, now=1.0)
    assert kit.commit(reserved).statuses.tolist() == [READY, READY]


def test_a_block_is_committed_once() -> None:
    """A block whose commit runs or is done cannot be committed again, nor another session's reservation."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    kit.core.open_session(2, domain=1)
    number = kit.reserve(a).reservation
    begun = kit.core.begin_commit(1, reservation=number, blocks=commit_blocks(a, [0]), now=1.0)
    with pytest.raises(InvalidArgument):
        kit.core.begin_commit(1, reservation=number, blocks=commit_blocks(a, [0]), now=1.0)
    with pytest.raises(NotFound):
        kit.core.begin_commit(2, reservation=number, blocks=None, now=1.0)
    kit.finish_commit(begun)
    with pytest.raises(NotFound):
        kit.finish_commit(begun)


@pytest.mark.parametrize("end", ["session", "abort"])
def test_a_commit_outlives_its_session(end: str) -> None:
    """Pages in hashing outlive their session's end or abort, and finish_commit publishes them."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 3)
    number = kit.reserve(a).reservation
    begun = kit.core.begin_commit(1, reservation=number, blocks=commit_blocks(a[:2], [0, 1]), now=1.0)
    if end == "session":
        plan = kit.took(kit.core.end_session(1, 2.0))
    else:
        plan = kit.took(kit.core.abort(1, reservation=number, now=2.0))
    assert len(plan.freed) == 1
    answer = kit.finish_commit(begun, lease=True, keep_open=True)
    assert answer.statuses.tolist() == [READY, READY]
    assert bool(answer.lease) == (end == "abort")
    assert kit.tiers_of(a) == [0, 0, -1]
    assert kit.core.stats().reservations == 0


def test_a_commit_into_a_forgotten_namespace_fails() -> None:
    """An epoch bump during hashing makes a commit FAILED and frees its pages. Reserves are REJECTED."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    begun = kit.core.begin_commit(1, reservation=kit.reserve(a).reservation, blocks=None, now=1.0)
    kit.took(kit.core.forget_namespaces([1], now=2.0).plan)
    answer = kit.finish_commit(begun)
    assert answer.statuses.tolist() == [FAILED, FAILED]
    assert len(answer.plan.freed) == 2
    assert statuses(kit.reserve(a)) == [REJECTED, REJECTED]


def test_a_lease_on_a_commit_pins_what_was_committed() -> None:
    """With lease=True, committed blocks cannot be evicted until the client releases the lease."""
    kit, a = Kit(tier(HOST, 4)), chain("a", 4)
    answer = kit.commit(kit.reserve(a), lease=True)
    assert answer.lease
    assert statuses(kit.reserve(chain("b", 1))) == [NO_ROOM]
    with pytest.raises(InvalidArgument, match="commit"):
        kit.core.settle(answer.lease, now=9.0)
    kit.release(answer.lease)
    assert statuses(kit.reserve(chain("b", 1))) == [RESERVED]


def test_blocks_that_a_client_wrote_are_unverified() -> None:
    """A page that a client wrote is UNVERIFIED until it is verified. A page that the daemon wrote is not."""
    kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
    answer = kit.put(a)
    assert answer is not None
    assert answer.extents["flags"].tolist() == [UNVERIFIED, UNVERIFIED]
    kit.core.verified(answer.extents[:1])
    assert kit.core.extents(answer.blocks, tier=0)["flags"].tolist() == [0, UNVERIFIED]
    plan = kit.took(kit.core.persist(answer.blocks, now=1.0))
    assert plan.transfers["target"]["flags"].tolist() == [0, 0]


def test_a_reserve_never_pushes_out_what_it_builds_on() -> None:
    """Room for a put never costs the blocks that it continues, nor those with EXISTS."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 8)
    kit.put(a[:4])
    kit.put(chain("b", 4))
    blocks = np.zeros(3, PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = a[4:7], TOKENS, PAGE
    kit.took(kit.core.reserve(1, groups=[PutQuery(1, a[3].tobytes(), 4, blocks)], kind=HOST, now=9.0).plan)
    assert kit.tiers_of(a[3:4]) == [0]
    assert statuses(kit.reserve(a[:5])) == [EXISTS] * 4 + [RESERVED]


def test_metas_know_what_was_committed() -> None:
    """`metas` returns the fields that begin_commit fills in and those that the caller adds."""
    kit, a = Kit(tier(HOST, 8)), chain("a", 2)
    begun = kit.core.begin_commit(1, reservation=kit.reserve(a).reservation, blocks=None, now=1.0)
    assert begun.metas["generation"].tolist() == begun.extents["generation"].tolist()
    begun.metas["time_ms"], begun.metas["epoch"], begun.metas["slices"] = 99, 4, 2
    answer = kit.finish_commit(begun)
    metas = kit.core.metas(answer.blocks)
    for name in (
        "hash",
        "parent",
        "namespace",
        "domain",
        "position",
        "tokens",
        "stored_length",
        "time_ms",
        "epoch",
        "slices",
    ):
        assert np.array_equal(metas[name], begun.metas[name]), name
    assert metas["digest"].tolist() == [[7] * 16] * 2


def test_stripes_follow_the_hash() -> None:
    """The first 8 bytes of the hash choose among tiers of a kind. Others replace one out of service."""
    kit, a = Kit(tier(HOST, 32), tier(HOST, 32, index=1)), chain("a", 12)
    kit.put(a)
    stripe = [int.from_bytes(h[:8].tobytes(), "little") % 2 for h in a]
    assert kit.tiers_of(a) == stripe
    kit.core.set_serving(0, False)
    b = chain("b", 6)
    kit.put(b)
    assert kit.tiers_of(b) == [1] * 6


def test_a_kind_that_is_not_there_has_no_room() -> None:
    """Reserve in a kind without a tier in service answers NO_ROOM and reserves nothing."""
    kit = Kit(tier(HOST, 8))
    reserved = kit.reserve(chain("a", 2), kind=TierKind.DEVICE)
    assert statuses(reserved) == [NO_ROOM, NO_ROOM]
    assert reserved.reservation == 0
    assert reserved.plan.is_empty


@pytest.mark.parametrize(
    "query",
    [
        PutQuery(1, b"short", 0, np.zeros(1, PUT_BLOCK)),
        PutQuery(1, ROOT, 0, np.zeros(1, PUT_BLOCK)),
        PutQuery(1, ROOT, 0, np.zeros(1, np.uint8)),
    ],
)
def test_a_reserve_that_cannot_be_meant_is_refused(query: PutQuery) -> None:
    """A parent of a wrong length, a length of zero and a wrong dtype raise InvalidArgument."""
    with pytest.raises(InvalidArgument):
        Kit(tier(HOST, 8)).core.reserve(1, groups=[query], kind=HOST, now=1.0)


def test_a_tier_that_came_back_with_other_bytes() -> None:
    """A block put again while its tier is out of service replaces the old copy only if digests differ."""
    for digest, reasons in ((7, []), (8, [Reason.DUPLICATE] * 2)):
        kit, a = Kit(tier(HOST, 8), tier(NVME, 8)), chain("a", 2)
        kit.put(a)
        kit.took(kit.core.persist(kit.ids(a), now=3.0))
        kit.land()
        kit.took(kit.core.evict(kit.ids(a), tier=0, now=4.0))
        kit.core.set_serving(1, False)
        assert kit.tiers_of(a) == [-1, -1]
        answer = kit.commit(kit.reserve(a), digest=digest)
        assert answer.plan.freed["reason"].tolist() == reasons
        kit.core.set_serving(1, True)
        assert [int(t).bit_count() for t in kit.core.describe(kit.ids(a))["tiers"]] == [1 if reasons else 2] * 2


def test_a_name_that_comes_twice_in_a_commit_is_one_block() -> None:
    """The second of two equal names is the first one's block, also if that replaced an old copy."""
    kit, names = Kit(tier(HOST, 64), tier(NVME, 8)), chain("a", 2)
    for row in (names[:1], names[1:]):
        kit.put(row, kind=NVME)
    kit.core.set_serving(1, serving=False)
    twice = np.concatenate((names, names[:1]))
    answer = kit.commit(kit.reserve(twice), digest=9)
    assert answer.statuses.tolist() == [READY, READY, EXISTS]
    assert answer.blocks.tolist() == kit.ids(twice).tolist()
    assert answer.extents["generation"][2] == answer.extents["generation"][0]


def test_little_is_reserved_ahead() -> None:
    """All sessions may reserve an eighth of a tier ahead. A commit, an abort or a session's end frees it."""
    kit = Kit(tier(HOST, 64))
    kit.core.open_session(2, domain=1)
    first, second = kit.reserve_ahead(3, 2), kit.reserve_ahead(3, 2, session=2)
    assert (len(first.reservations), len(second.reservations)) == (3, 1)
    assert kit.reserve_ahead(1, 2).reservations == []
    assert statuses(kit.reserve(chain("a", 3))) == [RESERVED] * 3
    kit.core.begin_commit(
        1, reservation=first.reservations[0], blocks=commit_blocks(chain("c", 2), range(2)), now=kit.tick()
    )
    (third,) = kit.reserve_ahead(5, 2).reservations
    kit.took(kit.core.abort(1, reservation=third, now=kit.tick()))
    (fourth,) = kit.reserve_ahead(5, 2).reservations
    kit.core.begin_commit(1, reservation=fourth, blocks=commit_blocks(chain("b", 2), range(2)), now=kit.tick())
    assert len(kit.reserve_ahead(5, 2).reservations) == 1
    kit.took(kit.core.end_session(2, now=kit.tick()))
    assert len(kit.reserve_ahead(5, 2).reservations) == 1


def test_what_is_reserved_ahead_counts_in_whole_pages() -> None:
    """Pages ahead count in full against the tier's share, however short their blocks are."""
    kit = Kit(tier(HOST, 64))
    assert kit.reserve_ahead(2, 9, length=100).reservations == []
    assert len(kit.reserve_ahead(2, 8, length=100).reservations) == 1


def test_each_put_that_may_come_has_pages_of_its_own() -> None:
    """A client commits pages ahead put by put, under any names, and the core gives out each page once."""
    kit = Kit(tier(HOST, 64))
    ahead = kit.reserve_ahead(4, 2)
    assert ahead.extents.shape == (4, 2)
    assert len(set(ahead.extents["page"].ravel().tolist())) == 8
    for row, number in enumerate(ahead.reservations):
        names = chain("abcd"[row], 2)
        begun = kit.core.begin_commit(1, reservation=number, blocks=commit_blocks(names, range(2)), now=kit.tick())
        assert begun.extents["page"].tolist() == ahead.extents["page"][row].tolist()
        done = kit.core.finish_commit(
            begun, digests=np.ones((2, 16), np.uint8), ok=np.ones(2, bool), lease=False, keep_open=False, now=kit.tick()
        )
        assert done.statuses.tolist() == [READY] * 2
    kit.core.check()


def test_pages_ahead_cost_nobody_what_was_put_last() -> None:
    """Pages ahead never evict their session's last put, even under LFU. Those of another session may."""
    kit = Kit(tier(HOST, 64, eviction="lfu"))
    kit.core.open_session(2, domain=1)
    kit.put(old := chain("old", 60))
    kit.release(kit.acquire(group(old)).lease)
    kit.put(new := chain("new", 4))
    assert len(kit.reserve_ahead(1, 4).reservations) == 1
    assert [held(kit, names) for names in (old, new)] == [56, 4]
    assert len(kit.reserve_ahead(1, 4, session=2).reservations) == 1
    assert [held(kit, names) for names in (old, new)] == [56, 0]


def test_a_put_that_may_come_gets_all_its_pages_or_none() -> None:
    """Room for only a part of one more put ahead stays free."""
    kit = Kit(tier(HOST, 64), share=1.0)
    kit.put(pinned := chain("a", 61))
    kit.core.pin_blocks(kit.ids(pinned))
    ahead = kit.reserve_ahead(4, 2)
    assert len(ahead.reservations) == len(ahead.extents) == 1
    assert ahead.plan.reserved["generation"].tolist() == ahead.extents["generation"].ravel().tolist()
    assert len(ahead.plan.freed) == 0
    assert statuses(kit.reserve(chain("b", 2))) == [RESERVED, NO_ROOM]
    kit.core.check()


def test_nothing_is_reserved_ahead_for_a_namespace_that_ended() -> None:
    """In an ended epoch nothing is reserved ahead, and a commit of earlier pages ahead is FAILED."""
    kit = Kit(tier(HOST, 64))
    (before,) = kit.reserve_ahead(1, 2).reservations
    kit.took(kit.core.forget_namespaces([1], now=kit.tick()).plan)
    assert kit.reserve_ahead(1, 2).reservations == []
    begun = kit.core.begin_commit(1, reservation=before, blocks=commit_blocks(chain("a", 2), range(2)), now=kit.tick())
    assert kit.finish_commit(begun).statuses.tolist() == [FAILED] * 2
    assert kit.core.stats().reservations == 0


def test_named_blocks_are_not_reserved_ahead() -> None:
    """`reserve_ahead` refuses named blocks, because a client with names reserves for its put."""
    kit, blocks = Kit(tier(HOST, 64)), np.zeros(2, PUT_BLOCK)
    blocks["tokens"], blocks["length"], blocks["hash"] = 16, PAGE, chain("a", 2)
    with pytest.raises(InvalidArgument, match="a hash is given"):
        kit.core.reserve_ahead(1, group=PutQuery(1, ROOT, 0, blocks), puts=1, kind=HOST, now=kit.tick())
