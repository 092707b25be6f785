"""The tiers as the cache and the mover see them: Protocols, and the values that calls return.

Tiers do not decide (the core does), and they do not hash payloads (the mover does). `apply` never
waits. Others see a block only after `publish` (mapped) or a finished `write` (stored). `open` finds
only blocks that were published whole.

There are three families. The daemon and its clients map a *mapped* tier: they write its pages in
place, then publish them. A *stored* tier is written from and read into pages of a mapped tier.
Clients map a *device* tier and write its pages in place; the daemon does not map it. It is loaded
from and stored into pages of a mapped tier, and summed in place. Stores with a direct path are read
straight into it. Mapped and device tiers are *shared*. Stored and device tiers are *watched*, since
they may fail while the daemon lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import SegmentAssignment, StructArray, TierSpec

if TYPE_CHECKING:
    from tierd.core.plan import Plan
    from tierd.tiers.store.slots import SlotFile

SliceTable = NDArray[np.uint64]
"""xxh3-64 of each slice of a block, in order."""
HashRows = Callable[[Sequence[int]], Sequence[SliceTable | None]]
"""Sums the bytes of rows of a batch, in the calling thread; None: the bytes are not the block's."""


class FoundBlocks(NamedTuple):
    """Blocks, one row each: EXTENT [n] and META [n]."""

    extents: StructArray
    metas: StructArray


@dataclass(frozen=True, slots=True)
class Recovered:
    """The blocks and segments of a tier that survived the previous run.

    segments: those kept, at their places, each with its writer at that time.
    extents, metas: EXTENT[n] and META[n], one row per intact block. The page is -1, since the core
    gives page ids. The flags tell which blocks must be verified before others see the block.
    next_segment, next_generation: the first numbers that no previous run has used.
    namespaces: the records given to `keep_namespace`, oldest first.
    more: at most more_at_most further blocks, in pieces. Take them all before a call to the tier
    needs them. Any thread reads the next piece, which raises TierFailed. Call a piece in the tier's
    thread to take it.
    """

    segments: list[SegmentAssignment]
    extents: StructArray
    metas: StructArray
    next_segment: int = 1
    next_generation: int = 1
    namespaces: list[bytes] = field(default_factory=list)
    more: Iterable[Callable[[], FoundBlocks]] = ()
    more_at_most: int = 0

    def gathered(self) -> Recovered:
        """The same, all of it in memory."""
        extents, metas = zip((self.extents, self.metas), *(take() for take in self.more), strict=True)
        return replace(self, extents=np.concatenate(extents), metas=np.concatenate(metas), more=(), more_at_most=0)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A batch of reads: statuses u2[n] (READY, FAILED, CORRUPT); slices: empty if not READY."""

    statuses: NDArray[np.uint16]
    slices: list[SliceTable]


@dataclass(frozen=True, slots=True)
class Parts:
    """How a batch is read in parts: part 0 of all blocks, then part 1, ...

    pieces: PIECE [parts, n] of `tierd.tiers.io.pieces`, with offsets in the payloads. Those of part
    0 are not empty. The tier adds the blocks' places, and headers to part 0.
    landed: part p has ended. Called on the loop with the rows that still come whole, and the slice
    tables of all rows.
    """

    pieces: StructArray
    landed: Callable[[int, NDArray[np.int64], Sequence[SliceTable]], None]


@dataclass(frozen=True, slots=True)
class Health:
    """State of a watched tier. Counts start when it was opened.

    fault: why nothing can be written, for people; empty if writes work.
    last_error: of the last call that failed.
    read_errors, write_errors: calls that failed. A sync counts as a write.
    unread: failed reads since the last that succeeded.
    calls: in flight.
    read_age_s, write_age_s: age of the oldest call in flight; 0.0 if there is none.
    """

    fault: str = ""
    last_error: str = ""
    read_errors: int = 0
    write_errors: int = 0
    unread: int = 0
    calls: int = 0
    read_age_s: float = 0.0
    write_age_s: float = 0.0


class Payloads(NamedTuple):
    """Positions of payloads in a store: the file, or None, and the offset in bytes, per row."""

    files: list[SlotFile | None]
    offsets: list[int]


class Came(NamedTuple):
    """Blocks read into a device: slice tables of the bytes there, and faults by row."""

    slices: list[SliceTable]
    faults: dict[int, str]


class Descriptor(NamedTuple):
    """A new file descriptor, which the caller closes, and the length of the file in bytes."""

    fd: int
    bytes: int


@runtime_checkable
class Tier(Protocol):
    """One medium. spec: its configuration.
    position: its place in the tier list.
    mode: how it is served (e.g. `tmpfs`, `o_direct`).
    place: its location, for people.
    notices: sentences to log once at start."""

    spec: TierSpec
    position: int
    mode: str
    place: str
    notices: list[str]

    async def open(self) -> Recovered:
        """Take ownership and recover. Raises AlreadyOwned, ConfigError, VersionMismatch,
        TierFailed."""

    def apply(self, plan: Plan) -> None:
        """Carry out a plan in the same step: retract freed pages, begin segments, stamp reserved
        generations, in this order. Rows of other tiers are skipped. Does not wait. A failing medium
        raises in `prepare` and `write`, not here."""

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """Prepare segments that begin. Await it before handing out a handle to one, and before
        writing one. Segments of other tiers are skipped. Raises TierFailed."""

    async def keep_namespace(self, record: bytes) -> None:
        """Store an opaque record of a namespace, which `open` returns. `sync` makes it durable."""

    async def sync(self) -> None:
        """Make all earlier writes durable; memory has nothing to do. Raises TierFailed. `holds` and
        `take_lost` then tell which blocks the failed sync lost."""

    async def close(self, *, release: bool) -> None:
        """End. With release, remove everything stored; without, keep it for the next `open`."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """Memory that clients map."""

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Enter blocks whose bytes are in place, so that the next run recovers them. EXTENT[n],
        META[n]. The tier sets the fields that locate and seal a record (store, segment, offset,
        generation, slices, digest, checksum)."""

    def note_arrived(self, extents: StructArray, counts: NDArray[np.int64]) -> None:
        """Tell clients how many leading slices of pages being filled are verified: EXTENT[n],
        int [n]."""

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """The slice tables published with these pages; None if missing or of another generation."""

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """A descriptor of the segment's memory. Raises KeyError, TierFailed."""

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """A read-only descriptor of the segment's catalogue. Raises KeyError, TierFailed."""


@runtime_checkable
class MappedTier(SharedTier, Protocol):
    """Memory that the daemon maps too. on_published: called with the EXTENT [n] and META [n] of
    blocks that were entered in its catalogues."""

    on_published: Callable[[StructArray, StructArray], None]

    def view(self, extent: np.void) -> memoryview:
        """The page of one EXTENT row: writable uint8[class_bytes], valid until it is freed. A live
        view keeps the memory mapped. Raises KeyError for an unknown segment."""

    def views(self, extents: StructArray) -> list[memoryview]:
        """`view` of each of EXTENT [n]."""

    def note_writer(self, pid: int) -> None:
        """Record another process that will write to this memory. The next daemon reuses none of it
        until that process is gone. Raises TierFailed."""

    def check_growth(self, spec: TierSpec) -> None:
        """Check that a larger tier fits the machine. In a thread. Raises ConfigError."""

    def grow(self, places: int) -> None:
        """Make memory for so many more segments, in the background and on demand."""

    async def shrink(self, places: int, segments: Sequence[int]) -> None:
        """Free the memory of so many places; segments: those that ended there. Clients that map a
        segment keep its bytes until they unmap it."""


@runtime_checkable
class WatchedTier(Tier, Protocol):
    """A medium that may fail while the daemon lives."""

    def health(self) -> Health:
        """Current state. Does not wait."""

    def heed(self, stir: Callable[[], None]) -> None:
        """Have stir called, on the loop, when its health changes or may change. That is when a call
        to the medium begins, or when the medium is gone."""

    async def probe(self) -> None:
        """Test whether it works; repair it if possible. As slow as the medium. Raises TierFailed."""


@runtime_checkable
class DeviceTier(SharedTier, WatchedTier, Protocol):
    """Memory of a GPU. Calls take batches, EXTENT[n] and META[n], of which stored_length and layers
    count. TierFailed is raised for the whole batch."""

    @property
    def ordinal(self) -> int:
        """Number of the GPU, as the daemon's driver counts."""

    @property
    def uuid(self) -> str:
        """Of the GPU, by which clients find it; empty if unknown."""

    async def load(
        self, extents: StructArray, metas: StructArray, *, source: MappedTier, sources: StructArray
    ) -> list[SliceTable]:
        """Fill pages from a mapped tier; returns the slice tables of the bytes on the device."""

    async def store(
        self, extents: StructArray, metas: StructArray, *, target: MappedTier, targets: StructArray
    ) -> None:
        """Fill pages of a mapped tier; returns when the last byte is there."""

    async def sums(self, extents: StructArray, metas: StructArray) -> list[SliceTable]:
        """The slice tables of the bytes on the device."""

    @property
    def direct_from(self) -> frozenset[int]:
        """Positions of the stores that `read` can use now."""

    async def find_direct(self, stores: Sequence[StoredTier]) -> None:
        """Test which of these stores can be read without a copy in host memory. Tests again after
        each restart of the GPU."""

    async def read(self, extents: StructArray, metas: StructArray, *, source: StoredTier, sources: StructArray) -> Came:
        """Fill pages from slots of a store, bypassing host memory, without verification."""

    def distrust(self, store: int, reason: str) -> None:
        """Stop reading from this store: `read` returned bytes that are not the store's."""


@runtime_checkable
class StoredTier(WatchedTier, Protocol):
    """A medium that is read and written in batches."""

    is_stuck: bool
    """Whether `close` gave up waiting for calls that hang."""

    def holds(self, extents: StructArray) -> NDArray[np.bool_]:
        """Which of EXTENT[n] hold a block that is whole and, once `sync` has returned, durable."""

    def take_lost(self) -> StructArray:
        """Blocks that were written and then lost by a failed sync: EXTENT[n] (tier, segment, slot,
        generation). Each is returned once."""

    async def read(
        self,
        extents: StructArray,
        targets: Sequence[memoryview],
        metas: StructArray,
        *,
        arrived: HashRows = ...,
        parts: Parts | None = ...,
    ) -> ReadResult:
        """Fill targets from EXTENT[n], whose headers must match META[n] (key, namespace,
        generation). Each target is 4 KiB aligned and holds the stored length rounded up to 4 KiB.
        The caller verifies payloads: a thread of the tier calls arrived for rows already read,
        while others still arrive.

        parts: reads so, and calls its functions instead.
        """

    async def check(self, extents: StructArray, metas: StructArray) -> NDArray[np.uint16]:
        """The statuses that `read` would give by the slots' headers, without a payload: u2[n]."""

    def payloads(self, extents: StructArray) -> Payloads:
        """Positions of the payloads of EXTENT[n], each in a room of whole 4 KiB."""

    def has_file(self, file: SlotFile) -> bool:
        """Whether the store still uses a file of `payloads`."""

    async def write(
        self,
        extents: StructArray,
        metas: StructArray,
        hash_rows: HashRows,
        sources: Sequence[memoryview],
        *,
        known: Sequence[SliceTable | None] = ...,
    ) -> NDArray[np.uint16]:
        """Write whole blocks: u2[n] of READY, FAILED, or CORRUPT if hash_rows says so. A thread of
        the tier calls hash_rows for each row just before its bytes are written. If the row's table
        is known, it runs during the write. Arguments as in `read`."""


def is_mapped(tier: Tier) -> TypeGuard[MappedTier]:
    """Whether the daemon maps it. For batches: `isinstance` of a protocol takes 0.1 ms."""
    return hasattr(tier, "view")


def is_shared(tier: Tier) -> TypeGuard[SharedTier]:
    """Whether clients map it."""
    return hasattr(tier, "descriptor")


def is_device(tier: Tier) -> TypeGuard[DeviceTier]:
    """Whether only a GPU moves its bytes."""
    return hasattr(tier, "sums")


def is_watched(tier: Tier) -> TypeGuard[WatchedTier]:
    """Whether it may fail while the daemon lives."""
    return hasattr(tier, "probe")


def is_stored(tier: Tier) -> TypeGuard[StoredTier]:
    """Whether it is read and written in batches."""
    return hasattr(tier, "holds")
