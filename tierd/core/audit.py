"""Every invariant of the core, asserted. Slow.

Tests run `Core.check` after each step; `tierctl fsck --online` runs it on request. The other parts
keep counts incrementally; the audit counts them again from their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from tierd.core.arrays.sets import true_rows
from tierd.core.formats.model import DAEMON, NOBODY, SEALED, PageState, Reason
from tierd.core.index.blocks import Names
from tierd.core.index.index import Index
from tierd.core.index.inflight_transfers import InflightTransfers
from tierd.core.index.pages import Pages
from tierd.core.plan import Ids
from tierd.core.requests.leases import BUSY, GONE, OPEN, Holders
from tierd.core.space.handover import Handover


class Audit:
    """See the module. Each method asserts; the message names the broken invariant."""

    def __init__(self, index: Index, sessions: Holders, inflight: InflightTransfers) -> None:
        self._index, self._sessions, self._inflight = index, sessions, inflight

    def check(self) -> None:
        """Asserts everything."""
        for step in self.steps():
            step()

    def steps(self) -> Iterator[Callable[[], None]]:
        """The checks. Each holds by itself at any moment between two calls of the core."""
        yield self._check_table
        yield self._check_families
        for tier in self._index.tiers:
            yield partial(self._check_states, tier)
            yield partial(self._check_segments, tier)
            yield partial(self._check_quarantine, tier)
            yield partial(self._check_pins, tier)
            yield partial(self._check_attachments, tier)
            yield partial(self._check_policy, tier)
        yield self._check_shares

    def _check_table(self) -> None:
        blocks = self._index.blocks
        known = blocks.known()
        named, forgotten = known[blocks.named[known]], np.flatnonzero(blocks.forgotten[: blocks.top])
        assert len(forgotten) == blocks.forgotten_count, "forgotten: its count is wrong"
        assert not blocks.named[forgotten].any(), "forgotten: a named block is in it"
        kept = np.sort(np.concatenate((named, forgotten)))
        assert np.array_equal(blocks.table.ids(), kept), "table: its ids are not the named and the forgotten blocks"
        assert blocks.table.count == len(kept), "table: its count is wrong"
        found = blocks.find(Names(blocks.namespace[named], blocks.hash[named]))
        assert np.array_equal(found, named), "table: a named block is not found by its name"
        lost = blocks.find(Names(blocks.namespace[forgotten], blocks.hash[forgotten]))
        assert (lost < 0).all(), "forgotten: a block is found by its name"

    def _check_families(self) -> None:
        blocks = self._index.blocks
        known = blocks.known()
        parents = blocks.parent[known]
        family = np.bincount(parents[parents >= 0], minlength=blocks.top)
        assert np.array_equal(family[: blocks.top], blocks.family[: blocks.top]), "family: not the number of children"
        places = np.zeros(blocks.top, np.int64)
        for tier in self._index.tiers:
            owners = tier.block[: tier.top]
            owners = owners[owners >= 0]
            np.add.at(places, owners, 1)
        assert np.array_equal(places, blocks.places[: blocks.top]), "places: not the number of pages"
        kept = [self._index.attached(store, known) >= 0 for store in self._index.admissions]
        assert np.array_equal(blocks.kept[known], np.any([known < 0, *kept], axis=0)), "kept: not in a store that wears"
        assert (blocks.places[known] + blocks.family[known] > 0).all(), (
            "a block without page and family is still in the table"
        )
        assert (blocks.parent[known[blocks.places[known] == 0]] < 0).all(), (
            "a block without page holds on to its parent"
        )

    def _check_states(self, tier: Pages) -> None:
        place, states = tier.place[: tier.top], tier.state[: tier.top]
        live = np.flatnonzero(place >= 0)
        assert (states[place < 0] == PageState.FREE).all(), f"{tier.spec.name}: a page outside segments is in use"
        for state, name in PageState.names().items():
            pages = live[states[live] == state]
            assert tier.counts[state] == len(pages), f"{tier.spec.name}: count of {name} pages"
            assert tier.bytes_in[state] == tier.class_bytes(pages).sum(), f"{tier.spec.name}: bytes of {name} pages"
        whole = sum(s.pages * s.key.class_bytes for s in tier.segments if s is not None)
        assert sum(tier.bytes_in) == whole, f"{tier.spec.name}: the states do not add up to the segments"
        assert tier.used_bytes <= tier.spec.capacity_bytes, f"{tier.spec.name}: more in use than its capacity"
        free = np.flatnonzero(states == PageState.FREE)
        for name in ("pins", "doom", "flags", "length", "error"):
            assert not getattr(tier, name)[free].any(), f"{tier.spec.name}: a free page has {name}"
        assert (tier.block[free] == -1).all(), f"{tier.spec.name}: a free page has a block"

    def _check_segments(self, tier: Pages) -> None:
        vacant = {place for place, segment in enumerate(tier.segments) if segment is None}
        assert vacant == tier.vacant | tier.barred | tier.closed, f"{tier.spec.name}: vacant places"
        assert not (tier.vacant | tier.barred) & tier.closed and tier.closing <= tier.failing, "closed places"
        assert tier.holders.keys() <= set(tier.last_id), f"{tier.spec.name}: holders of segments that are gone"
        assert not tier.spots.keys() & tier.closed, f"{tier.spec.name}: bad bytes of memory that is gone"
        empty = {place for place, s in enumerate(tier.segments) if s is not None and s.spare == s.pages}
        empty = set(tier.idle) if tier.is_loading else empty
        assert set(tier.idle) == empty, f"{tier.spec.name}: idle places are not those of the empty segments"
        spans = []
        for place, segment in enumerate(tier.segments):
            if segment is None:
                continue
            span = tier.pages_of(place)
            spans.append((span.start, span.stop))
            free = np.flatnonzero(tier.state[span] == PageState.FREE)
            assert segment.spare == len(free), f"{tier.spec.name}: spare pages of segment {segment.id}"
            assert not len(free) or segment.low <= free[0], (
                f"{tier.spec.name}: lowest free page of segment {segment.id}"
            )
            is_open = place in tier.open_places(segment.key)
            assert is_open == (segment.spare > 0), f"{tier.spec.name}: segment {segment.id} among the open ones"
            is_lost = (
                place in empty and segment.key.writer not in {SEALED, *self._sessions.domains} and not segment.is_own
            )
            assert not is_lost, f"{tier.spec.name}: segment {segment.id} is empty and not in the pool"
            assert segment.pages * segment.key.class_bytes <= tier.spec.segment_bytes, "a segment is over-full"
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "page ids of two segments overlap"
        # A quarantined page has no handles. If quarantined from a segment's beginning, it never had
        # a generation.
        used = tier.generation[: tier.top][~np.isin(tier.state[: tier.top], (PageState.FREE, PageState.QUARANTINED))]
        assert len(np.unique(used)) == len(used), f"{tier.spec.name}: a generation is used twice"
        assert (used < self._index.generation).all(), f"{tier.spec.name}: a generation above the last one"
        self._check_places(tier)

    def _check_places(self, tier: Pages) -> None:
        used = [(s.first, s.key.writer, last) for s, last in zip(tier.segments, tier.last_writer, strict=True) if s]
        firsts = np.array([first for first, _, _ in used], np.int64)
        sealed = [writer == SEALED or (writer == DAEMON and last != DAEMON) for _, writer, last in used]
        assert tier.is_sealed(firsts).tolist() == sealed, f"{tier.spec.name}: the marks of sealed segments are wrong"
        nobodys = [writer == NOBODY for _, writer, _ in used]
        assert tier.is_nobodys(firsts).tolist() == nobodys, f"{tier.spec.name}: the marks of unowned segments are wrong"
        assert np.array_equal(tier.find(tier.extents(firsts)), firsts), (
            f"{tier.spec.name}: pages are not found by extent"
        )

    def _check_quarantine(self, tier: Pages) -> None:
        pages = np.flatnonzero(tier.state[: tier.top] == PageState.QUARANTINED)
        assert sorted(tier.quarantine) == pages.tolist(), f"{tier.spec.name}: the list of the quarantined pages"
        assert (tier.block[pages] == -1).all(), f"{tier.spec.name}: a quarantined page has a block"
        for name in ("pins", "doom", "flags", "length", "error"):
            assert not getattr(tier, name)[pages].any(), f"{tier.spec.name}: a quarantined page has {name}"
        assert tier.quarantined_bytes <= tier.quarantine_bytes, f"{tier.spec.name}: more in quarantine than its bound"
        faulty = np.flatnonzero(tier.fault[: tier.top])
        assert (tier.doom[faulty] == Reason.CORRUPTED).all(), f"{tier.spec.name}: a fault without a condemned page"

    def _check_pins(self, tier: Pages) -> None:
        pins = np.zeros(tier.top, np.int64)
        for tiers, pages in self._inflight.pages():
            np.add.at(pins, pages[tiers == tier.position], 1)
        for lease in self._sessions.leases.values():
            np.add.at(pins, lease.pages_in(tier.position), 1)
        assert np.array_equal(pins, tier.pins[: tier.top]), f"{tier.spec.name}: pins do not match leases and transfers"
        reserved = np.zeros(tier.top, bool)
        reserved[self._reserved(tier.position)] = True
        for tiers, pages in self._inflight.pages()[1:]:
            reserved[pages[tiers == tier.position]] = True
        late = tier.doom[: tier.top] > 0
        assert (reserved | late | (tier.state[: tier.top] != PageState.RESERVED)).all(), (
            f"{tier.spec.name}: a reserved page has no owner"
        )

    def _reserved(self, tier: int) -> Ids:
        """Pages of reservations in a tier, each once."""
        held = {r.id: r for s in self._sessions.open.values() for r in s.reservations.values()}
        assert self._sessions.ahead_bytes == sum(r.ahead_bytes for r in held.values()), (
            "bytes reserved ahead do not match the reservations"
        )
        held |= {commit.reservation.id: commit.reservation for commit in self._sessions.commits.values()}
        parts = [r.pages_in(tier, true_rows((r.state == OPEN) | (r.state == BUSY))) for r in held.values()]
        pages = np.concatenate([np.zeros(0, np.int64), *parts])
        assert len(np.unique(pages)) == len(pages), "a page is in two reservations"
        assert (self._index.tiers[tier].state[pages] == PageState.RESERVED).all(), (
            "a reservation has a page that is not reserved"
        )
        return pages

    def _check_attachments(self, tier: Pages) -> None:
        table = self._index.page[tier.position][: self._index.blocks.top]
        blocks = np.flatnonzero(table >= 0)
        pages = table[blocks]
        assert (tier.block[pages] == blocks).all(), f"{tier.spec.name}: a block points to a page of another"
        assert not tier.doom[pages].any(), f"{tier.spec.name}: a doomed page is attached"
        owned = np.flatnonzero((tier.block[: tier.top] >= 0) & (tier.doom[: tier.top] == 0))
        assert np.array_equal(np.sort(pages), owned), f"{tier.spec.name}: a page has a block that does not list it"
        assert (tier.pins[tier.doom > 0] > 0)[tier.block[tier.doom > 0] >= 0].all(), "a doomed page that nothing pins"
        forgotten = self._index.blocks.forgotten[blocks]
        visible = self._index.blocks.named[blocks] | forgotten
        assert visible.all(), f"{tier.spec.name}: a block that cannot be named has an attached page"
        filling = tier.state[pages] == PageState.RESERVED
        assert not (filling & forgotten).any(), f"{tier.spec.name}: a forgotten block is in a transfer"
        fillers = self._inflight.fillers(tier.position, pages)
        assert (fillers > 0)[filling].all() and not fillers[~filling].any(), (
            "a page does not match the transfer that fills it"
        )

    def _check_policy(self, tier: Pages) -> None:
        index, t, top = self._index, tier.position, self._index.blocks.top
        table = index.page[t][:top]
        state = np.zeros(len(table), np.uint8)
        state[table >= 0] = tier.state[table[table >= 0]]
        tracked = (table >= 0) & (state < PageState.RETIRING)
        assert len(index.policies[t]) == np.count_nonzero(tracked), (
            f"{tier.spec.name}: the policy tracks another number of blocks"
        )
        if isinstance(change := index.policies[t], Handover):
            given = np.flatnonzero(change.given)
            assert len(change.new) == len(given) and tracked[given].all(), f"{tier.spec.name}: the new policy's blocks"
        pins = np.zeros(len(table), np.int64)
        pins[table >= 0] = tier.pins[table[table >= 0]]
        free = tracked & (pins == 0) & ~index.blocks.pinned[:top]
        assert np.array_equal(index.held[t][:top], ~free), f"{tier.spec.name}: the held blocks are wrong"
        parents = index.blocks.parent[:top][tracked]
        children = np.bincount(parents[parents >= 0], minlength=len(table))
        assert np.array_equal(children, index.children[t][:top]), f"{tier.spec.name}: counts of children"
        barred = ~free | ((children > 0) & ~index.blocks.lax[:top])
        assert np.array_equal(index.barred[t][:top], barred), f"{tier.spec.name}: the barred blocks are wrong"
        assert index.going[t] == np.count_nonzero(free), f"{tier.spec.name}: the count of evictable blocks is wrong"
        assert index.tips[t] == np.count_nonzero(~barred), (
            f"{tier.spec.name}: the count of evictable leaf blocks is wrong"
        )

    def _check_shares(self) -> None:
        sessions = self._sessions
        assert set(sessions.domains) == set(sessions.open), "domains of sessions"
        owned = {lease for session in sessions.open.values() for lease in session.leases}
        assert owned == set(sessions.leases), "a lease without a session, or a session without its lease"
        for session in sessions.open.values():
            for tier, pages_of in enumerate(self._index.tiers):
                pins: Counter[int] = Counter()
                for lease in session.leases.values():
                    pins.update(lease.pages_in(tier).tolist())
                assert pins == session.pinned[tier], f"session {session.id}: its pins in {pages_of.spec.name}"
                size = int(pages_of.class_bytes(np.asarray(list(pins), np.int64)).sum())
                assert size == session.pinned_bytes[tier], f"session {session.id}: pinned bytes in {pages_of.spec.name}"
                reserved = self._reserved_bytes(session.id, tier)
                assert reserved == session.reserved_bytes[tier], (
                    f"session {session.id}: reserved bytes in {pages_of.spec.name}"
                )
                assert size + reserved <= sessions.limits[tier], (
                    f"session {session.id}: beyond its share of {pages_of.spec.name}"
                )

    def _reserved_bytes(self, session: int, tier: int) -> int:
        held = {id(r): r for r in self._sessions.open[session].reservations.values()}
        for commit in self._sessions.commits.values():
            if commit.reservation.session == session:
                held[id(commit.reservation)] = commit.reservation
        pages = [r.pages_in(tier, true_rows(r.state != GONE)) for r in held.values()]
        return int(sum(self._index.tiers[tier].class_bytes(part).sum() for part in pages))
