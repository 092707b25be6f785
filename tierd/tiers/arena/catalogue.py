"""The catalogue of one segment: the generation of each page, and the block in it.

`../FORMAT.md` describes it; `tierd.core.formats.layout` has the offsets. It handles no page bytes
and no other file. The process may be killed between any two instructions, and clients read at the
same time. So:

- A generation word changes before the first byte of its page's reuse.
- An entry counts only if its checksum holds and it names this arena, segment and place. Its
  generation must be the page's word.
- Publishing breaks the checksum, writes table and entry, then sets the checksum. A torn entry is a
  free page.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.checksum import raw_tables, record_checksum, table_digests
from tierd.core.arrays.sets import kinds, true_rows
from tierd.core.formats import versions
from tierd.core.formats.layout import (
    CATALOGUE_HEADER,
    CATALOGUE_MAGIC,
    GENERATION,
    HEADER_BYTES,
    NO_GENERATION,
    RETIRED,
    WORD_BYTES,
    CatalogueLayout,
)
from tierd.core.formats.meta import META, META_BYTES, duplicate, intact, sums_of
from tierd.core.formats.model import SegmentAssignment, StructArray
from tierd.core.formats.words import barrier, words_of
from tierd.core.index.pages import GENERATION_LIMIT
from tierd.errors import CorruptRecord, InvalidArgument
from tierd.failpoint import failpoint
from tierd.linux.mapping import map_file
from tierd.tiers.tier import SliceTable

_META_WORDS = META_BYTES // WORD_BYTES
_SEALED_BYTES = CATALOGUE_HEADER.itemsize - WORD_BYTES


@dataclass(frozen=True, slots=True)
class CatalogueHead:
    """Header of a catalogue. store: id of the arena, 16 bytes; segment_bytes: of the data file."""

    store: bytes
    segment_bytes: int
    assignment: SegmentAssignment

    @property
    def layout(self) -> CatalogueLayout:
        """The offsets of the catalogue's parts."""
        return CatalogueLayout(pages=self.assignment.pages, class_bytes=self.assignment.class_bytes)


class Survivors(NamedTuple):
    """Intact entries: slots u4[n], metas META[n]. highest: greatest generation given."""

    slots: NDArray[np.uint32]
    metas: StructArray
    highest: int


class Catalogue:
    """One mapped catalogue. Slots are page numbers in the segment; arrays of a call are parallel."""

    def __init__(self, memory: memoryview, *, head: CatalogueHead) -> None:
        layout = head.layout
        pages = layout.pages
        self.head = head
        self.layout = layout
        self.is_allocated = False  # the whole file; before, entries may not be touched, so none was written
        self._memory = memory
        self._generations = words_of(memory, offset=HEADER_BYTES, count=pages)
        entries = words_of(memory, offset=layout.meta_offset, count=pages * _META_WORDS)
        self._entries = entries.reshape(pages, _META_WORDS)
        self._metas = np.frombuffer(memory, dtype=META, count=pages, offset=layout.meta_offset)
        tables = words_of(memory, offset=layout.slices_offset, count=pages * layout.slice_words)
        self._tables = tables.reshape(pages, layout.slice_words)

    # -- open and close

    @classmethod
    def create(cls, path: Path, *, head: CatalogueHead) -> Catalogue:
        """A new file, mode 0600, all pages free. Only header and words are allocated: `allocate`
        does the rest.

        Raises OSError (FileExistsError, ENOSPC).
        """
        layout = head.layout
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.truncate(fd, layout.total_bytes)
            os.posix_fallocate(fd, 0, layout.meta_offset)
            catalogue = cls(map_file(fd, layout.total_bytes), head=head)
        finally:
            os.close(fd)
        catalogue.write_head(head)
        return catalogue

    @classmethod
    def open(cls, path: Path) -> Catalogue:
        """Open a file, allocated whole. Raises CorruptRecord if torn, VersionMismatch if newer."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = read_head(os.pread(fd, CATALOGUE_HEADER.itemsize, 0), name=str(path))
            total = head.layout.total_bytes
            if os.fstat(fd).st_size != total:
                raise CorruptRecord(
                    f"{path}: {os.fstat(fd).st_size} bytes, its header asks for {total}; the segment is dropped"
                )
            os.posix_fallocate(fd, 0, total)
            catalogue = cls(map_file(fd, total), head=head)
        finally:
            os.close(fd)
        catalogue.is_allocated = True
        return catalogue

    def allocate(self, path: Path) -> None:
        """Allocate the whole file, so that no access can fail later. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.posix_fallocate(fd, 0, self.layout.total_bytes)
        finally:
            os.close(fd)
        self.is_allocated = True

    def write_head(self, head: CatalogueHead) -> None:
        """Replace the header, checksum last. The layout must be the same."""
        raw = pack_head(head)
        words = words_of(self._memory, count=CATALOGUE_HEADER.itemsize // WORD_BYTES)
        new = np.frombuffer(raw, dtype="<u8")
        words[-1] = 0
        barrier()
        words[:-1] = new[:-1]
        barrier()
        words[-1] = new[-1]
        self.head = head

    # -- pages

    def stamp(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> None:
        """Start a new use of pages: older handles become stale. Then call `barrier` once per plan."""
        self._generations[slots] = generations
        if self.is_allocated:
            self._metas["slices"][slots] = 0

    def retire(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> None:
        """Retire pages that hold no block any more but are still leased: their entries no longer
        count. Pages that were retracted meanwhile are skipped."""
        words = self._generations[slots]
        current = slots[words == generations]
        self._generations[current] |= RETIRED

    def retract(self, slots: NDArray[np.uint32]) -> None:
        """Free pages: no handle is valid, no entry counts."""
        self._generations[slots] = NO_GENERATION
        if self.is_allocated:
            self._entries[slots, -1] = 0

    def retract_all(self) -> None:
        """Invalidate all pages, visible also to clients that still map the catalogue."""
        self._generations[:] = NO_GENERATION
        if self.is_allocated:
            self._entries[np.flatnonzero(self._entries[:, -1]), -1] = 0
        barrier()

    def publish(self, slots: NDArray[np.uint32], *, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Publish entries of pages whose bytes are in place; sets their location, digest and
        checksum.

        Skips a page whose generation word differs from that of its META. Raises InvalidArgument if
        a table is too long.
        """
        tables = raw_tables(slices)
        records = self._located(slots, metas=metas, tables=tables)
        current = true_rows(self._generations[slots] == records["generation"])
        words, where = records.view("<u8").reshape(len(records), _META_WORDS), slots
        if len(current) < len(records):
            words, where = words[current], slots[current]
        self._entries[where, -1] = 0
        barrier()
        counts = records["slices"][current]
        for count in kinds(counts):
            alike = current[counts == count]
            joined = b"".join([tables[row] for row in alike.tolist()])
            self._tables[slots[alike], :count] = np.frombuffer(joined, "<u8").reshape(len(alike), count)
        self._entries[where, :-1] = words[:, :-1]
        barrier()
        failpoint("arena.publish.before_seal")
        self._entries[where, -1] = words[:, -1]

    def note_arrived(
        self, slots: NDArray[np.uint32], generations: NDArray[np.uint64], counts: NDArray[np.int64]
    ) -> None:
        """Tell clients that the first slices of pages being filled are verified. They count where
        META has the page's generation; the checksum stays 0. Pages of another generation are
        skipped."""
        current = true_rows(self._generations[slots] == generations)
        where = slots[current]
        self._entries[where, -1] = 0
        barrier()
        self._metas["slices"][where] = counts[current]
        barrier()
        self._metas["generation"][where] = generations[current]

    def find_tables(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> list[SliceTable | None]:
        """Copies of these pages' slice tables; None if no entry of that generation is published."""
        metas = self._metas[slots]
        words = self._generations[slots] & GENERATION
        good = (metas["checksum"] != 0) & (metas["generation"] == generations) & (words == generations)
        counts = np.minimum(metas["slices"], self.layout.slice_words).tolist()
        rows = zip(slots.tolist(), counts, good.tolist(), strict=True)
        return [self._tables[slot, :count].copy() if ok else None for slot, count, ok in rows]

    def survivors(self) -> Survivors:
        """Every entry that counts, read at start."""
        slots = np.flatnonzero(self._entries[:, -1]).astype(np.uint32)
        metas = self._metas[slots]
        good = intact(metas, record_checksum) & self._is_here(slots, metas)
        good[good] = np.all(self._digests(slots[good], metas["slices"][good]) == metas["digest"][good], axis=1)
        given = self._generations & GENERATION
        given = given[given < GENERATION_LIMIT]  # a higher word is damage: none was ever given
        return Survivors(slots[good], metas[good], highest=int(given.max(initial=0)))

    # -- inner

    def _located(self, slots: NDArray[np.uint32], *, metas: StructArray, tables: Sequence[bytes]) -> StructArray:
        assignment = self.head.assignment
        records = duplicate(metas)
        records["store"] = np.frombuffer(self.head.store, dtype=np.uint8)
        records["segment"] = assignment.segment
        records["offset"] = slots.astype(np.uint64) * np.uint64(assignment.class_bytes)
        records["slices"] = [len(table) // WORD_BYTES for table in tables]
        if records["slices"].max(initial=0) > self.layout.slice_words:
            raise InvalidArgument(
                f"slices: {records['slices'].max()} of one block, the limit for pages of {assignment.class_bytes} bytes is "
                f"{self.layout.slice_words}; cut the block into fewer slices"
            )
        records["digest"] = table_digests(tables)
        records["checksum"] = sums_of(records, record_checksum)
        return records

    def _digests(self, slots: NDArray[np.uint32], counts: NDArray[np.uint16]) -> NDArray[np.uint8]:
        """The digests of these pages' slice tables as they are: u8 [n, 16]."""
        raw, row = self._tables[slots].tobytes(), self.layout.slice_words * WORD_BYTES
        lengths = (counts.astype(np.int64) * WORD_BYTES).tolist()
        return table_digests([raw[i * row : i * row + length] for i, length in enumerate(lengths)])

    def _is_here(self, slots: NDArray[np.uint32], metas: StructArray) -> NDArray[np.bool_]:
        """Which records belong to their places and to the page's present generation."""
        head = self.head
        here = np.all(metas["store"] == np.frombuffer(head.store, dtype=np.uint8), axis=1)
        here &= metas["segment"] == head.assignment.segment
        here &= metas["offset"] == slots.astype(np.uint64) * np.uint64(head.assignment.class_bytes)
        here &= (metas["generation"] == self._generations[slots]) & (metas["generation"] != NO_GENERATION)
        here &= (metas["stored_length"] <= head.assignment.class_bytes) & (metas["slices"] <= self.layout.slice_words)
        return np.asarray(here, dtype=np.bool_)


def pack_head(head: CatalogueHead) -> bytes:
    """The header's 128 bytes, sealed."""
    given = head.assignment
    record = np.zeros(1, dtype=CATALOGUE_HEADER)
    record["magic"], record["version"] = CATALOGUE_MAGIC, versions.CATALOGUE.current
    record["store"] = np.frombuffer(head.store, dtype=np.uint8)
    record["tier"], record["segment"], record["place"] = given.tier, given.segment, given.slot
    record["domain"], record["pages"], record["class_bytes"] = given.domain, given.pages, given.class_bytes
    record["segment_bytes"], record["writer"] = head.segment_bytes, given.writer
    record["slice_words"] = head.layout.slice_words
    record["checksum"] = record_checksum(record.tobytes()[:_SEALED_BYTES])
    return record.tobytes()


def read_head(raw: bytes, *, name: str) -> CatalogueHead:
    """Parse a header. Raises CorruptRecord (torn, foreign), VersionMismatch (a newer tierd's)."""
    if len(raw) < CATALOGUE_HEADER.itemsize or not raw.startswith(CATALOGUE_MAGIC):
        raise CorruptRecord(f"{name}: no catalogue; the segment is dropped")
    record = np.frombuffer(raw, dtype=CATALOGUE_HEADER, count=1)[0]
    if record_checksum(raw[:_SEALED_BYTES]) != int(record["checksum"]):
        raise CorruptRecord(f"{name}: the header's checksum does not match; the segment is dropped")
    versions.CATALOGUE.check(int(record["version"]), name=name)
    assignment = SegmentAssignment(
        tier=int(record["tier"]),
        slot=int(record["place"]),
        segment=int(record["segment"]),
        domain=int(record["domain"]),
        class_bytes=int(record["class_bytes"]),
        pages=int(record["pages"]),
        writer=int(record["writer"]),
        replaces=None,
        fresh=False,
    )
    return CatalogueHead(
        store=record["store"].tobytes(), segment_bytes=int(record["segment_bytes"]), assignment=assignment
    )
