"""Core: every decision of the cache, as one pure object.

Purpose: the one face of the core. It decides which blocks are held where, for whom, and what must move; a decision comes back as a `Plan`. Non-purpose:
bytes, sockets, files, asyncio, the clock. Each method is one atomic step: it returns with every invariant true (see `check`).
Times `now` are float seconds, monotonic, given by the caller. Blocks are dense int64 ids; pages are dense ids per tier; "tier" is
a position in the tier list, near to far. The same calls give the same answers.

Errors: InvalidArgument for impossible values, NotFound for an unknown session, lease, reservation or transfer. A miss, no room and a shorter
prefix are answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.core.eviction import Policies
from tierd.core.model import SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import (
    Acquisition,
    Bools,
    Bytes,
    Codes,
    Committed,
    Committing,
    CoreStats,
    Found,
    GroupQuery,
    Ids,
    Plan,
    PutQuery,
    Reserved,
    Restored,
    Served,
    SessionStats,
    TierStats,
    TransferIds,
)


class Core:
    """The books of one daemon. See the module's docstring for times and ids."""

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        policies: Policies,
        session_share: float = 0.5,
        first_generation: int = 1,
        first_segment: int = 1,
    ) -> None:
        """tiers: near to far, at most 64. policies: makes the eviction policy of a tier. session_share: of a tier's capacity, the most that one session may pin and reserve.

        first_generation, first_segment: above every number that a surviving tier has used.
        """
        raise NotImplementedError

    # -- sessions

    def open_session(self, session: int, *, domain: int) -> None:
        """A session begins; ids (above 0) are never used twice. domain: what it may share segments and blocks with."""
        raise NotImplementedError

    def end_session(self, session: int, now: float) -> Plan:
        """Its process is gone: leases and reservations end, its segments become the daemon's. Pages in a commit under way stay until finish_commit. Idempotent."""
        raise NotImplementedError

    def note_attached(self, session: int, *, tier: int, segment: int) -> None:
        """The session was handed the segment's descriptor (writable if it is the segment's writer)."""
        raise NotImplementedError

    def restore(self, session: int, *, pinned: StructArray, reserved: StructArray, now: float) -> Restored:
        """After adopt: what an open session held under a former daemon. pinned, reserved: EXTENT (tier, segment, slot, generation are read).

        Pages that are not as described are left out (Restored says which were taken).
        """
        raise NotImplementedError

    # -- gets

    def lookup(self, groups: Sequence[GroupQuery], now: float) -> Found:
        """How much could be served, and from where. Changes nothing."""
        raise NotImplementedError

    def acquire(self, session: int, *, groups: Sequence[GroupQuery], kind: TierKind, now: float) -> Acquisition:
        """Pins the longest prefix that can be brought into tiers of `kind` now, and plans the transfers."""
        raise NotImplementedError

    def settle(self, lease: int, *, now: float) -> Served:
        """After the acquisition's transfers and waits finished: what is servable in fact; everything else is unpinned. Transfers still in flight count as failed.

        Called again it answers the same.
        """
        raise NotImplementedError

    def release(self, session: int, *, leases: Sequence[int], now: float) -> Plan:
        """Ends leases of the session; unknown ones are ignored (releasing twice is no fault). May be called before settle."""
        raise NotImplementedError

    def prefetch(self, session: int, *, groups: Sequence[GroupQuery], kind: TierKind, now: float) -> Plan:
        """Transfers that bring the servable part near; pins nothing beyond them."""
        raise NotImplementedError

    # -- puts

    def reserve(self, session: int, *, groups: Sequence[PutQuery], kind: TierKind, now: float) -> Reserved:
        """Sets pages aside for the session to write."""
        raise NotImplementedError

    def begin_commit(self, session: int, *, reservation: int, blocks: StructArray | None, now: float) -> Committing:
        """Marks pages busy for hashing. blocks: COMMIT_BLOCK [n], or None: every reserved block as it was named in reserve (private pages must be named).

        NotFound: no such reservation of this session. InvalidArgument: an index twice, out of range or busy; longer than reserved; unnamed.
        """
        raise NotImplementedError

    def finish_commit(
        self, committing: Committing, *, digests: Bytes, ok: Bools, lease: bool, keep_open: bool, now: float
    ) -> Committed:
        """Publishes: atomic over the blocks; if any is not ok, none is, and all are FAILED (their pages stay in the reservation if keep_open).

        digests: uint8 [n, 16]. A block that is held already is EXISTS: the own page is freed, the answer is the existing page. Without keep_open every other
        page of the reservation is freed too, unless a commit of it is under way. If the session has ended, blocks are published but no lease is made.
        """
        raise NotImplementedError

    def abort(self, session: int, *, reservation: int, now: float) -> Plan:
        """Frees a reservation's pages (busy ones at their finish_commit). Unknown: nothing happens."""
        raise NotImplementedError

    # -- in the background

    def persist(self, blocks: Ids, *, now: float) -> Plan:
        """Transfers to NVMe for those of the blocks without a page there; waits for those already on their way."""
        raise NotImplementedError

    def demote(self, now: float, *, limit: int = 64) -> Plan:
        """What wants to move now: at most `limit` victims of tiers above their high watermark. Empty when content."""
        raise NotImplementedError

    def finish(self, transfers: TransferIds, *, statuses: Codes, now: float) -> Plan:
        """Transfers ended. transfers: uint64 [n]; statuses: uint16 [n] BlockStatus READY, FAILED or CORRUPT (condemns the source page too)."""
        raise NotImplementedError

    def verified(self, extents: StructArray) -> None:
        """The pages' bytes were checked and are as committed: clears UNVERIFIED where the generation still holds."""
        raise NotImplementedError

    def condemn(self, extents: StructArray, *, now: float) -> Plan:
        """The pages' bytes are wrong: never found again, freed as soon as nobody pins them."""
        raise NotImplementedError

    # -- at start, and for operators

    def adopt(
        self, tier: int, *, segments: Sequence[SegmentAssignment], extents: StructArray, metas: StructArray, now: float
    ) -> Bools:
        """Takes in what survived on a tier. extents: EXTENT [n] (page is ignored), metas: META [n]; order is from cold to hot. bool [n]: which were taken.

        Call with the nearest tier's first or last, as you like; a block on several tiers is one block. Refused: a place outside the segments, twice the same
        place or block, a digest that contradicts another tier's.
        """
        raise NotImplementedError

    def forget_namespaces(self, ids: Sequence[int], *, now: float) -> Plan:
        """Nothing in them is found again; pinned pages are freed when they are released. Commits under way into them are FAILED."""
        raise NotImplementedError

    def evict(self, blocks: Ids, *, tier: int | None, now: float) -> Plan:
        """Frees pages of the blocks in a tier, or in all; pinned ones stay."""
        raise NotImplementedError

    def pin_blocks(self, blocks: Ids) -> int:
        """Operators' pin: never evicted, demoted or dropped for room until unpin_blocks. How many are pinned that were not."""
        raise NotImplementedError

    def unpin_blocks(self, blocks: Ids) -> int:
        """How many were pinned."""
        raise NotImplementedError

    def drop_tier(self, tier: int, now: float) -> Plan:
        """The tier is lost: out of service, all its pages freed; pinned ones are never found again and freed when released."""
        raise NotImplementedError

    def set_serving(self, tier: int, serving: bool) -> None:
        """Out of service: a tier's blocks are not found and it is no target; nothing of it is freed."""
        raise NotImplementedError

    # -- what is held

    def find_block(self, namespace: int, block_hash: bytes) -> int | None:
        """The block's id."""
        raise NotImplementedError

    def find_by_prefix(self, prefix: str) -> Ids:
        """Ids of blocks whose hash begins with the hexadecimal digits."""
        raise NotImplementedError

    def blocks(self, *, tier: int | None = None, namespace: int | None = None, pinned: bool = False) -> Ids:
        """Ids of all blocks that match, ascending."""
        raise NotImplementedError

    def describe(self, blocks: Ids) -> StructArray:
        """BLOCK_INFO [n]."""
        raise NotImplementedError

    def pages(self, block: int) -> StructArray:
        """PAGE_INFO of the block's pages, nearest first."""
        raise NotImplementedError

    def children(self, block: int) -> Ids:
        """Blocks that follow it."""
        raise NotImplementedError

    def extents(self, blocks: Ids, *, tier: int) -> StructArray:
        """EXTENT [n] of the blocks' pages in a tier; page -1 where there is none."""
        raise NotImplementedError

    def metas(self, blocks: Ids) -> StructArray:
        """META [n]: everything but place, generation, store and checksum, which are a page's."""
        raise NotImplementedError

    def segments(self, tier: int) -> list[SegmentAssignment]:
        """The segments in use."""
        raise NotImplementedError

    def stats(self) -> CoreStats:
        """Counts over everything."""
        raise NotImplementedError

    def tier_stats(self) -> list[TierStats]:
        """Per tier."""
        raise NotImplementedError

    def session_stats(self) -> list[SessionStats]:
        """Per session."""
        raise NotImplementedError

    def check(self) -> None:
        """Asserts every invariant; AssertionError names the first that is broken. Slow: for tests and `tierd check`."""
        raise NotImplementedError
