"""Segments and pages of one tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import DAEMON, PageState, SegmentAssignment, TierKind
from tierd.core.index.pages import Pages
from tierd.core.index.segment import Key
from tierd.errors import ConfigError, InvalidArgument, NotFound

KEY = Key(domain=1, class_bytes=PAGE, writer=0)


def pages_with(*segments: Key) -> Pages:
    pages = Pages(tier(HOST, 16), 0)
    for number, key in enumerate(segments):
        pages.begin(key, number + 1, {})
    return pages


def test_the_lowest_free_page_is_given() -> None:
    """The set of free pages alone decides the next page, not the order of their return."""
    first, second = pages_with(KEY, KEY), pages_with(KEY, KEY)
    for pages, order in ((first, [1, 5, 2]), (second, [5, 2, 1])):
        pages.take(KEY, 8, 1)
        for page in order:
            pages.give_back(np.asarray([page]))
        assert pages.take(KEY, 2, 9).tolist() == [1, 2]


def test_pages_come_back_from_any_state_but_free() -> None:
    """One call returns pages in several states, each counted off once. A free page is an error."""
    pages = pages_with(KEY)
    taken = pages.take(KEY, 4, 1)
    pages.move(taken[:1], PageState.RESERVED, PageState.READY)
    pages.move(taken[1:2], PageState.RESERVED, PageState.RETIRING)
    pages.give_back(taken[:3])
    assert pages.counts == [3, 1, 0, 0, 0]
    with pytest.raises(AssertionError, match="free is given back"):
        pages.give_back(taken[2:])


def test_an_empty_segment_goes_to_the_pool() -> None:
    """An empty place can begin a life of any other class, domain and writer."""
    pages = pages_with(KEY)
    taken = pages.take(KEY, 4, 1)
    pages.give_back(taken[:3])
    assert pages.vacant == {1, 2, 3}
    pages.give_back(taken[3:])
    begun = pages.begin(Key(2, 2 * PAGE, 5), 7, {})
    assert (begun.slot, begun.replaces, begun.pages, begun.writer) == (0, 1, 2, 5)


def test_a_living_writer_keeps_the_memory_that_it_emptied() -> None:
    """A live writer gets its emptied segment again, already mapped. Any other session may take it at once."""
    kit = Kit(tier(HOST, 4))
    kit.core.open_session(2, domain=1)
    kit.put(chain("a", 4))
    segment = kit.core.segments(0)[0].segment
    again = kit.reserve(chain("b", 4))
    assert again.plan.segments == []
    assert set(again.pages["segment"].tolist()) == {segment}
    kit.core.abort(1, reservation=again.reservation, now=kit.tick())
    kit.core.check()
    other = kit.reserve(chain("c", 4), session=2)
    assert [s.replaces for s in other.plan.segments] == [segment]
    kit.core.check()


def test_the_daemon_keeps_the_memory_that_it_loads_into() -> None:
    """The daemon loads into the same segment again, already mapped by readers. Any other may take it at
    once."""
    kit = Kit(tier(HOST, 4, high_watermark=0.1, low_watermark=0.0), tier(NVME, 16))
    for name in "abc":
        kit.put(chain(name, 4))
        kit.demote()
        kit.land()
    begun = []
    for name in "abab":
        acquired = kit.acquire(group(chain(name, 4)))
        kit.land()
        kit.release(acquired.lease)
        begun += acquired.plan.segments
        kit.core.check()
    assert [s.writer for s in begun] == [DAEMON], "one segment serves all of them"
    kit.took(kit.core.evict(kit.ids(chain("b", 4)), tier=0, now=kit.tick()))
    kit.core.check()
    other = kit.reserve(chain("d", 4))
    assert [s.replaces for s in other.plan.segments] == [begun[0].segment]
    kit.core.check()


@pytest.mark.parametrize(("kind", "is_found"), [(HOST, True), (NVME, False)])
def test_other_segments_of_the_daemon_end_with_their_last_page(kind: TierKind, is_found: bool) -> None:
    """A former daemon's segment ends when empty, as its clients may write to it. So do a store's segments."""
    pages = Pages(tier(kind, 16), 0)
    key = Key(1, pages.spec.segment_bytes // 4, DAEMON)
    begun = pages.begin(key, 1, {})
    if is_found:
        pages = Pages(tier(kind, 16), 0)
        assert pages.adopt_segment(begun, DAEMON)
    taken = pages.take(key, 4, 1)
    pages.move(taken, PageState.RESERVED, PageState.READY)
    pages.give_back(taken)
    assert not pages.idle and len(pages.vacant) == 4


def test_a_segment_that_never_held_a_block_is_not_kept() -> None:
    """A segment that never held a block is replaced, because its memory may be unavailable."""
    kit = Kit(tier(HOST, 4))
    first = kit.reserve(chain("a", 4))
    kit.core.abort(1, reservation=first.reservation, now=kit.tick())
    assert [s.replaces for s in kit.reserve(chain("a", 4)).plan.segments] == [1]


def test_page_ids_of_a_run_are_used_again() -> None:
    """Columns grow with the greatest number of concurrent pages, not with the number of lives."""
    pages = pages_with()
    for life in range(50):
        pages.begin(KEY, life + 1, {})
        pages.give_back(pages.take(KEY, 4, 4 * life + 1))
    assert pages.top == 4


def test_extents_say_where_a_page_lies() -> None:
    """Segment, slot, offset and generation of a page follow from its place."""
    pages = pages_with(KEY, Key(1, 2 * PAGE, 0))
    taken = pages.take(Key(1, 2 * PAGE, 0), 2, 40)
    extents = pages.extents(np.append(taken, -1))
    assert extents["segment"].tolist() == [2, 2, 0]
    assert extents["slot"].tolist() == [0, 1, 0]
    assert extents["offset"].tolist() == [0, 2 * PAGE, 0]
    assert extents["generation"].tolist() == [40, 41, 0]
    assert extents["page"].tolist() == [4, 5, -1]
    assert pages.find(extents).tolist()[:2] == taken.tolist()


@pytest.mark.parametrize(
    ("held", "domains", "domain", "writer", "fresh"),
    [
        ({}, {1: 1}, 1, 1, False),
        ({1: True}, {1: 1}, 1, 1, False),
        ({1: True}, {1: 1}, 1, 2, True),
        ({1: False}, {1: 1}, 1, 2, False),
        ({1: False}, {1: 1}, 2, 2, True),
        ({1: True}, {}, 1, 2, False),
        ({1: True}, {}, 2, 2, True),
        ({1: True, 2: False}, {1: 1, 2: 1}, 1, 1, False),
        ({1: True, 2: True}, {1: 1, 2: 1}, 1, 1, True),
    ],
)
def test_a_file_is_reused_only_if_nobody_can_abuse_it(held, domains, domain, writer, fresh) -> None:
    """fresh exactly if a live session other than the new writer writes to the old file, or the domain
    differs."""
    pages = pages_with(KEY)
    pages.give_back(pages.take(KEY, 1, 1))
    pages.holders[1] = dict(held)
    begun = pages.begin(Key(domain, PAGE, writer), 2, domains)
    assert begun.fresh is fresh
    assert pages.holders.get(2, {}) == ({} if fresh else held)


def test_descriptors_outlive_a_life() -> None:
    """Sessions that mapped a reused file still have it mapped."""
    kit = Kit(tier(HOST, 4))
    kit.core.open_session(2, domain=2)
    first = kit.put(chain("a", 1))
    assert first is not None
    kit.core.note_attached(1, tier=0, segment=int(first.extents["segment"][0]))
    kit.core.evict(first.blocks, tier=None, now=1.0)
    again = kit.reserve(chain("b", 1), length=2 * PAGE).plan.segments[0]
    assert (again.replaces, again.fresh) == (1, False)
    kit.core.abort(1, reservation=2, now=2.0)
    kit.core.end_session(1, 3.0)
    other = kit.reserve(chain("c", 1), session=2, namespace=2).plan.segments[0]
    assert (other.replaces, other.fresh) == (2, True), "a fork of the first may have it mapped still"


def test_no_domain_gets_memory_with_what_another_left() -> None:
    """A segment keeps its bytes, also without any client mapping. Another domain gets other memory."""
    pages = pages_with(KEY)
    pages.give_back(pages.take(KEY, 4, 1))
    assert pages.vacant == {0, 1, 2, 3}
    assert not pages.begin(KEY, 2, {}).fresh, "the same domain"
    pages.give_back(pages.take(KEY, 4, 5))
    assert pages.begin(KEY._replace(domain=2), 3, {}).fresh


def test_a_writer_hands_over() -> None:
    """A session's end makes its segments the daemon's. Empty ones go to the pool."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    kit.core.open_session(2, domain=1)
    kit.put(chain("a", 2))
    assert [s.writer for s in kit.core.segments(0)] == [1]
    kit.took(kit.core.end_session(1, 9.0))
    assert [s.writer for s in kit.core.segments(0)] == [0]
    kit.put(chain("b", 1), session=2)
    assert [s.writer for s in kit.core.segments(0)] == [0, 2]


def test_a_session_stands_for_another_of_its_process() -> None:
    """`end_session(into=)` moves segments and mappings, so no other process gets writable memory."""
    kit = Kit(tier(HOST, 4))
    for session in (2, 3):
        kit.core.open_session(session, domain=1)
    segment = kit.reserve(chain("a", 1)).plan.segments[0].segment
    kit.core.note_attached(1, tier=0, segment=segment)
    kit.took(kit.core.end_session(1, 2.0, into=2))
    again = kit.reserve(chain("b", 1), session=3).plan.segments[0]
    assert (again.replaces, again.fresh) == (segment, True)
    for into in (3, 9):
        with pytest.raises((InvalidArgument, NotFound)):
            kit.core.end_session(3, 3.0, into=into)
    assert kit.core.stats().sessions == 2


def test_surviving_segments_take_their_places() -> None:
    """A segment is adopted at its old place, once, and only if its shape fits the tier."""
    pages = pages_with()
    good = SegmentAssignment(0, 2, 9, 1, PAGE, 4, 0, None, False)
    assert pages.adopt_segment(good, 0)
    assert not pages.adopt_segment(good, 0)
    assert not pages.adopt_segment(replace(good, slot=3, pages=5), 0)
    assert not pages.adopt_segment(replace(good, slot=4), 0)


def test_states_are_counted_in_pages_and_bytes() -> None:
    """The counts of all states add up to the segments after every move."""
    pages = pages_with(KEY)
    taken = pages.take(KEY, 3, 1)
    pages.move(taken[:2], PageState.RESERVED, PageState.READY)
    assert pages.counts == [1, 1, 2, 0, 0]
    assert pages.bytes_in == [PAGE, PAGE, 2 * PAGE, 0, 0]
    with pytest.raises(AssertionError):
        pages.move(taken[:1], PageState.RESERVED, PageState.READY)


def test_a_segment_must_fit_the_tier() -> None:
    """A tier smaller than one segment is refused with the remedy."""
    with pytest.raises(ConfigError, match="make the segments smaller"):
        Pages(replace(tier(HOST, 4), segment_bytes=1 << 30), 0)


class Counted(list):  # type: ignore[type-arg]
    """A list that counts its iterations."""

    walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.walks += 1
        return super().__iter__()


def test_small_steps_do_not_go_through_all_places() -> None:
    """Scrub batches walk no segments. Only the first adoption after a segment's begin or end does."""
    kit, a = Kit(tier(HOST, 256)), chain("a", 64)
    kit.put(a)
    pages = kit.core._index.tiers[0]
    pages.segments = pages.by_place._segments = counted = Counted(pages.segments)
    for _ in range(3):
        held = kit.core.pages_held(0, after=-1, limit_bytes=4 * PAGE)
        assert len(held.blocks) == 4
        kit.core.verified(held.extents)
        assert kit.core.are_held(held.extents).all()
        assert kit.core.used_bytes() == 64 * PAGE
        assert kit.core.page_counts(0)[PageState.READY] == 64
    assert counted.walks == 0
    for _ in range(3):
        assert not kit.core.adopt(
            0, segments=[], extents=held.extents, metas=kit.core.metas(held.blocks), now=kit.tick()
        ).any()
    assert counted.walks <= 1
