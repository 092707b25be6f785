"""Segments mapped into this process, for as long as an array made from them is alive.

A descriptor becomes an array and is not kept; segments.py chooses segments. A mapping is read-only
unless this session is the segment's writer. In a forked child all mappings are read-only, so views
can be read and a write ends the child. Nothing is unmapped twice. The daemon allocates files before
it sends their descriptors, so access to a mapping cannot raise SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierd.core.formats.directory import SEGMENT_BITS
from tierd.core.formats.layout import (
    CATALOGUE_HEADER,
    CATALOGUE_MAGIC,
    GENERATION,
    HEADER_BYTES,
    NO_GENERATION,
    CatalogueLayout,
)
from tierd.core.formats.meta import META_BYTES, Entry, read_entry
from tierd.core.formats.model import StructArray
from tierd.core.formats.versions import CATALOGUE
from tierd.core.formats.words import Words, words_of
from tierd.errors import TierFailed
from tierd.linux.huge_pages import free_boundary

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_writable: dict[int, int] = {}
"""Address to length of mappings that this process may write to."""

_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the module mmap has no name for it


SEGMENT = np.dtype(
    [
        ("place", "<u8"),
        ("data", "<u8"),
        ("words", "<u8"),
        ("metas", "<u8"),
        ("tables", "<u8"),
        ("class_bytes", "<u8"),
        ("pages", "<u4"),
        ("slice_words", "<u4"),
    ]
)
"""A mapped segment for native code: its place in the directory, addresses in this process, sizes."""


@dataclass(frozen=True, eq=False)
class MappedSegment:
    """One mapped segment. data: uint8, read-only unless is_writable; words: generation words.

    metas, tables: META and slice table of each page, as bytes; a table has slice_words. present:
    offsets of pages that `populate` has handled.
    """

    id: int
    tier: int
    data: NDArray[np.uint8]
    words: Words
    metas: memoryview
    tables: memoryview
    slice_words: int
    class_bytes: int
    is_writable: bool
    present: set[int] = field(default_factory=set)

    @cached_property
    def address(self) -> int:
        """Address of the data in this process."""
        return int(self.data.ctypes.data)

    @cached_property
    def _numbers(self) -> memoryview:
        return memoryview(cast("bytes", self.words)).cast("B").cast("Q")

    @property
    def place(self) -> int:
        """Its place in the directory."""
        return self.tier << SEGMENT_BITS | self.id

    @cached_property
    def row(self) -> tuple[int, ...]:
        """SEGMENT."""
        words, metas, tables = (
            np.frombuffer(its, np.uint8).ctypes.data for its in (self.words, self.metas, self.tables)
        )
        return self.place, self.address, words, metas, tables, self.class_bytes, len(self.words), self.slice_words

    def generation(self, slot: int) -> int:
        """The generation word of a page. Raises IndexError."""
        return self._numbers[slot]

    def entry(self, slot: int) -> Entry | None:
        """A page's entry; None if it is not complete."""
        raw = self.metas[slot * META_BYTES : (slot + 1) * META_BYTES].tobytes()
        return read_entry(raw, xxhash.xxh3_64_intdigest) if len(raw) == META_BYTES else None

    @property
    def is_empty(self) -> bool:
        """Whether no page of it is in use now; it may have ended."""
        return is_unused(self.words)


class SegmentTable:
    """Mapped segments of host memory, sorted by place. rows: SEGMENT [n], valid while this object lives."""

    def __init__(self, segments: Iterable[MappedSegment] = ()) -> None:
        self.segments = sorted(segments, key=lambda segment: segment.place)
        self.rows = np.array([segment.row for segment in self.segments], SEGMENT)
        self.address = int(self.rows.ctypes.data)
        self._numbers = {segment.place: number for number, segment in enumerate(self.segments)}

    def find(self, place: int) -> int | None:
        """The number of the segment at this place."""
        return self._numbers.get(place)


def still_hold(words: Words, handles: StructArray, *, for_a_lease: bool = False) -> NDArray[np.bool_]:
    """Which pages of HANDLE [n] still have their handle's generation: bool [n]. None has it if a slot
    is beyond `words`. For a lease, pages that lookups no longer find count too."""
    try:
        found = words[handles["slot"]]
    except IndexError:
        return np.zeros(len(handles), np.bool_)
    return np.asarray((found & GENERATION if for_a_lease else found) == handles["generation"], np.bool_)


def is_unused(words: Words) -> bool:
    """Whether no page has a generation."""
    return not (words != NO_GENERATION).any()


class Catalogue(NamedTuple):
    """A mapped catalogue: the fields that `MappedSegment` takes from it."""

    words: Words
    metas: memoryview
    tables: memoryview
    slice_words: int
    class_bytes: int


def map_segment(
    place: tuple[int, int], *, data: tuple[int, int], catalogue: tuple[int, int], is_writable: bool
) -> MappedSegment:
    """Maps a segment. place: its tier and number; data, catalogue: (descriptor, bytes); the caller
    closes the descriptors. Raises TierFailed, VersionMismatch."""
    tier, segment = place
    its = map_catalogue(segment, catalogue)
    if its.class_bytes * len(its.words) > data[1]:
        raise TierFailed(
            f"segment {segment}: {len(its.words)} pages of {its.class_bytes} bytes do not fit its {data[1]}"
        )
    return MappedSegment(segment, tier, map_file(*data, writable=is_writable), *its, is_writable)


def map_catalogue(segment: int, catalogue: tuple[int, int]) -> Catalogue:
    """A segment's catalogue. catalogue: (descriptor, bytes). Raises TierFailed, VersionMismatch."""
    return catalogue_of(segment, map_file(*catalogue, writable=False))


def catalogue_of(segment: int, table: NDArray[np.uint8]) -> Catalogue:
    """Parses the head of a catalogue. Raises TierFailed, VersionMismatch."""
    head = table[: CATALOGUE_HEADER.itemsize].view(CATALOGUE_HEADER)[0]
    if head["magic"] != CATALOGUE_MAGIC or int(head["segment"]) != segment:
        raise TierFailed(f"segment {segment}: the daemon sent another segment's catalogue; see the daemon's log")
    CATALOGUE.check(int(head["version"]), name=f"segment {segment}")
    layout = CatalogueLayout(pages=int(head["pages"]), class_bytes=int(head["class_bytes"]))
    if layout.total_bytes > len(table):
        raise TierFailed(f"segment {segment}: {layout.pages} pages do not fit its catalogue of {len(table)} bytes")
    raw = memoryview(cast("bytes", table))
    return Catalogue(
        words_of(table, offset=HEADER_BYTES, count=layout.pages),
        raw[layout.meta_offset : layout.meta_offset + layout.pages * META_BYTES],
        raw[layout.slices_offset : layout.total_bytes],
        layout.slice_words,
        layout.class_bytes,
    )


def map_file(fd: int, length: int, *, writable: bool) -> NDArray[np.uint8]:
    """Maps the first `length` bytes of a file, shared and excluded from core dumps. Raises TierFailed."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(free_boundary(length), length, protection, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise TierFailed(f"mmap of {length} bytes: {os.strerror(code)}; close other mappings or raise vm.max_map_count")
    memory = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, _unmap, address, length).atexit = False
    _libc.madvise(address, length, mmap.MADV_DONTDUMP)
    if writable:
        _writable[address] = length
    view = memoryview(memory)
    return np.frombuffer(view if writable else view.toreadonly(), dtype=np.uint8)


def populate(segment: MappedSegment, pages: Sequence[tuple[int, int]]) -> None:
    """Makes pages (offset, length) present for writing, adjacent ones together, to save a fault for
    each 4 KiB. This only affects speed."""
    start = end = 0
    for offset, length in sorted(page for page in pages if page[0] not in segment.present):
        segment.present.add(offset)
        if offset != end:
            _populate(segment, start, end)
            start = offset
        end = offset + length
    _populate(segment, start, end)


def _populate(segment: MappedSegment, start: int, end: int) -> None:
    if end > start:
        _libc.madvise(segment.address + start, end - start, _MADV_POPULATE_WRITE)


def _unmap(address: int, length: int) -> None:
    _writable.pop(address, None)
    _libc.munmap(address, length)


def _take_writing() -> None:
    """In a child process: makes the parent's writable mappings read-only."""
    for address, length in _writable.items():
        if _libc.mprotect(address, length, mmap.PROT_READ):
            os.abort()  # no child is better than one that writes to its parent's pages
    _writable.clear()


os.register_at_fork(after_in_child=_take_writing)
