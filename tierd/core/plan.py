"""Questions to the core, and its answers, as values.

No decisions. The caller may keep every array (never a view of the core's columns). Arrays over
blocks have the order of the question.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import every, true_rows
from tierd.core.formats.model import (
    EXTENT,
    FREED,
    HASH_BYTES,
    NO_PAGE,
    TRANSFER,
    BlockStatus,
    Need,
    SegmentAssignment,
    StructArray,
    TierKind,
    Wanted,
)

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.uint16]
Ids = NDArray[np.int64]
Lengths = NDArray[np.uint32]
TransferIds = NDArray[np.uint64]


ID_LIMIT = 1 << 63
"""The first lease, reservation or commit number is at most this. So more numbers are left below 8
bytes than any daemon can give."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first numbers of a core.

    generation, segment: above every number that a surviving tier has used.
    id: of leases and reservations; far from those of previous runs, so that a late release frees
    nothing of another session.
    seed: of the table of names, secret, so that no client can make up names that slow it down. No
    answer depends on it.
    unix_s: Unix time when `now` is 0; retentions end by it.
    """

    generation: int = 1
    segment: int = 1
    id: int = 1
    seed: int = 0
    unix_s: float = 0.0


# -- questions


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """One attention group of a sequence.

    namespaces: one id per rank. hashes: uint8 [blocks, 32]. need_tokens: for Need.LAST_TOKENS.
    tokens: covered by all the blocks; if no multiple of tokens_per_block, the last block is short.
    error_limit: blocks with a greater error bound miss. 0.0: exact blocks alone.
    request: the engine's id; no answer depends on it.
    """

    namespaces: tuple[int, ...]
    hashes: Bytes
    tokens_per_block: int
    tokens: int
    need: Need = Need.PREFIX
    need_tokens: int = 0
    error_limit: float = 0.0
    request: bytes = b""


@dataclass(frozen=True, slots=True)
class PutQuery:
    """Consecutive blocks of one rank to write. blocks: PUT_BLOCK [n]; a hash of zeros asks for a
    private page.

    parent: hash of the block before the first (ROOT at the start). position: of the first.
    priorities: uint8 [n], 0 to PRIORITY_LIMIT; None: none. retention_s: uint32 [n], 0: for good.
    """

    namespace: int
    parent: bytes
    position: int
    blocks: StructArray
    priorities: Bytes | None = None
    retention_s: Lengths | None = None


# -- actions for the caller

NONE_FREED, NO_EXTENTS, NO_TRANSFERS = np.zeros(0, FREED), np.zeros(0, EXTENT), np.zeros(0, TRANSFER)
NO_WAITS: TransferIds = np.zeros(0, np.uint64)


@dataclass(slots=True)
class Plan:
    """Actions for the caller, decided together. Apply in this order: retired, freed, segments,
    reserved; then run the transfers.

    retired: EXTENT, pages that only sessions with a lease may read; their last release frees them.
    freed: FREED, pages that have become free; their contents must not be served any more.
    segments: segments that begin.
    reserved: EXTENT, newly reserved pages with their new generations (stamp them before any write).
    transfers: TRANSFER in starting order. One with `after` waits for that transfer to succeed, and
    fails with it. Each must come back through `Core.finish`.
    waits: uint64 ids of transfers of earlier plans that the caller depends on.
    is_short: the allowance of a prefetch was less than its blocks needed.
    A page may be in freed (old generation) and in reserved (new one) of the same plan.
    """

    freed: StructArray = field(default_factory=lambda: NONE_FREED)
    segments: list[SegmentAssignment] = field(default_factory=list)
    reserved: StructArray = field(default_factory=lambda: NO_EXTENTS)
    transfers: StructArray = field(default_factory=lambda: NO_TRANSFERS)
    waits: TransferIds = field(default_factory=lambda: NO_WAITS)
    retired: StructArray = field(default_factory=lambda: NO_EXTENTS)
    is_short: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing to do and nothing to wait for."""
        freed = len(self.freed) or len(self.retired)
        return not (freed or self.segments or len(self.reserved) or len(self.transfers) or len(self.waits))


# -- answers


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer of a lookup.

    tokens: servable for every group and rank, from any tiers.
    tier_of: per group int8 [ranks, blocks], nearest serving tier that holds the block, -1 for none.
    tier_tokens: per tier, tokens of the first group's needed blocks (first rank) nearest in it.
    prefetch: number of the prefetch that the lookup began; 0: none.
    """

    tokens: int
    tier_of: list[NDArray[np.int8]]
    tier_tokens: list[int]
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of a prefetch.

    shut: positions of tiers that are not read from. bytes: that it may bring; None: no limit.
    """

    shut: frozenset[int] = frozenset()
    bytes: int | None = None


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True)
class Question:
    """An acquisition's query, and the blocks whose use it counted."""

    groups: tuple[GroupQuery, ...] = ()
    kind: Wanted = TierKind.HOST
    used: tuple[Ids, ...] = ()


@dataclass(frozen=True, slots=True)
class Acquisition:
    """A lease in the making. Run the plan's transfers, await its waits, then `settle` (even if
    there is nothing to run).

    lease: 0 if nothing can be served; the plan is then empty, or has transfers planned on the way.
    tokens: servable if every transfer succeeds. tier_tokens: as in LookupResult.
    question: to repeat.
    whole: False if more is held than could be brought near now. shut: shut tiers hold blocks.
    served: the answer of `settle`, if there is nothing to wait for.
    nearest: int8 [blocks], tier of each block of the first group (first rank); -1: none.
    """

    lease: int
    tokens: int
    tier_tokens: list[int]
    plan: Plan
    whole: bool
    shut: bool = False
    question: Question = Question()
    served: Served | None = None
    nearest: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """The blocks of one group that a lease holds: numbers first to first + count - 1 of the group's
    hashes. extents: EXTENT [ranks, count]. tokens: uint32 [count]. blocks: int64 [ranks, count],
    ids."""

    first: int
    count: int
    extents: StructArray
    tokens: Lengths
    blocks: Ids


@dataclass(frozen=True, slots=True)
class Served:
    """A settled lease. tokens == 0: it holds nothing, has ended and needs no release.

    pending: bool [n], extents that transfers still fill; None: all can be read.
    """

    tokens: int
    groups: list[ServedGroup]
    plan: Plan
    pending: Bools | None = None

    @property
    def extents(self) -> StructArray:
        """EXTENT [n] of all blocks of the lease, one group after another."""
        parts = [group.extents.reshape(-1) for group in self.groups]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_EXTENTS

    @property
    def blocks(self) -> Ids:
        """The block of each extent: int64 [n]."""
        parts = [group.blocks.reshape(-1) for group in self.groups]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass(frozen=True, slots=True)
class Reserved:
    """reservation: 0 if no page was reserved. statuses: per query uint16 [n] BlockStatus: RESERVED,
    EXISTS or NO_ROOM.

    extents: per query EXTENT [n]: the page to write; for EXISTS the block's nearest page; for
    NO_ROOM zeros with page -1. COMMIT_BLOCK.index counts blocks over all queries in order.
    """

    reservation: int
    statuses: list[Codes]
    extents: list[StructArray]
    plan: Plan

    def without_pages(self) -> Reserved:
        """The answer if the pages got no memory: NO_ROOM."""
        for extents, statuses in zip(self.extents, self.statuses, strict=True):
            given = statuses == BlockStatus.RESERVED
            extents[given], statuses[given] = np.zeros(1, EXTENT), BlockStatus.NO_ROOM
            extents["page"][given] = NO_PAGE
        return replace(self, reservation=0)

    @property
    def rows(self) -> Ids:
        """Indices, over all queries, of blocks whose pages the caller writes."""
        return true_rows(np.concatenate(self.statuses) == BlockStatus.RESERVED)

    @property
    def pages(self) -> StructArray:
        """EXTENT of those pages."""
        given = [
            e if every(is_given := s == BlockStatus.RESERVED) else e[is_given]
            for e, s in zip(self.extents, self.statuses, strict=True)
        ]
        return given[0] if len(given) == 1 else np.concatenate([NO_EXTENTS, *given])


@dataclass(frozen=True, slots=True)
class ReservedAhead:
    """Pages for expected puts. reservations: one number per put with pages; extents: EXTENT
    [reservations, blocks]."""

    reservations: list[int]
    extents: StructArray
    plan: Plan


@dataclass(frozen=True, slots=True)
class Committing:
    """Pages between begin_commit and finish_commit: written by the client, hashed by the caller.

    They stay reserved until finish_commit, even if the session ends. extents: EXTENT [n], length =
    committed length.
    metas: META [n] with names, lengths, place, generation. The caller fills in epoch, time_ms,
    codec and slices, which finish_commit stores. lengths: uint32 [n]. indices: uint32 [n], places
    in the reservation.
    staging: EXTENT [n], the page that the client wrote, to be copied into the block's page before
    hashing. Page -1 if the client wrote the block's own page.
    """

    id: int
    session: int
    reservation: int
    extents: StructArray
    metas: StructArray
    lengths: Lengths
    indices: Lengths
    staging: StructArray


@dataclass(frozen=True, slots=True)
class Committed:
    """statuses: uint16 [n] READY, EXISTS or FAILED. extents: EXTENT [n] of the block's page,
    blocks: int64 [n]; page and block are -1 for FAILED.

    metas: META [n] as committed; the ids may mean other blocks later. lease: 0 unless requested and
    a block is held.
    """

    statuses: Codes
    extents: StructArray
    blocks: Ids
    metas: StructArray
    lease: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Restored:
    """lease: on all pages taken, 0 if none. pinned, reserved: bool, which extents were taken."""

    lease: int
    pinned: Bools
    reserved: Bools


# -- for people


@dataclass(frozen=True, slots=True)
class Forgotten:
    """blocks: how many had pages; they now miss. plan: ends transfers in flight."""

    blocks: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class ClassStats:
    """One class of segments in a tier. Bytes are of a page, slot overhead included."""

    domain: int
    class_bytes: int
    segments: int
    pages: int
    pages_free: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. evictions: pages freed for room. declined: writes declined, by Verdict.

    used_bytes: in pages that are not free, by class; assigned_bytes: in segments that have a class.
    """

    name: str
    kind: TierKind
    capacity_bytes: int
    used_bytes: int
    assigned_bytes: int
    pages_free: int
    pages_reserved: int
    pages_ready: int
    pages_retiring: int
    pages_pinned: int
    evictions: int
    serving: bool
    classes: tuple[ClassStats, ...]
    writable: bool = True
    pages_quarantined: int = 0
    quarantined_bytes: int = 0
    declined: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One session. pinned_bytes and reserved_bytes: per tier, counted against its share."""

    session: int
    domain: int
    leases: int
    reservations: int
    pinned_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Counts over all tiers. transfers: in flight. freed: pages freed so far by reason name."""

    blocks: int
    sessions: int
    leases: int
    reservations: int
    transfers: int
    freed: dict[str, int]


@dataclass(frozen=True, slots=True)
class PagesHeld:
    """Readable pages of a tier in the order of their ids. extents: EXTENT [n]; blocks: int64 [n].
    is_sealed: bool [n], only the daemon can write to the page, so a verification stays valid.
    places: int64 [n], the segment's place among those that the tier has; empty if unknown."""

    extents: StructArray
    blocks: Ids
    is_sealed: Bools
    places: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    def at(self, row: int) -> PagesHeld:
        """One of them."""
        rows = slice(row, row + 1)
        return PagesHeld(self.extents[rows], self.blocks[rows], self.is_sealed[rows], self.places[rows])


QUARANTINED = np.dtype([("extent", EXTENT), ("fault", "<u2"), ("since", "<f8")])
"""A quarantined page: its extent, Fault, and the `now` when it was found."""

BLOCK_INFO = np.dtype(
    [
        ("block", "<i8"),
        ("hash", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
        ("namespace", "<u4"),
        ("domain", "<u4"),
        ("position", "<u4"),
        ("tokens", "<u4"),
        ("length", "<u4"),  # Stored bytes.
        ("pins", "<u4"),  # Over all tiers, transfers included.
        ("hits", "<u4"),
        ("last_used", "<f8"),  # The `now` of the last use.
        ("attention", "<f4"),  # Mass that workers reported.
        ("declined", "<u2"),  # Verdict of its admission since the last use; 0: none.
        ("priority", "u1"),  # Priority of a put, + 1; 0: none given.
        ("until_s", "<u4"),  # Unix time at which the priority runs out; 0: never
        ("tiers", "<u8"),  # bit t: tier t holds it
    ]
)
"""One block of a listing."""

PAGE_INFO = np.dtype([("extent", EXTENT), ("state", "<u2"), ("pins", "<u4")])
"""One page of a block; state is a PageState."""
