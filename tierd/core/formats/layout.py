"""The byte layout of a mapped segment's catalogue, which the daemon writes and clients read.

`tierd/tiers/FORMAT.md` describes it. A segment is two files: data (pages of class_bytes, page s at
s * class_bytes) and catalogue:

    0                 header, CATALOGUE_HEADER, padded to 4 KiB
    4096              generation words, u64[pages], padded to 4 KiB
    meta_offset       META[pages], 256 bytes each
    slices_offset     slice table, u64[pages][slice_words]

The generation word of slot s is the aligned little-endian u64 at `generation_offset(s)`. A handle
is valid while that word equals its generation. The daemon changes the word before the first byte of
the page's reuse. So a client copies first, then calls `tierd.core.formats.words.barrier()`, then
reads the word. Another value means a miss. 0 is no generation: the page is free. RETIRED beside the
generation: no lookup finds the page any more, but sessions with a lease may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierd.core.formats.meta import META_BYTES
from tierd.core.formats.model import PAGE_ALIGN_BYTES

CATALOGUE_MAGIC = b"TIERDCAT"
HEADER_BYTES = PAGE_ALIGN_BYTES
WORD_BYTES = 8
NO_GENERATION = 0
"""Value of a free page's generation word."""
RETIRED = np.uint64(1 << 63)
"""Set in the generation word of a page that holds no findable block but is pinned by leases."""
GENERATION = ~RETIRED
"""Mask of the generation in a generation word."""

SLICE_WORDS_MAX = 480
"""Most entries of a slice table: those that fit behind META in a 4 KiB slot header."""

CATALOGUE_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("tier", "<u4"),  # Position in the tier list of the daemon that wrote it.
        ("store", "u1", (16,)),  # Id of the arena.
        ("segment", "<u4"),
        ("place", "<u4"),  # Number of the segment's place in the tier.
        ("domain", "<u4"),
        ("pages", "<u4"),
        ("class_bytes", "<u8"),
        ("segment_bytes", "<u8"),  # Length of the data file.
        ("writer", "<u8"),  # Session that alone may write when the segment began; 0: the daemon.
        ("slice_words", "<u4"),
        ("reserved", "u1", (44,)),
        ("checksum", "<u8"),  # xxh3-64 over the 120 bytes before it.
    ]
)
"""Head of a catalogue: 128 bytes; zeros follow up to HEADER_BYTES."""

assert CATALOGUE_HEADER.itemsize == 128


def slice_words(class_bytes: int) -> int:
    """Slice table entries for each page of this class."""
    return min(max(class_bytes // PAGE_ALIGN_BYTES, 1), SLICE_WORDS_MAX)


def generation_offset(slot: int) -> int:
    """Byte offset of a page's generation word in the catalogue."""
    return HEADER_BYTES + slot * WORD_BYTES


@dataclass(frozen=True, slots=True)
class CatalogueLayout:
    """Offsets of one catalogue, from the number of its pages and their class."""

    pages: int
    class_bytes: int

    @property
    def slice_words(self) -> int:
        """Entries of a page's row in the slice table."""
        return slice_words(self.class_bytes)

    @property
    def meta_offset(self) -> int:
        """Start of META[pages], bytes."""
        words = self.pages * WORD_BYTES
        return HEADER_BYTES + -(-words // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    @property
    def slices_offset(self) -> int:
        """Start of the slice table, bytes."""
        return self.meta_offset + self.pages * META_BYTES

    @property
    def total_bytes(self) -> int:
        """Length of the file, a multiple of 4 KiB."""
        end = self.slices_offset + self.pages * self.slice_words * WORD_BYTES
        return -(-end // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
