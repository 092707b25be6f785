"""Values that cross parts of tierd: kinds, states, and the dtypes of exchanged arrays.

Each has one definition, here. Everything here is pure. All dtypes are little-endian and packed
without implicit padding. So an array's bytes are the same in memory, on the wire and on disk.
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
"""Extents begin and end on this boundary, as O_DIRECT and mmap need."""

SLICE_MAX_BYTES = 256 * 1024
"""Upper bound of a slice, the unit of verification."""

NO_PAGE = -1
"""In a column of page ids: the block has no page in that tier."""

ROOT = bytes(HASH_BYTES)
"""The parent hash of a sequence's first block."""

StructArray = NDArray[Any]
"""A numpy structured array whose dtype the docstring names."""


PRIORITY_LIMIT = 100
"""The greatest priority of a block that a put can give; 0 is evicted first."""
PRIORITY_DEFAULT = 35
"""Priority if none was given, or if it has run out. As in TensorRT-LLM's KvCacheRetentionConfig, so
values mean the same here."""
RETENTION_LIMIT_S = 10 * 366 * 86400
"""The longest retention that a put can give; without a limit it never ends."""
TTL_LIMIT_S = 86400
"""The longest time to live of a prefetch."""


class TierKind(enum.IntEnum):
    """A medium, near to far. A tier is (kind, index)."""

    DEVICE = 0
    HOST = 1
    NVME = 2
    ARCHIVE = 3


LEVELS = 4
"""Levels of stores, from 0 on."""


class Codes:
    """Numbers with names that arrays hold. Not enumerations: numpy compares an array with their
    members five times as slowly."""

    @classmethod
    @functools.cache
    def names(cls) -> dict[int, str]:
        """The name of each number, in small letters, as people see it."""
        return {code: name.lower() for name, code in vars(cls).items() if name.isupper()}


class PageState(Codes):
    """free -> reserved -> ready -> free; also reserved -> free. A pinned page goes ready ->
    retiring -> free; a bad one retiring -> quarantined -> free."""

    FREE = 0
    RESERVED = 1
    READY = 2
    RETIRING = 3
    QUARANTINED = 4
    """Found bad: holds no block and is not allocated."""


class Fault(enum.IntEnum):
    """Faults of a page; people see the names."""

    NONE = 0
    READ = 1
    """A read or a copy for a request did not give the block's bytes."""
    DIGEST = 2
    """Scrub: the bytes do not match the block's digest."""
    HEADER = 3
    """Scrub: the slot's header is not the block's."""
    IO = 4
    """Scrub: the medium does not return the bytes."""


class BlockStatus(Codes):
    """Result for one block of a batch; not an error."""

    MISS = 0
    """No tier holds it, or none holds a block before it that it needs."""
    READY = 1
    """Held; its handle is valid."""
    RESERVED = 2
    """A page is reserved for the caller to write."""
    EXISTS = 3
    """Held already; the caller writes nothing."""
    NO_ROOM = 4
    """The tier, or the session's share of it, has no page to give now."""
    REJECTED = 5
    """Admission declined."""
    DEFERRED = 6
    """Admission asks to try again later."""
    FAILED = 7
    """A transfer failed; treated as a miss."""
    CORRUPT = 8
    """The bytes were not those committed: quarantined, treated as a miss."""
    PENDING = 9
    """In flight to the requested tier."""


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
    """Chosen by the eviction policy; no farther tier holds the block."""
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
    """A staging page whose block has been copied."""


DAEMON = 0
"""Writer of the segments that only the daemon writes, now."""
NOBODY = 2**64 - 1
"""Writer of a segment found at start without record of its holders. Verified at every hit, never
written again, dropped whole."""
SEALED = NOBODY - 1
"""Writer of the segments that hold blocks of a tier with sealed puts: the daemon alone. No client
could ever write to their files."""
LIFELESS = (DAEMON, SEALED, NOBODY)
"""Writers that are no session."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The core's view of one tier.

    capacity_bytes: limit of all segments. segment_bytes: of each segment; pages never span two.
    slot_overhead_bytes: bytes before each page (the 4 KiB header of an NVMe slot).
    writer_owned: a segment has one writing session at a time (memory that clients map).
    sealed_puts: clients write staging pages; blocks are copied to segments that they cannot write.
    headroom_bytes: part of capacity_bytes kept free for requests. The coldest blocks beyond the
    rest are evicted ahead of need.
    high/low_watermark: shares of that rest. Above high, the coldest blocks are written ahead until
    those above low are clean.
    eviction: name of a policy in tierd.policies.eviction.
    quarantine_share: of capacity_bytes, for bad pages; beyond it the oldest are reused.
    level: of an nvme tier. Stores of a level get what the level before evicts. Level 0 is in host
    memory, so that its blocks do not count as durable.
    admission: of an nvme tier, name of a policy in tierd.policies.admission.
    wear_bytes_per_s: write budget, 0.0 for unlimited; wear_burst_s: its unused part accumulates.
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
    level: int = 1

    @property
    def distance(self) -> int:
        """Greater for farther tiers: by kind, then by level."""
        return int(self.kind) * LEVELS + (self.level if self.kind is TierKind.NVME else 0)

    @property
    def is_in_memory(self) -> bool:
        """Whether it is a store in host memory."""
        return self.kind is TierKind.NVME and self.level == 0

    @property
    def is_durable(self) -> bool:
        """Whether blocks in this tier survive a restart of the machine."""
        return self.kind is TierKind.NVME and self.level > 0

    @property
    def own_writer(self) -> int:
        """Writer of the segments in which the daemon itself writes."""
        return SEALED if self.sealed_puts else DAEMON

    @property
    def name(self) -> str:
        """`host.0`, as people write it."""
        return f"{self.kind.name.lower()}.{self.index}"


Wanted = TierKind | TierSpec
"""The requested tiers: any tier of a kind, or one tier."""


def kind_of(wanted: Wanted) -> TierKind:
    """The kind of the requested tier."""
    return wanted.kind if isinstance(wanted, TierSpec) else wanted


UNVERIFIED = 1
"""Flag of an extent: a client may have changed the page since its hash; verify it for others."""
CODED = 2
"""Flag of an extent: the page holds the block encoded (tierd.codecs). Only stores have such pages."""

EXTENT = np.dtype(
    [
        ("flags", "<u2"),  # UNVERIFIED, CODED.
        ("tier", "<u2"),  # Position in the daemon's tier list.
        ("segment", "<u4"),  # Id of the segment; never used twice by one instance.
        ("slot", "<u4"),  # Number of the page within its segment.
        ("length", "<u4"),  # Stored bytes of the block (at most the segment's class).
        ("offset", "<u8"),  # Bytes from the start of the segment.
        ("generation", "<u8"),  # Of the page; never used twice by one instance.
        ("page", "<i8"),  # The core's dense id of the page in its tier.
    ]
)
"""A block's page in one tier: 40 bytes. A HANDLE has the same fields but the first two and the last
eight bytes."""

HANDLE = np.dtype(
    [
        ("status", "<u2"),  # BlockStatus.
        ("tier", "<u2"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("offset", "<u8"),
        ("generation", "<u8"),
        ("tokens", "<u4"),  # Tokens that the block covers.
        ("epoch", "<u4"),  # Of the block's namespace.
    ]
)
"""A client's handle of one block: 40 bytes."""

PUT_BLOCK = np.dtype(
    [
        ("hash", "u1", (HASH_BYTES,)),  # All zero in Reserve: a private page, named at Commit.
        ("tokens", "<u4"),
        ("length", "<u4"),  # Bytes.
    ]
)
"""One block of a Reserve: 40 bytes."""

COMMIT_BLOCK = np.dtype(
    [
        ("hash", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
        ("index", "<u4"),  # Which block of the reservation.
        ("position", "<u4"),  # Number of the block in its sequence.
        ("tokens", "<u4"),
        ("length", "<u4"),  # Bytes; at most what was reserved.
    ]
)
"""One block of a Commit that names blocks: 80 bytes."""

TRANSFER = np.dtype(
    [
        ("id", "<u8"),
        ("after", "<u8"),  # Transfer that fills the source page first; 0: none.
        ("block", "<i8"),
        ("source", EXTENT),
        ("target", EXTENT),
        ("reason", "<u2"),  # Reason.
        ("error", "<f4"),  # Of the source's block; 0: exact.
        ("by_layer", "?"),  # The client waits for each layer, not for whole blocks.
    ]
)
"""One copy, source page to target page."""
FREED = np.dtype(
    [
        ("extent", EXTENT),
        ("namespace", "<u4"),
        ("reason", "<u2"),  # Reason.
        ("was_ready", "?"),  # A committed block lay there, so tiers and watchers are notified.
        ("hash", "u1", (HASH_BYTES,)),
        ("last_used", "<f8"),  # The `now` of the block's last use.
        ("declined", "u1"),  # Verdict of its admission since then; 0: none.
        ("rank", "<u4"),  # Among the blocks that could be evicted, from 1, the coldest; 0: not by rank.
        ("candidates", "<u4"),  # So many could be evicted.
    ]
)
"""A page that has become free."""


@dataclass(frozen=True, slots=True)
class SegmentAssignment:
    """A segment begins: its id, the domain and writer that it belongs to, the class of its pages.

    slot: its place in the tier (0 to capacity_bytes // segment_bytes - 1).
    replaces: the id of the previous segment there (None: none yet).
    fresh: unlink the old file and make another. A process that may not see or write the new segment
    still maps the old one.
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
