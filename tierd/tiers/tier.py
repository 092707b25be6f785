"""What the conductor and the mover see of a tier: Protocols, and the values that come back.

Purpose: one face for every medium. Non-purpose: deciding (that is the core's), hashing of payload (the mover's).
Invariants: `apply` never waits; nothing is visible to others before `publish` (mapped) or a finished `write` (stored);
what `open` finds again was published whole.

Three families. A *mapped* tier is memory that the daemon and its clients map: its pages are written in place, then published. A *stored*
tier is written from and read into pages of a mapped tier. A *device* tier is memory that clients map and the daemon does not: its pages are
written in place by clients, loaded from and stored into pages of a mapped tier, read from stores where a way is direct, and summed where they lie. Mapped and device tiers are *shared*;
stored and device tiers are *watched*, since they may fail while the daemon lives.
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
"""Sums the bytes of rows of a batch, wherever it is called from; None: they are not the block's."""


class FoundBlocks(NamedTuple):
    """Blocks, one row each: EXTENT [n] and META [n]."""

    extents: StructArray
    metas: StructArray


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a tier found of a former life.

    segments: those kept, at their places, with the writer they had. extents EXTENT[n] and metas META[n]: one row per block
    found intact; page is -1 (the core gives page ids), flags tell what must be verified before others see it.
    next_segment, next_generation: the first numbers that no former life has used. namespaces: the records given to
    `keep_namespace`, oldest first. more: further blocks, at most more_at_most, still to be read, in pieces; to be taken once and to its end before the
    tier is asked for what lies in it. The next piece is read in any thread, raises TierFailed, and is taken by calling it where the tier is called.
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
    """Of a batch of reads: statuses u2[n] (READY, FAILED, CORRUPT); slices: per block its table, empty unless READY."""

    statuses: NDArray[np.uint16]
    slices: list[SliceTable]


@dataclass(frozen=True, slots=True)
class Health:
    """How a watched tier fares. Counts are since it was opened.

    fault: why nothing can be written, for people; empty if it can. last_error: of the last call that failed. read_errors, write_errors: calls that failed; a sync counts as a write.
    unread: reads that failed since one has succeeded. calls: under way. read_age_s, write_age_s: of the oldest call under way, 0.0 if there is none.
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
    """Where blocks lie in a store, for who reads past it: of each row the file, None where there is none, and the offset in it, in bytes."""

    files: list[SlotFile | None]
    offsets: list[int]


class Came(NamedTuple):
    """What a device read from a store: per block the slice table of what lies on it then, or, by row, why there is none."""

    slices: list[SliceTable]
    faults: dict[int, str]


class Descriptor(NamedTuple):
    """A new file descriptor, which the caller closes, and the length of the file in bytes."""

    fd: int
    bytes: int


@runtime_checkable
class Tier(Protocol):
    """One medium. spec: its configuration; position: its place in the tier list; mode: how it is served (e.g. `tmpfs`,
    `o_direct`); place: where, for people; notices: sentences to be said once at start."""

    spec: TierSpec
    position: int
    mode: str
    place: str
    notices: list[str]

    async def open(self) -> Recovered:
        """Take ownership, find what survived, make ready. Raises AlreadyOwned, ConfigError, VersionMismatch, TierFailed."""

    def apply(self, plan: Plan) -> None:
        """Follow a decision in the step that made it: retract freed pages, begin segments, stamp reserved generations, in
        this order. Rows of other tiers are passed over. Does not wait and raises nothing for a failing medium: that
        shows in `prepare` and `write`."""

    async def prepare(self, segments: Sequence[SegmentAssignment]) -> None:
        """What a segment's beginning needs in time; awaited before a handle to it leaves the daemon, and before it is written.
        Segments of other tiers are passed over. Raises TierFailed."""

    async def keep_namespace(self, record: bytes) -> None:
        """Store an opaque record that names a namespace, to be found again by `open`; durable with the next `sync`."""

    async def sync(self) -> None:
        """Make durable what was written so far. Nothing to do for memory. Raises TierFailed; what was lost by it `holds` and `take_lost` know."""

    async def close(self, *, release: bool) -> None:
        """End. With release everything stored is removed; without, it is kept for the next `open`."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """Memory that clients map."""

    def publish(self, extents: StructArray, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Make blocks whose bytes are in place known to the next life. EXTENT[n], META[n]; the tier sets the fields that
        locate and seal a record (store, segment, offset, generation, slices, digest, checksum)."""

    def slices(self, extents: StructArray) -> list[SliceTable | None]:
        """The slice tables published with these pages; None where none was, or the generation is another."""

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """A descriptor of the segment's memory. Raises KeyError, TierFailed."""

    def catalogue_descriptor(self, segment: int) -> Descriptor:
        """A read-only descriptor of the segment's catalogue. Raises KeyError, TierFailed."""


@runtime_checkable
class MappedTier(SharedTier, Protocol):
    """Memory that the daemon maps too. on_published: hears of blocks that were entered in its catalogues, EXTENT
    [n], META [n]."""

    on_published: Callable[[StructArray, StructArray], None]

    def view(self, extent: np.void) -> memoryview:
        """The page of one EXTENT row: class_bytes of uint8, writable. Valid until the page is freed; the memory stays mapped
        while the view lives. Raises KeyError for a segment that is not there."""

    def views(self, extents: StructArray) -> list[memoryview]:
        """`view` of each of EXTENT [n]."""

    def note_writer(self, pid: int) -> None:
        """This process beside the daemon's own will write to its memory: the next daemon reuses none of it before it is gone. Raises TierFailed."""


@runtime_checkable
class WatchedTier(Tier, Protocol):
    """A medium that may fail while the daemon lives."""

    def health(self) -> Health:
        """How it fares now. Does not wait."""

    def heed(self, stir: Callable[[], None]) -> None:
        """From now on stir is called, on the loop, when its health begins to change or may: a call to the medium begins, or the medium has gone."""

    async def probe(self) -> None:
        """Finds out whether it works, and mends what can be mended. Takes as long as the medium takes. Raises TierFailed."""


@runtime_checkable
class DeviceTier(SharedTier, WatchedTier, Protocol):
    """Memory of a GPU. Calls are for batches, EXTENT[n] and META[n] (stored_length and layers count), and raise TierFailed as a whole."""

    @property
    def ordinal(self) -> int:
        """Number of the GPU, as the daemon's driver counts."""

    @property
    def uuid(self) -> str:
        """Of the GPU, by which clients find it; empty if it is not known."""

    async def load(
        self, extents: StructArray, metas: StructArray, *, source: MappedTier, sources: StructArray
    ) -> list[SliceTable]:
        """Fill pages from those of a mapped tier; the slice tables of what lies on the device then."""

    async def store(
        self, extents: StructArray, metas: StructArray, *, target: MappedTier, targets: StructArray
    ) -> None:
        """Fill pages of a mapped tier; the last byte is there when it returns."""

    async def sums(self, extents: StructArray, metas: StructArray) -> list[SliceTable]:
        """The slice tables of what lies on the device."""

    @property
    def direct_from(self) -> frozenset[int]:
        """Positions of the stores that `read` reads from now."""

    async def find_direct(self, stores: Sequence[StoredTier]) -> None:
        """Finds out which of these stores can be read from without a stay in host memory, now and whenever its GPU begins anew."""

    async def read(self, extents: StructArray, metas: StructArray, *, source: StoredTier, sources: StructArray) -> Came:
        """Fill pages from slots of a store, past host memory. Neither header nor payload is verified."""

    def distrust(self, store: int, reason: str) -> None:
        """What `read` gives of a store is not what it has: it reads from there no more."""


@runtime_checkable
class StoredTier(WatchedTier, Protocol):
    """A medium that is read and written in batches."""

    is_stuck: bool
    """Whether `close` gave up waiting for calls that hang."""

    def holds(self, extents: StructArray) -> NDArray[np.bool_]:
        """Of EXTENT[n], which hold a block that is written whole and, once `sync` has returned, durable."""

    def take_lost(self) -> StructArray:
        """EXTENT[n] (tier, segment, slot and generation count) of blocks that were written, and are not held any more because a sync has failed. Each is told once."""

    async def read(
        self, extents: StructArray, targets: Sequence[memoryview], metas: StructArray, *, arrived: HashRows = ...
    ) -> ReadResult:
        """Fill targets from EXTENT[n], whose headers must match META[n] (key, namespace, generation). Each target is 4 KiB
        aligned and holds the stored length rounded up to 4 KiB. The payload is verified by the caller: arrived is called for rows whose bytes have
        come, in a thread of the tier's while others still come."""

    async def check(self, extents: StructArray, metas: StructArray) -> NDArray[np.uint16]:
        """What `read` would say of the slots' headers, without a payload: u2[n]."""

    def payloads(self, extents: StructArray) -> Payloads:
        """Where the payloads of EXTENT[n] lie, each in a room of whole 4 KiB."""

    def has_file(self, file: SlotFile) -> bool:
        """Whether a file of `payloads` is still the store's."""

    async def write(
        self,
        extents: StructArray,
        metas: StructArray,
        hash_rows: HashRows,
        sources: Sequence[memoryview],
        *,
        known: Sequence[SliceTable | None] = ...,
    ) -> NDArray[np.uint16]:
        """Write blocks whole: u2[n] of READY, FAILED, or CORRUPT where hash_rows says so, which is called for each row, in a thread of the tier's: just before
        its bytes are written, or beside that where its table is known. Arguments as in `read`."""


def is_mapped(tier: Tier) -> TypeGuard[MappedTier]:
    """Whether the daemon maps it. For batches: `isinstance` asks a protocol for each of its members, which takes 0.1 ms."""
    return hasattr(tier, "view")


def is_shared(tier: Tier) -> TypeGuard[SharedTier]:
    """Whether clients map it."""
    return hasattr(tier, "descriptor")


def is_device(tier: Tier) -> TypeGuard[DeviceTier]:
    """Whether its bytes move by a GPU alone."""
    return hasattr(tier, "sums")


def is_watched(tier: Tier) -> TypeGuard[WatchedTier]:
    """Whether it may fail while the daemon lives."""
    return hasattr(tier, "probe")


def is_stored(tier: Tier) -> TypeGuard[StoredTier]:
    """Whether it is read and written in batches."""
    return hasattr(tier, "holds")
