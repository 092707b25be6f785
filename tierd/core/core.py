"""Core: every decision of the cache, as one pure object.

It decides which pages hold which blocks, which sessions pin them, and which are copied or evicted.
Each decision is returned as a `Plan`. It touches no bytes, sockets, files, asyncio or clock. Each
method is one atomic step and returns with every invariant true (see `check`).

Times `now` are float seconds, monotonic, given by the caller. Blocks are dense int64 ids; pages are
dense ids per tier. "tier" is a position in the tier list, near to far. The same calls give the same
answers.

Errors: InvalidArgument for impossible values, NotFound for an unknown session, lease, reservation
or transfer. A miss, no room and a shorter prefix are answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.audit import Audit
from tierd.core.formats.model import (
    DAEMON,
    HASH_BYTES,
    Fault,
    Reason,
    SegmentAssignment,
    StructArray,
    TierKind,
    TierSpec,
    Wanted,
)
from tierd.core.forms import Forms, Plain
from tierd.core.index.blocks import Names, words
from tierd.core.index.index import Index
from tierd.core.index.policies import Policies
from tierd.core.plan import (
    UNLIMITED,
    Acquisition,
    Allowance,
    Bools,
    Bytes,
    Codes,
    Committed,
    Committing,
    CoreStats,
    Forgotten,
    GroupQuery,
    Ids,
    LookupResult,
    PagesHeld,
    Plan,
    PutQuery,
    Question,
    Reserved,
    ReservedAhead,
    Restored,
    Served,
    SessionStats,
    Start,
    TierStats,
    TransferIds,
)
from tierd.core.plan_builder import PlanBuilder
from tierd.core.reports.listing import Listing
from tierd.core.requests.attention import Attention
from tierd.core.requests.commits import Commits
from tierd.core.requests.gets import NO_TIERS, Gets, Tiers
from tierd.core.requests.leases import Holders
from tierd.core.requests.puts import Puts
from tierd.core.requests.reserved_pages import ReservedPages
from tierd.core.space.demotion import Demotion
from tierd.core.space.planner import Planner
from tierd.core.space.room import Room
from tierd.core.tuning import Tuning
from tierd.core.upkeep import Upkeep
from tierd.errors import InvalidArgument


class Core:
    """The state of one daemon. See the module for times and ids."""

    piece_blocks = 1 << 12
    """Block ids per piece of `pieces`. A simulation, which has few, takes fewer."""

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        policies: Policies,
        session_share: float = 0.5,
        start: Start = Start(),  # noqa: B008  # frozen
        forms: Forms = Plain(),  # noqa: B008  # it has no state
    ) -> None:
        """tiers: near to far, at most 64. start: where numbers begin.

        session_share: the share of a tier's capacity that one session may pin and reserve at most.
        forms: which blocks stores keep encoded.
        Raises ConfigError, InvalidArgument.
        """
        self._index = Index(tiers, policies=policies, start=start, forms=forms)
        self._sessions = Holders(self._index.tiers, share=session_share, first_id=start.id)
        self.next_id = self._sessions.next_id
        """A number for a prefetch; never used twice, as those of leases."""
        room = Room(self._index, first_segment=start.segment, domains=self._sessions.domains)
        self._planner = Planner(self._index, room)
        self._demotion = Demotion(self._planner)
        self._gets = Gets(self._planner, self._sessions)
        self._attention = Attention(self._index)
        reserved_pages = ReservedPages(self._index, self._sessions)
        self._puts = Puts(self._planner, self._sessions, reserved_pages)
        self._commits = Commits(self._index, self._sessions, self._gets, reserved_pages, dead=self._puts.dead)
        self._upkeep = Upkeep(self._planner, self._sessions, self._gets, self._puts)
        self._listing = Listing(self._index, self._sessions, self._planner.inflight)
        self.tuning = Tuning(self._index, self._sessions, self._demotion, policies)
        """Changes of specs, policies and shares while it runs."""

    # -- sessions

    def open_session(self, session: int, *, domain: int) -> None:
        """Opens a session; ids (above 0) are used once. It shares blocks within its domain."""
        if session <= 0 or session in self._sessions.open:
            raise InvalidArgument(
                f"session {session}: not above 0, or open already; give every session an id of its own"
            )
        self._sessions.begin(session, domain)

    def end_session(self, session: int, now: float, *, into: int = DAEMON) -> Plan:
        """Ends a session whose process is gone: its leases and reservations end. Idempotent.

        The daemon takes over its segments. Pages in a commit keep their state until finish_commit.
        into: the process lives, and this session of it takes over mappings and segments. Raises
        NotFound, InvalidArgument about it.
        """
        draft = PlanBuilder(now)
        self._upkeep.end_session(session, into, draft)
        return draft.plan()

    def note_attached(self, session: int, *, tier: int, segment: int) -> None:
        """The session got the segment's descriptor (writable if it is the segment's writer)."""
        self._upkeep.note_attached(session, tier, segment)

    def restore(self, session: int, *, pinned: StructArray, reserved: StructArray, now: float) -> Restored:
        """After adopt: restores pages that an open session held under the previous daemon. pinned,
        reserved: EXTENT (tier, segment, slot, generation are read). Pages that differ are left out;
        Restored says which were taken."""
        return self._upkeep.restore(self._sessions.get(session), pinned=pinned, reserved=reserved)

    # -- gets

    def lookup(self, groups: Sequence[GroupQuery], now: float) -> LookupResult:
        """How many tokens could be served, and from which tiers. Changes nothing."""
        return self._gets.lookup(groups)

    def acquire(
        self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, shut: Tiers = NO_TIERS
    ) -> Acquisition:
        """Pins the longest prefix that tiers of `kind` (or that tier) can get, and plans its
        transfers. shut: tiers that are not read from."""
        return self._gets.acquire(session, groups=groups, kind=kind, now=now, shut=shut)

    def used(self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float) -> LookupResult:
        """A session copied known blocks without a lease: policies count the use. Returns the
        servable part; pins and plans nothing."""
        return self._gets.used(session, groups=groups, kind=kind, now=now)

    def acquire_again(self, session: int, question: Question, *, now: float, shut: Tiers = NO_TIERS) -> Acquisition:
        """Repeats an acquisition whose lease was just released. Policies do not count it twice."""
        return self._gets.acquire_again(session, question, now=now, shut=shut)

    def settle(self, lease: int, *, now: float, early: bool = False) -> Served:
        """Call after the acquisition's transfers and waits finished. Returns the servable part and
        unpins the rest. Transfers still in flight count as failed. A second call answers the same,
        less condemned pages. early: before; returns what is promised, and unpins nothing."""
        return self._gets.promised(lease) if early else self._gets.settle(lease, now=now)

    def release(self, session: int, *, leases: Sequence[int], now: float) -> Plan:
        """Ends leases of the session; ignores unknown ones. May be called before settle."""
        draft, holder = PlanBuilder(now), self._sessions.get(session)
        theirs = [holder.leases[number] for number in dict.fromkeys(leases) if number in holder.leases]
        self._gets.let_go(holder, theirs, draft)
        return draft.plan()

    def share_bytes(self, kind: TierKind) -> int:
        """Most bytes that a session may pin and reserve in the tiers of a kind."""
        tiers = self._index.tiers
        return sum(limit for tier, limit in zip(tiers, self._sessions.limits, strict=True) if tier.spec.kind == kind)

    def report_attention(self, session: int, *, lease: int, group: int, mass: NDArray[np.float32], now: float) -> None:
        """Adds attention mass of kernels to the blocks of a lease's group: float32 [ranks *
        blocks], rank-major. Policies count a use. Raises NotFound, InvalidArgument."""
        self._attention.report(self._sessions.get(session), lease=lease, group=group, mass=mass, now=now)

    def prefetch(
        self, session: int, *, groups: Sequence[GroupQuery], kind: Wanted, now: float, allowance: Allowance = UNLIMITED
    ) -> Plan:
        """Plans transfers that bring near what the allowance permits of the servable part; no pins."""
        return self._gets.prefetch(session, groups=groups, kind=kind, now=now, allowance=allowance)

    def keep(self, session: int, blocks: Ids, kind: Wanted) -> int:
        """A lease on the near pages of blocks; 0: there are none, or they exceed the session's share."""
        return self._gets.keep(self._sessions.get(session), blocks, kind)

    # -- puts

    def reserve(self, session: int, *, groups: Sequence[PutQuery], kind: Wanted, now: float) -> Reserved:
        """Reserves pages for the session to write."""
        return self._puts.reserve(session, groups=groups, kind=kind, now=now)

    def reserve_ahead(self, session: int, *, group: PutQuery, puts: int, kind: Wanted, now: float) -> ReservedAhead:
        """Reserves private pages for up to so many expected puts like the group. Fewer or none, if
        all such pages would exceed a small part of the tiers."""
        return self._puts.reserve_ahead(session, group=group, puts=puts, kind=kind, now=now)

    def begin_commit(self, session: int, *, reservation: int, blocks: StructArray | None, now: float) -> Committing:
        """Marks pages busy for hashing. blocks: COMMIT_BLOCK [n], or None for every reserved block
        under its name in reserve. Private pages must be named.

        NotFound: no such reservation of this session. InvalidArgument: an index twice, out of range
        or busy; longer than reserved; unnamed.
        """
        return self._puts.begin_commit(session, reservation=reservation, blocks=blocks)

    def finish_commit(
        self, committing: Committing, *, digests: Bytes, ok: Bools, lease: bool, keep_open: bool, now: float
    ) -> Committed:
        """Publishes all blocks of a commit, or none: if any is not ok, all are FAILED. With
        keep_open their pages then stay in the reservation.

        digests: uint8 [n, 16]. If a block is held already, its status is EXISTS: its new page is
        freed, and the answer is the existing page. Without keep_open the reservation's other pages
        are freed too, unless a commit of them is in progress. If the session has ended, blocks are
        published without a lease.
        """
        return self._commits.finish(committing, digests=digests, ok=ok, lease=lease, keep_open=keep_open, now=now)

    def withdraw_commit(self, committing: Committing, *, now: float) -> Plan:
        """Undoes begin_commit. The pages stay the session's, since it may still write to them; if
        the reservation has ended, they are freed."""
        digests, ok = np.zeros((len(committing.indices), 16), np.uint8), np.zeros(len(committing.indices), bool)
        return self.finish_commit(committing, digests=digests, ok=ok, lease=False, keep_open=True, now=now).plan

    def abort(self, session: int, *, reservation: int, now: float) -> Plan:
        """Frees a reservation's pages (busy ones at finish_commit). Ignores unknown ones."""
        draft = PlanBuilder(now)
        self._puts.abort(self._sessions.get(session), reservation, reason=Reason.ABORTED, draft=draft)
        return draft.plan()

    # -- in the background

    def persist(self, blocks: Ids, *, now: float) -> Plan:
        """Transfers to NVMe for those blocks without a page there; waits for those in flight."""
        draft = PlanBuilder(now)
        self._planner.persist(self._upkeep.live(blocks), draft=draft)
        return draft.plan()

    def demote(self, now: float, *, limit: int = 512) -> Plan:
        """Plans writes of the coldest blocks above high watermarks: `limit` or 256 MiB a tier at most."""
        draft = PlanBuilder(now)
        self._demotion.run(limit, draft)
        return draft.plan()

    def finish(self, transfers: TransferIds, *, statuses: Codes, now: float, metas: StructArray | None = None) -> Plan:
        """Transfers ended: uint64 [n], BlockStatus [n]. CORRUPT condemns the source page too. After
        NO_ROOM, an encoding longer than its page, stores get the block as it is. metas: META [n] of
        the copies, if one was encoded or decoded."""
        draft = PlanBuilder(now)
        self._planner.finish(transfers, statuses, metas, draft=draft)
        return draft.plan()

    def verified(self, extents: StructArray) -> None:
        """The pages' bytes match their digests: clears UNVERIFIED if the generation still holds."""
        self._upkeep.verified(extents)

    def condemn(self, extents: StructArray, *, now: float, fault: Fault = Fault.READ) -> Plan:
        """Condemns pages with wrong bytes: no lookup finds them again. Once unpinned, they are in
        the plan's `freed` and quarantined."""
        draft = PlanBuilder(now)
        self._upkeep.condemn(extents, fault, draft)
        return draft.plan()

    def lose(self, extents: StructArray, *, now: float) -> Plan:
        """Drops sound pages whose contents were lost: EXTENT [n]. No lookup finds them again; they are
        freed once unpinned. A transfer in flight to one publishes nothing. Others are left out."""
        draft = PlanBuilder(now)
        self._upkeep.lose(extents, draft)
        return draft.plan()

    # -- at start, and for operators

    def adopt(
        self, tier: int, *, segments: Sequence[SegmentAssignment], extents: StructArray, metas: StructArray, now: float
    ) -> Bools:
        """Takes in the blocks that survived on a tier. extents: EXTENT [n] (page is ignored);
        metas: META [n], from cold to hot. Returns bool [n]: which were taken.

        The order of tiers does not matter; a block on several tiers is one block. Refused: a page
        outside the segments, a page or block given twice, a digest that contradicts another tier's.
        """
        return self._upkeep.adopt(tier, segments=segments, extents=extents, metas=metas, now=now)

    def expect(self, blocks: int) -> None:
        """Makes room at once for so many blocks to adopt."""
        self._index.blocks.expect(blocks)

    def begin_loading(self, tier: int) -> None:
        """More blocks of the tier will be adopted while requests run. Until `close_empty` it gives
        up no segment."""
        self._upkeep.begin_loading(tier)

    def close_empty(self, tier: int) -> None:
        """Call once, after every adopt and restore of a tier: vacates segments without a page in
        use. Earlier, a segment could hold nothing but pages that a session held."""
        self._upkeep.close_empty(tier)

    def forget_namespaces(self, ids: Sequence[int], *, now: float) -> Forgotten:
        """Ends namespaces: their blocks always miss, and commits into them are FAILED. Pages stay
        until `free_forgotten`, or until room is needed."""
        draft = PlanBuilder(now)
        blocks = self._upkeep.forget_namespaces(set(ids), draft)
        return Forgotten(blocks, draft.plan())

    def free_forgotten(self, blocks: Ids, *, namespaces: Sequence[int], now: float) -> Plan:
        """Frees pages of those of the blocks that were forgotten with these namespaces; pinned ones
        when released. blocks: distinct, of `pieces`."""
        draft = PlanBuilder(now)
        self._upkeep.free_forgotten(blocks, namespaces, draft)
        return draft.plan()

    def evict(self, blocks: Ids, *, tier: int | None, now: float) -> Plan:
        """Frees the blocks' pages in a tier, or in all; pinned ones stay."""
        draft = PlanBuilder(now)
        self._upkeep.evict(blocks, tier, draft)
        return draft.plan()

    def pin_blocks(self, blocks: Ids) -> int:
        """Operators' pin: the block is never evicted, demoted or dropped until unpin_blocks.
        Returns how many are newly pinned."""
        return self._upkeep.pin_blocks(blocks)

    def unpin_blocks(self, blocks: Ids) -> int:
        """Returns how many were pinned."""
        return self._upkeep.unpin_blocks(blocks)

    def set_serving(self, tier: int, serving: bool) -> None:  # noqa: FBT001
        """Out of service: lookups do not find a tier's blocks; it is no target. Frees nothing."""
        self._index.set_serving(tier, serving=serving)

    def set_writable(self, tier: int, writable: bool) -> None:  # noqa: FBT001
        """If a tier is not writable, its blocks are served but it is no target. Blocks that would
        be demoted to it are evicted."""
        self._index.tiers[tier].writable = writable

    def bar(self, tier: int, segment: int | None) -> None:
        """A new segment got no memory: it gives no page, and no place begins that never had memory.
        None: memory is available again."""
        self._upkeep.bar(tier, segment)

    def set_direct(self, tier: int, stores: frozenset[int]) -> None:
        """Sets the stores that the tier reads without host memory between; no replanning."""
        self._index.direct[tier] = stores

    def is_writable(self, tier: int) -> bool:
        """Whether the tier is in service and takes new blocks."""
        return tier in self._index.writable()

    # -- queries

    def find_block(self, namespace: int, block_hash: bytes) -> int | None:
        """The block's id; None if no tier can read it."""
        found = int(self.find_blocks(namespace, np.frombuffer(block_hash, np.uint8).reshape(1, HASH_BYTES))[0])
        return found if found >= 0 else None

    def find_blocks(self, namespace: int | Ids, hashes: Bytes) -> Ids:
        """Ids of the blocks with these hashes, uint8 [n, 32]; -1 if no tier can read one.
        namespace: of all, or of each."""
        ids = self._index.blocks.find(Names(np.full(len(hashes), namespace, np.uint32), words(hashes)))
        return np.where(self._index.nearest(ids, range(len(self._index.tiers))) >= 0, ids, -1)

    def pieces(self) -> Iterator[Ids]:
        """Every id in use, ascending, `piece_blocks` at a time; other calls may come between two
        pieces. A block keeps its id while it has a page; then another block may get it."""
        top = self._index.blocks.top
        return (np.arange(at, min(at + self.piece_blocks, top)) for at in range(0, top, self.piece_blocks))

    def find_by_prefix(self, prefix: str, *, of: Ids | None = None) -> Ids:
        """Ids of blocks whose hash begins with the hexadecimal digits. of: these ids, or all."""
        return self._listing.with_prefix(prefix, self._all if of is None else of)

    def blocks(
        self, *, tier: int | None = None, namespace: int | None = None, pinned: bool = False, of: Ids | None = None
    ) -> Ids:
        """Ids of blocks that match. of: these ids, in their order, or all, ascending."""
        return self._listing.blocks(self._all if of is None else of, tier=tier, namespace=namespace, pinned=pinned)

    def column(self, name: str, blocks: Ids) -> NDArray[Any]:
        """BLOCK_INFO's namespace, position, length, hits or last_used; ten times as fast."""
        return self._listing.column(name, blocks)

    def tier_bits(self, blocks: Ids) -> NDArray[np.uint64]:
        """The field `tiers` of BLOCK_INFO, uint64 [n]."""
        return self._listing.tier_bits(blocks)

    def describe(self, blocks: Ids) -> StructArray:
        """BLOCK_INFO [n]."""
        return self._listing.describe(blocks)

    def pages(self, block: int) -> StructArray:
        """PAGE_INFO of the block's pages, nearest first."""
        return self._listing.pages(block)

    def children(self, block: int) -> Ids:
        """Blocks whose parent it is."""
        return self._listing.children(block)

    def extents(self, blocks: Ids, *, tier: int) -> StructArray:
        """EXTENT [n] of the blocks' pages in a tier; page -1 for none."""
        return self._index.tiers[tier].extents(self._index.readable(tier, blocks))

    def unix_s(self, now: float) -> float:
        """Unix time at `now`; retentions end by it."""
        return self._index.blocks.unix_s + now

    def metas(self, blocks: Ids) -> StructArray:
        """META [n] without the fields of a page: place, generation, store and checksum."""
        return self._index.blocks.metas(blocks)

    def are_plain(self, blocks: Ids) -> Bools:
        """Which blocks stores keep as they are, because an encoding did not fit: bool [n]."""
        return self._index.blocks.plain[blocks]

    def errors(self, extents: StructArray) -> NDArray[np.float32]:
        """The error bound of the block in each page: float32 [n], of EXTENT [n]."""
        return self._listing.errors(extents)

    def names(self, blocks: Ids) -> StructArray:
        """NAME [n]: only namespace and hash, in a fifth of the time of `metas`."""
        return self._index.blocks.names(blocks)

    def segments(self, tier: int) -> list[SegmentAssignment]:
        """The segments in use."""
        pages_of = self._index.tiers[tier]
        return [pages_of.assignment(place) for place, used in enumerate(pages_of.segments) if used is not None]

    def pages_held(self, tier: int, *, after: int, limit_bytes: int) -> PagesHeld:
        """The next readable pages of a tier whose ids are above `after`: as many as limit_bytes
        hold, at least one if there is one."""
        return self._listing.pages_held(tier, after=after, limit_bytes=limit_bytes)

    def is_serving(self, tier: int) -> bool:
        """Whether the tier is in service."""
        return self._index.tiers[tier].serving

    def are_held(self, extents: StructArray) -> Bools:
        """Which pages still hold the blocks of these extents, readable. bool [n]."""
        return self._upkeep.are_held(extents)

    def quarantined(self, tier: int) -> StructArray:
        """QUARANTINED [n], the oldest first."""
        return self._listing.quarantined(tier)

    def stats(self) -> CoreStats:
        """Counts over everything."""
        return self._listing.stats()

    def used_bytes(self) -> int:
        """Bytes of pages that are not free, of all tiers. Constant time, unlike `tier_stats`."""
        return sum(pages_of.used_bytes for pages_of in self._index.tiers)

    def page_counts(self, tier: int) -> list[int]:
        """How many pages are in each PageState. Constant time."""
        return list(self._index.tiers[tier].counts)

    def tier_stats(self) -> list[TierStats]:
        """Per tier."""
        return self._listing.tiers()

    def session_stats(self) -> list[SessionStats]:
        """Per session."""
        return self._listing.sessions()

    def check(self) -> None:
        """Asserts every invariant; AssertionError names the first broken one. Slow: for tests."""
        Audit(self._index, self._sessions, self._planner.inflight).check()

    def audit(self) -> Iterator[Callable[[], None]]:
        """The steps of `check`; other calls may come between two."""
        return Audit(self._index, self._sessions, self._planner.inflight).steps()

    @property
    def _all(self) -> Ids:
        return np.arange(self._index.blocks.top)
