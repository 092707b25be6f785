"""The values that cross the seams of tierd: kinds, states, and the dtypes of the arrays that core, mover, tiers and the
wire exchange.

Purpose: one definition of each. Non-purpose: behaviour. Everything here is pure. All dtypes are little-endian and packed
without implicit padding, so an array's bytes are the same in memory, on the wire and on disk.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 32
"""Length of a block hash (SHA-256), bytes."""

PAGE_ALIGN_BYTES = 4096
"""Extents begin and end on this boundary, as O_DIRECT and mmap want it."""

SLICE_MAX_BYTES = 256 * 1024
"""Upper bound of a slice, the unit of verification."""

NO_PAGE = -1
"""In a column of page ids: the block has no page in that tier."""

ROOT = bytes(HASH_BYTES)
"""The parent hash of a sequence's first block."""

StructArray = NDArray[Any]
"""A numpy structured array whose dtype the docstring names."""


PRIORITY_LIMIT = 100
"""Of a block, the greatest that a put can say; 0 leaves first."""
PRIORITY_DEFAULT = 35
"""Where nothing was said, or what was said has run out; as TensorRT-LLM's KvCacheRetentionConfig has it, so that its values mean the same here."""
RETENTION_LIMIT_S = 10 * 366 * 86400
"""The longest that a put can say; for good is said by not limiting it."""


class TierKind(enum.IntEnum):
    """A medium, near to far. A tier is (kind, index)."""

    DEVICE = 0
    HOST = 1
    NVME = 2
    ARCHIVE = 3


class Codes:
    """Numbers with names that stand in arrays: plain ones, since numpy compares an array with a member of an enumeration five times as slowly."""

    @classmethod
    @functools.cache
    def names(cls) -> dict[int, str]:
        """The name of each number, in small letters, as people see it."""
        return {code: name.lower() for name, code in vars(cls).items() if name.isupper()}


class PageState(Codes):
    """free -> reserved -> ready -> free; also reserved -> free, ready -> retiring -> free while something pins it, and retiring -> quarantined -> free."""

    FREE = 0
    RESERVED = 1
    READY = 2
    RETIRING = 3
    QUARANTINED = 4
    """Found bad, so it is not handed out; holds no block."""


class Fault(enum.IntEnum):
    """What was found wrong with a page; the names are shown to people."""

    NONE = 0
    READ = 1
    """A read or a copy that somebody waited for did not give the block's bytes."""
    DIGEST = 2
    """Scrub: the bytes are not those of the block's digest."""
    HEADER = 3
    """Scrub: the slot's header is not the block's."""
    IO = 4
    """Scrub: the medium does not give the bytes."""


class BlockStatus(Codes):
    """What became of one block of a batch. Results, not errors."""

    MISS = 0
    """Held nowhere, or not usable without a block before it that is held nowhere."""
    READY = 1
    """Held; the handle beside it is good."""
    RESERVED = 2
    """A page is set aside for the caller to write."""
    EXISTS = 3
    """Held already; nothing to write."""
    NO_ROOM = 4
    """The tier, or the session's share of it, has no page to give now."""
    REJECTED = 5
    """Admission declined."""
    DEFERRED = 6
    """Admission asks to try again later."""
    FAILED = 7
    """A transfer failed; treated as a miss."""
    CORRUPT = 8
    """The bytes were not what was committed; quarantined, treated as a miss."""
    PENDING = 9
    """On its way to the tier that was asked for."""


class Need(enum.IntEnum):
    """Which of a group's blocks must be there to serve N tokens."""

    PREFIX = 0
    """Every block that covers tokens [0, N): full attention."""
    LAST_TOKENS = 1
    """Every block that covers tokens [max(0, N - need_tokens), N): sliding-window attention."""
    LAST_STATE = 2
    """The one block that ends at N: state-space and linear-attention layers."""


class Durability(enum.IntEnum):
    """When a commit is acknowledged."""

    MEMORY = 0
    """Published in the tier that it was reserved in."""
    DURABLE = 1
    """Also written to an NVMe store, data and journal synced."""


class Reason(enum.IntEnum):
    """Why a transfer was made or a page was freed; the names are shown to people."""

    NONE = 0
    DEMAND = 1
    PREFETCH = 2
    DEMOTION = 3
    DURABLE = 4
    EVICTED = 5
    """Chosen by the eviction policy, no copy left below by this step."""
    DEMOTED = 6
    """Chosen by the eviction policy; a farther tier holds the block."""
    ABORTED = 7
    SESSION_ENDED = 8
    DUPLICATE = 9
    """Another writer committed the same block first."""
    CORRUPTED = 10
    FAILED = 11
    EPOCH_BUMPED = 12
    ADMIN = 13
    SEALED = 14
    """A staging page, of which the block that was written there has been copied."""


DAEMON = 0
"""Writer of the segments that only the daemon writes, now."""
NOBODY = 2**64 - 1
"""Writer of a segment that was found at start without word of who holds its pages: read and verified at every hit, never written again, dropped whole."""
SEALED = NOBODY - 1
"""Writer of the segments in which blocks of a tier with sealed puts lie: the daemon alone, and no client ever could write to their files."""
LIFELESS = (DAEMON, SEALED, NOBODY)
"""Writers that are no session."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What the core knows of one tier.

    capacity_bytes: what segments may take in all. segment_bytes: size of each segment; pages never span two.
    slot_overhead_bytes: bytes before each page that are not the block's (the 4 KiB header of an NVMe slot).
    writer_owned: a segment has one writing session at a time (memory that clients map). sealed_puts: only for staging; blocks are copied to where no client may write.
    headroom_bytes: of capacity_bytes, what is kept free for requests in progress: the coldest beyond the rest leave ahead of need.
    high/low_watermark: shares of that rest; in use above high, the coldest are written ahead until those above low are clean.
    eviction: name of a policy in tierd.policies.eviction.
    quarantine_share: of capacity_bytes, the most that pages found bad may take; beyond it the oldest are given out again.
    admission: of an nvme tier, name of a policy in tierd.policies.admission. wear_bytes_per_s: what may be written to it on the average, 0.0 for
    as much as there is; wear_burst_s: for so long what was not written is saved.
    """

    kind: TierKind
    index: int
    capacity_bytes: int
    segment_bytes: int
    slot_overhead_bytes: int = 0
    writer_owned: bool = False
    headroom_bytes: int = 0
    high_watermark: float = 0.80
    low_watermark: float = 0.70
    eviction: str = "lru"
    quarantine_share: float = 0.0
    admission: str = "all"
    wear_bytes_per_s: float = 0.0
    wear_burst_s: float = 6 * 3600.0
    sealed_puts: bool = False

    @property
    def own_writer(self) -> int:
        """Of the segments in which the daemon itself writes."""
        return SEALED if self.sealed_puts else DAEMON

    @property
    def name(self) -> str:
        """`host.0`, as people write it."""
        return f"{self.kind.name.lower()}.{self.index}"


Wanted = TierKind | TierSpec
"""Where blocks shall be: in any tier of a kind, or in one tier."""


def kind_of(wanted: Wanted) -> TierKind:
    """The kind of tier that is wanted."""
    return wanted.kind if isinstance(wanted, TierSpec) else wanted


UNVERIFIED = 1
"""Flag of an extent: a client could have changed the page since it was hashed; verify before others see it."""

EXTENT = np.dtype(
    [
        ("flags", "<u2"),  # UNVERIFIED or 0
        ("tier", "<u2"),  # position in the daemon's tier list
        ("segment", "<u4"),  # id of the segment; never used twice by one instance
        ("slot", "<u4"),  # number of the page within its segment
        ("length", "<u4"),  # stored bytes of the block (at most the segment's class)
        ("offset", "<u8"),  # bytes from the start of the segment
        ("generation", "<u8"),  # of the page; never used twice by one instance
        ("page", "<i8"),  # the core's dense id of the page in its tier
    ]
)
"""Where one block lies in one tier: 40 bytes, which a HANDLE has in the same places, but for the first two and the last eight."""

HANDLE = np.dtype(
    [
        ("status", "<u2"),  # BlockStatus
        ("tier", "<u2"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("offset", "<u8"),
        ("generation", "<u8"),
        ("tokens", "<u4"),  # tokens that the block covers
        ("epoch", "<u4"),  # of the block's namespace
    ]
)
"""What a client gets for one block: 40 bytes."""

PUT_BLOCK = np.dtype(
    [
        ("hash", "u1", (HASH_BYTES,)),  # all zero in Reserve: a private page, named at Commit
        ("tokens", "<u4"),
        ("length", "<u4"),  # bytes
    ]
)
"""One block of a Reserve: 40 bytes."""

COMMIT_BLOCK = np.dtype(
    [
        ("hash", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
        ("index", "<u4"),  # which block of the reservation
        ("position", "<u4"),  # number of the block in its sequence
        ("tokens", "<u4"),
        ("length", "<u4"),  # bytes; at most what was reserved
    ]
)
"""One block of a Commit that names blocks: 80 bytes."""

TRANSFER = np.dtype(
    [
        ("id", "<u8"),
        ("after", "<u8"),  # transfer that fills the source page first; 0: none
        ("block", "<i8"),
        ("source", EXTENT),
        ("target", EXTENT),
        ("reason", "<u2"),  # Reason
    ]
)
"""One copy, source page to target page."""

FREED = np.dtype(
    [
        ("extent", EXTENT),
        ("namespace", "<u4"),
        ("reason", "<u2"),  # Reason
        ("was_ready", "?"),  # a committed block lay there, so tiers and watchers must hear of it
        ("hash", "u1", (HASH_BYTES,)),
    ]
)
"""A page that has become free."""


@dataclass(frozen=True, slots=True)
class SegmentAssignment:
    """A segment begins a life: its id, the domain and writer that it belongs to, the class of its pages.

    slot is the place in the tier (0 to capacity_bytes // segment_bytes - 1); replaces is the id that lived there before
    (None: none yet). With fresh, the old file must not be reused because somebody who may not see or write the
    new life still maps it: unlink it and make another.
    """

    tier: int
    slot: int
    segment: int
    domain: int
    class_bytes: int
    pages: int
    writer: int
    replaces: int | None
    fresh: bool
