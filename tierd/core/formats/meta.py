"""BlockMeta: the one record that describes a stored block.

The host catalogue, the header of an NVMe slot and the journal hold it; `core/FORMAT.md` describes
it. A record is 256 bytes, little-endian. A checksum over all bytes before it detects torn records.
The slice table (xxh3-64 per slice, little-endian) lies beside the record; `digest` is the xxh3-128
over it. The core does no hashing of its own: callers pass the checksum function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats import versions
from tierd.core.formats.model import HASH_BYTES, StructArray

META_BYTES = 256
META_MAGIC = 0x7D5E_71E2

META = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "<u2"),  # 0: the block's own bytes; else they are encoded.
        ("hash", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
        ("namespace", "<u4"),
        ("domain", "<u4"),
        ("position", "<u4"),  # Number of the block in its sequence.
        ("tokens", "<u4"),
        ("logical_length", "<u4"),  # Bytes before encoding.
        ("stored_length", "<u4"),  # Bytes as stored.
        ("codec_version", "<u2"),
        ("slices", "<u2"),  # Entries of the slice table.
        ("epoch", "<u4"),
        ("generation", "<u8"),  # Of the page that holds it.
        ("time_ms", "<u8"),  # Of the commit, Unix time.
        ("digest", "u1", (16,)),  # xxh3-128 over the slice table.
        ("store", "u1", (16,)),  # Id of the arena or store: detects foreign records.
        ("offset", "<u8"),  # Of the page in its segment: detects misplaced records.
        ("segment", "<u4"),
        ("encryption", "<u4"),  # Reserved, zero.
        ("key_id", "<u8"),  # Reserved, zero.
        ("nonce", "u1", (12,)),  # Reserved, zero.
        ("tag", "u1", (16,)),  # Reserved, zero.
        ("layers", "<u4"),  # That slices follow; 0: opaque.
        ("until_s", "<u4"),  # Unix time at which the priority runs out; 0: never.
        ("priority", "u1"),  # That a put gave, + 1; 0: none given.
        ("error", "<f4"),  # Of a value of the block as decoded, at most; 0: exact.
        ("origin", "u1", (16,)),  # Digest of the block that was encoded; zeros: none was.
        ("reserved", "u1", (15,)),
        ("checksum", "<u8"),  # xxh3-64 over all bytes before it.
    ]
)
assert META.itemsize == META_BYTES

Checksum = Callable[[bytes], int]

_ENTRY = struct.Struct("<IH2x32s32xI8xI4xI8xQ92xI5xf31xQ")


class Entry(NamedTuple):
    """The fields of one record that a reader needs. length: stored bytes. error: 0 for exact."""

    magic: int
    version: int
    hash: bytes
    namespace: int
    tokens: int
    length: int
    generation: int
    layers: int
    error: float
    checksum: int


def read_entry(raw: bytes, checksum: Checksum) -> Entry | None:
    """Parses META_BYTES; None if they are blank, half written, damaged or of a version that this
    code does not read."""
    entry = Entry._make(_ENTRY.unpack(raw))
    if entry.magic != META_MAGIC or not versions.META.oldest <= entry.version <= versions.META.current:
        return None
    return entry if checksum(raw[:-8]) == entry.checksum else None


def new_meta(count: int) -> StructArray:
    """So many blank META records with magic and version set."""
    meta = np.zeros(count, dtype=META)
    meta["magic"] = META_MAGIC
    meta["version"] = versions.META.current
    return meta


def duplicate(meta: StructArray) -> StructArray:
    """A copy in one piece; numpy copies field by field, which takes nine times as long."""
    return np.ascontiguousarray(meta).view(np.uint8).copy().view(META)


def picked(records: StructArray, rows: NDArray[np.int64]) -> StructArray:
    """Ascending rows of a structured array, each copied in one piece; if all, the array itself."""
    return records if len(rows) == len(records) else records.take(rows)


def joined(parts: Sequence[StructArray]) -> StructArray:
    """Concatenates structured arrays of one dtype, each record in one piece; one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]).view(parts[0].dtype)


def put_at(meta: StructArray, rows: Sequence[int] | NDArray[np.int64], records: StructArray) -> None:
    """meta[rows] = records, each in one piece. meta: contiguous."""
    meta.view(np.uint8).reshape(len(meta), META_BYTES)[rows] = records.view(np.uint8).reshape(-1, META_BYTES)


def seal(meta: StructArray, checksum: Checksum) -> StructArray:
    """A copy with valid checksums, ready to be stored."""
    sealed = duplicate(meta)
    sealed["checksum"] = sums_of(sealed, checksum)
    return sealed


def intact(meta: StructArray, checksum: Checksum) -> NDArray[np.bool_]:
    """Which records have their magic, a version that this code reads, and a valid checksum."""
    good = is_meta(meta)
    some = np.ascontiguousarray(meta[good])
    good[good] = sums_of(some, checksum) == some["checksum"]
    return np.asarray(good, dtype=np.bool_)


def is_meta(meta: StructArray) -> NDArray[np.bool_]:
    """Which records have their magic and a version that this code reads."""
    known = (meta["version"] >= versions.META.oldest) & (meta["version"] <= versions.META.current)
    return np.asarray((meta["magic"] == META_MAGIC) & known, dtype=np.bool_)


def sums_of(meta: StructArray, checksum: Checksum) -> NDArray[np.uint64]:
    """The checksum that each record should have."""
    raw = meta.tobytes()
    starts = range(0, len(raw), META_BYTES)
    return np.fromiter((checksum(raw[at : at + META_BYTES - 8]) for at in starts), dtype=np.uint64, count=len(meta))
