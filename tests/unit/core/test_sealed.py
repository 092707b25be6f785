"""Sealed puts in the core's books: staging pages of the session, and pages that only the daemon
writes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, commit_blocks, group, tier
from tierd.core.formats.model import SEALED, UNVERIFIED, BlockStatus, Reason
from tierd.core.plan import Committing
from tierd.core.space.room import STAY_S

READY, EXISTS, NO_ROOM, RESERVED, FAILED = (
    BlockStatus.READY,
    BlockStatus.EXISTS,
    BlockStatus.NO_ROOM,
    BlockStatus.RESERVED,
    BlockStatus.FAILED,
)


def sealed(pages: int = 32, *, share: float = 1.0, **more: object) -> Kit:
    """A core of one host tier with sealed puts."""
    return Kit(tier(HOST, pages, sealed_puts=True, **more), share=share)


def begun(kit: Kit, reserved: object, session: int = 1) -> Committing:
    return kit.core.begin_commit(session, reservation=reserved.reservation, blocks=None, now=kit.tick())  # type: ignore[attr-defined]


def writers(kit: Kit, extents: np.ndarray) -> set[int]:
    """The sessions that may write to the segments of these pages."""
    of = {given.segment: given.writer for given in kit.core.segments(0)}
    return {of[segment] for segment in extents["segment"].tolist()}


def reserved_pages(kit: Kit) -> int:
    return kit.core.tier_stats()[0].pages_reserved


def test_what_the_session_writes_is_never_where_the_block_will_lie() -> None:
    """Reserve gives staging pages; commit names them and other pages, which only the daemon writes."""
    kit, a = sealed(), chain("a", 3)
    reserved = kit.reserve(a)
    commit = begun(kit, reserved)
    assert writers(kit, reserved.extents[0]) == {1}
    assert commit.staging["generation"].tolist() == reserved.extents[0]["generation"].tolist()
    assert writers(kit, commit.extents) == {SEALED}
    committed = kit.finish_commit(commit, lease=True)
    assert committed.statuses.tolist() == [READY] * 3
    assert committed.extents["generation"].tolist() == commit.extents["generation"].tolist()
    assert kit.get(group(a)).extents["generation"].tolist() == commit.extents["generation"].tolist()


def test_a_sealed_block_is_verified_by_its_commit() -> None:
    """A sealed put publishes its pages without UNVERIFIED; other puts publish theirs with it."""
    kit, plain, a = sealed(), Kit(tier(HOST, 32)), chain("a", 2)
    for each, flags in ((kit, 0), (plain, UNVERIFIED)):
        each.put(a)
        assert each.get(group(a)).extents["flags"].tolist() == [flags] * 2


@pytest.mark.parametrize("end", ["commit", "failed", "abort", "duplicate", "session", "session in commit", "ahead"])
def test_staging_pages_come_back_with_the_end_of_a_put(end: str) -> None:
    """After every end of a reservation no page is reserved, and only held blocks count as used."""
    kit, a = sealed(), chain("a", 3)
    kit.core.open_session(2, domain=1)
    if end == "ahead":
        for number in kit.reserve_ahead(1, 2).reservations:
            kit.took(kit.core.abort(1, reservation=number, now=kit.tick()))
    else:
        reserved = kit.reserve(a)
        assert reserved_pages(kit) == 6
        _end(kit, reserved, a, end)
    held = 3 if end in ("commit", "duplicate", "session in commit") else 0
    assert reserved_pages(kit) == 0
    assert kit.core.tier_stats()[0].used_bytes == held * PAGE
    assert all(sum(session.reserved_bytes) == 0 for session in kit.core.session_stats())


def _end(kit: Kit, reserved: object, names: np.ndarray, how: str) -> None:
    if how in ("commit", "failed"):
        assert (
            kit.commit(reserved, good=how == "commit").statuses.tolist() == [READY if how == "commit" else FAILED] * 3
        )  # type: ignore[arg-type]
    elif how == "abort":
        kit.took(kit.core.abort(1, reservation=reserved.reservation, now=kit.tick()))  # type: ignore[attr-defined]
    elif how == "duplicate":
        other = kit.reserve(names, session=2)
        kit.commit(reserved)  # type: ignore[arg-type]
        assert kit.commit(other, session=2).statuses.tolist() == [EXISTS] * 3
    elif how == "session":
        kit.took(kit.core.end_session(1, now=kit.tick()))
    else:
        commit = begun(kit, reserved)
        kit.took(kit.core.end_session(1, now=kit.tick()))
        assert reserved_pages(kit) == 6  # a thread still copies from staging to sealed pages
        kit.finish_commit(commit)


def test_a_staging_page_is_free_when_its_own_block_is_published() -> None:
    """With keep_open, only a successful commit frees staging pages, and only those of its named blocks."""
    kit, a = sealed(), chain("a", 3)
    reserved = kit.reserve(a)
    named = commit_blocks(a[:1], [0])
    for good, left in ((False, 6), (True, 4)):
        commit = kit.core.begin_commit(1, reservation=reserved.reservation, blocks=named, now=kit.tick())
        freed = kit.finish_commit(commit, good=good, keep_open=True).plan.freed
        assert freed["reason"].tolist() == [Reason.SEALED] * good
        assert reserved_pages(kit) == left


def test_a_put_takes_twice_its_room_while_it_is_under_way() -> None:
    """8 pages take 4 reserved blocks; a fifth is NO_ROOM. Other blocks have room after the commit."""
    kit, a = sealed(8), chain("a", 5)
    reserved = kit.reserve(a)
    assert reserved.statuses[0].tolist() == [RESERVED] * 4 + [NO_ROOM]
    kit.commit(reserved)
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [RESERVED]


def test_staging_leaves_a_segment_for_the_blocks() -> None:
    """If staging would fill every segment, the core stages fewer pages, so that more blocks have room."""
    kit = sealed(16)
    kit.core.open_session(2, domain=1)
    kit.reserve(chain("b", 1), session=2)  # one segment of four for staging, one for blocks
    assert kit.reserve(chain("a", 6)).statuses[0].tolist() == [RESERVED] * 4 + [NO_ROOM] * 2


def test_a_restart_keeps_sealed_segments_sealed() -> None:
    """A new core keeps surviving sealed segments sealed, and puts new blocks into their free pages."""
    old, new, a = sealed(), sealed(), chain("a", 2)
    old.put(a)
    extents, metas = old.core.extents(old.ids(a), tier=0), old.core.metas(old.ids(a))
    for name in ("generation", "segment", "offset"):
        metas[name] = extents[name]
    assert new.core.adopt(0, segments=old.core.segments(0), extents=extents, metas=metas, now=new.tick()).all()
    new.core.close_empty(0)
    assert writers(new, new.core.extents(new.ids(a), tier=0)) == {SEALED}
    assert new.put(chain("b", 2)).extents["segment"].tolist() == extents["segment"].tolist()


def test_both_pages_count_against_the_session() -> None:
    """A session with a share of 8 pages reserves 4 blocks, and more only after a commit or an abort."""
    kit = sealed(share=0.25)
    reserved = kit.reserve(chain("a", 6))
    assert reserved.statuses[0].tolist() == [RESERVED] * 4 + [NO_ROOM] * 2
    assert kit.core.session_stats()[0].reserved_bytes == (8 * PAGE,)
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [NO_ROOM]
    kit.took(kit.core.abort(1, reservation=reserved.reservation, now=kit.tick()))
    assert kit.reserve(chain("b", 1)).statuses[0].tolist() == [RESERVED]


def test_puts_that_may_come_take_both_pages_of_an_eighth() -> None:
    """A session may reserve 8 of 64 pages ahead, which is 4 blocks."""
    assert len(sealed(64).reserve_ahead(8, 1).reservations) == 4


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_what_is_ahead_counts_as_it_lies(order: tuple[bool, bool]) -> None:
    """A page ahead counts once, or twice in a sealed tier. At most an eighth may be ahead."""
    kit = Kit(*(tier(HOST, 128, index=i, sealed_puts=is_sealed) for i, is_sealed in enumerate(order)))
    ahead = kit.reserve_ahead(64, 3)
    sizes = [PAGE << order[number] for number in ahead.extents["tier"].ravel().tolist()]
    assert set(sizes) == {PAGE, 2 * PAGE}
    assert kit.core._sessions.ahead_bytes == sum(sizes) <= 2 * 128 * PAGE // 8
    assert sum(kit.core.session_stats()[0].reserved_bytes) == sum(sizes)


def test_a_file_that_a_client_could_write_to_is_never_sealed() -> None:
    """A place that a session mapped gets a new file before it is sealed, as a fork may still map it."""
    kit = sealed(12)
    kit.core.open_session(2, domain=1)
    reserved = kit.reserve(chain("a", 2))
    staged = int(reserved.extents[0]["segment"][0])
    kit.core.note_attached(1, tier=0, segment=staged)
    (place,) = [given.slot for given in kit.core.segments(0) if given.segment == staged]
    kit.commit(reserved)
    kit.reserve(chain("b", 2), session=2)
    kit.took(kit.core.end_session(1, now=kit.tick()))
    (begun,) = kit.reserve(chain("c", 2), session=2).plan.segments
    assert (begun.slot, begun.writer) == (place, SEALED)
    assert begun.fresh


def test_no_writer_is_given_the_file_of_another() -> None:
    """A staging segment never begins in another session's file, which that session could truncate."""
    kit = sealed(8)
    for session in (1, 2, 3):
        if session > 1:
            kit.core.open_session(session, domain=1)
        plan = kit.reserve(chain(f"s{session}", 1), session=session).plan
        for given in plan.segments:
            assert session == 1 or given.writer == SEALED or given.fresh
            if given.writer == session:
                kit.core.note_attached(session, tier=0, segment=given.segment)
        kit.took(kit.core.end_session(session, now=kit.tick()))


def test_a_segment_that_lost_its_writer_takes_no_blocks() -> None:
    """While a commit of an ended session runs, no put and no promotion uses its staging segment."""
    kit = Kit(tier(HOST, 16, sealed_puts=True), tier(NVME, 16))
    kit.core.open_session(2, domain=1)
    kit.put(chain("far", 1), session=2)
    kit.took(kit.core.persist(kit.ids(chain("far", 1)), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(chain("far", 1)), tier=0, now=kit.tick()))
    reserved = kit.reserve(chain("a", 2))
    commit = begun(kit, reserved)
    kit.took(kit.core.end_session(1, now=kit.tick()))
    kit.put(chain("b", 3), session=2)
    acquired = kit.acquire(group(chain("far", 1)), session=2)
    kit.land()
    lent = set(commit.staging["segment"].tolist())
    assert lent.isdisjoint(kit.settle(acquired).extents["segment"].tolist())
    assert lent.isdisjoint(kit.core.extents(kit.ids(chain("b", 3)), tier=0)["segment"].tolist())
    kit.finish_commit(commit)


def test_the_memory_that_a_writer_has_mapped_stays_with_it() -> None:
    """In a full tier each put stages in the same segment and evicts the coldest: clients map nothing anew."""
    kit, staged = sealed(16), set[int]()
    for i in range(12):
        reserved = kit.reserve(chain(f"c{i}", 4))
        staged |= set(reserved.extents[0]["segment"].tolist())
        assert kit.commit(reserved).statuses.tolist() == [READY] * 4
        assert i < 3 or not reserved.plan.segments
    assert len(staged) == 1


def test_who_puts_in_a_row_writes_to_the_same_memory() -> None:
    """In a full tier no put begins a segment: sessions reuse staging segments and blocks evict blocks.
    A session that stays idle for STAY_S loses this memory to others."""
    kit = sealed(32)
    kit.core.open_session(2, domain=1)

    def tick() -> float:
        kit.now += STAY_S / 100
        return kit.now

    def begins(name: str) -> int:
        reserved = kit.reserve(chain(name, 4))
        return len(reserved.plan.segments) + len(kit.commit(reserved).plan.segments)

    kit.tick = tick  # type: ignore[method-assign]
    for number in range(12):
        begins(f"fill {number}")
    assert [begins(f"next {number}") for number in range(6)] == [0] * 6
    (staging,) = [given.segment for given in kit.core.segments(0) if given.writer == 1]
    kit.reserve(chain("soon", 2), session=2)
    assert staging in {given.segment for given in kit.core.segments(0)}
    kit.now += STAY_S
    kit.reserve(chain("late", 4), session=2)
    assert staging not in {given.segment for given in kit.core.segments(0)}


def test_memory_that_somebody_just_wrote_to_is_given_up_where_nothing_else_may_leave() -> None:
    """If all blocks are pinned, another session gets an empty segment, however recently used."""
    kit, a = sealed(12), chain("a", 4)
    kit.core.open_session(2, domain=1)
    kit.tick = lambda: kit.now  # type: ignore[method-assign] # all calls at one time
    kit.put(a)
    kit.get(group(a))
    assert kit.reserve(chain("b", 4), session=2).statuses[0].tolist() == [RESERVED] * 4
