"""Check of a store that no daemon has open: description, snapshots, journals and every slot's
digest.

The check repairs nothing and writes nothing. The daemon's start drops damaged parts, and later
writes replace them. The daemon's own code reads the index. Normal traces of a crash are notes, not
findings: a torn journal tail, a slot rewritten before its record was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierd import checksum
from tierd.checksum import record_checksum
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.meta import META, intact
from tierd.core.formats.model import EXTENT, StructArray, TierSpec
from tierd.errors import TierdError, VersionMismatch
from tierd.tiers.fsck.fsck import Part, ReadOnlyFiles
from tierd.tiers.io.format_check import check_versions
from tierd.tiers.store import recovery
from tierd.tiers.store.journal import SegmentBegun, is_torn, journal_path
from tierd.tiers.store.slots import HEADER_BYTES, matches, read_tables
from tierd.tiers.store.snapshot import HEADER, read_snapshot, snapshot_path
from tierd.tiers.store.store_files import slots_path
from tierd.tiers.store.stored_index import StoredIndex

DISK = ReadOnlyFiles()
REUSED = "overwritten shortly before the end, but its record was not written"
MISS = "a miss"
NO_START = "the daemon does not start"


def check_store(spec: TierSpec, directory: Path, part: Part) -> Iterator[None]:
    """Check everything; yields after each slot. Raises OSError if files cannot be read."""
    if not (directory / "store.json").exists():
        if any(directory.glob("seg-*.slots")):
            part.add(
                str(directory / "store.json"), "missing beside slot files", "a new store begins: every block is a miss"
            )
        return
    store = _find_identity(directory, part)
    if store is None:
        return
    loaded = recovery.load_index(directory, store=store, disk=DISK)
    part.files += 1 + len(list(directory.glob("snapshot-*.bin"))) + len(list(directory.glob("journal-*.log")))
    for notice in loaded.notices:
        _record_notice(notice, directory, store, part)
    if any(recovery.LOST in notice for notice in loaded.notices):
        count = _count_unindexed(directory, loaded.index, store)
        part.add(
            str(directory), f"{count} slots hold blocks that are in neither journal nor snapshot", f"they are {MISS}"
        )
    _check_rows(directory, loaded, store=store, part=part)
    yield from _check_slots(spec, directory, loaded.index, store=store, part=part)


def _count_unindexed(directory: Path, index: StoredIndex, store: bytes) -> int:
    """Slots with whole headers of this store, but no block in the index; also removed ones."""
    indexed, count = {*zip(index.metas["segment"].tolist(), index.metas["offset"].tolist(), strict=True)}, 0
    for path in sorted(directory.glob("seg-*.slots")):
        pages = np.memmap(path, np.uint8, "r").reshape(-1, HEADER_BYTES)
        heads = np.ascontiguousarray(pages[:, : META.itemsize]).view(META).reshape(-1)
        heads = heads[(heads["store"] == np.frombuffer(store, np.uint8)).all(axis=1)]
        heads = heads[intact(heads, record_checksum)]
        count += len({*zip(heads["segment"].tolist(), heads["offset"].tolist(), strict=True)} - indexed)
    return count


def _find_identity(directory: Path, part: Part) -> bytes | None:
    """The store's id, if this version reads all of its files."""
    path = directory / "store.json"
    try:
        check_versions(directory)
        return bytes.fromhex(json.loads(path.read_bytes())["store"])
    except VersionMismatch as error:
        part.add(str(directory), str(error).partition("; ")[0], NO_START)
    except (ValueError, KeyError, TypeError, TierdError) as error:
        part.add(
            str(path), f"not a description of a store ({error})", f"{NO_START}: restore it, or remove the directory"
        )
    return None


def _record_notice(notice: str, directory: Path, store: bytes, part: Part) -> None:
    """Record a notice of the index's reader. A journal tail cut by a crash is only a note."""
    words = notice.partition(":")[0].split()
    if words[0] == "journal" and is_torn(directory, store=store, number=int(words[1]), disk=DISK):
        part.notes.append(notice)
    elif words[0] == "journal":
        fault = "a record's checksum does not match"
        part.add(str(journal_path(directory, int(words[1]))), fault, "the rest of it is cut; its blocks are misses")
    else:
        part.add_notice(notice)


def _check_rows(directory: Path, loaded: recovery.Loaded, *, store: bytes, part: Part) -> None:
    """Report damaged pieces of a snapshot, which its reader skips silently."""
    if loaded.base is None:
        return
    path = snapshot_path(directory, loaded.base)
    expected = int(np.fromfile(path, dtype=HEADER, count=1)[0]["rows"])
    found = len(read_snapshot(directory, store=store, number=loaded.base, disk=DISK).metas)
    if found < expected:
        part.add(str(path), f"{expected - found} of {expected} rows are in damaged pieces", f"those blocks are {MISS}")


def _check_slots(spec: TierSpec, directory: Path, index: StoredIndex, *, store: bytes, part: Part) -> Iterator[None]:
    part.total_bytes = int(index.metas["stored_length"].sum())
    places = spec.capacity_bytes // spec.segment_bytes
    for begun in sorted(index.segments.values(), key=lambda segment: segment.place):
        metas = index.metas[index.metas["segment"] == begun.segment]
        if begun.place >= places or begun.pages * begun.class_bytes > spec.segment_bytes:
            if len(metas):
                part.notes.append(f"segment {begun.segment}: {len(metas)} blocks do not fit the configured sizes")
            continue
        yield from _check_segment(directory, begun, metas[np.argsort(metas["offset"])], store=store, part=part)


def _check_segment(
    directory: Path, begun: SegmentBegun, metas: StructArray, *, store: bytes, part: Part
) -> Iterator[None]:
    path = slots_path(directory, begun.place)
    part.files += 1
    if not path.exists():
        if len(metas):
            part.add(str(path), f"missing, {len(metas)} blocks should be there", f"they are {MISS}")
        return
    fd = DISK.open(path, os.O_RDONLY)
    try:
        for meta in metas:
            fault = _find_fault(fd, meta, store=store)
            part.blocks += 1
            part.bytes += int(meta["stored_length"])
            slot = int(meta["offset"]) // begun.class_bytes
            if fault == REUSED:
                part.notes.append(f"{path} slot {slot}: {REUSED}")
            elif fault:
                part.add(f"{path} slot {slot}", fault, MISS)
            yield
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _find_fault(fd: int, meta: np.void, *, store: bytes) -> str:
    """The fault of an indexed block's slot; empty if there is none."""
    length, offset = int(meta["stored_length"]), int(meta["offset"])
    try:
        raw = os.pread(fd, HEADER_BYTES + length, offset)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if len(raw) < HEADER_BYTES + length:
        return "the file ends before it"
    headers = np.frombuffer(raw, np.uint8, HEADER_BYTES).reshape(1, HEADER_BYTES)
    found, tables = read_tables(headers)
    table, record = tables[0], found[0]
    if table is None:
        return "its header is damaged"
    is_same = matches(found, np.array([meta]), _extent(meta), store=store)[0]
    if not is_same or record["digest"].tobytes() != meta["digest"].tobytes():
        is_newer = record["store"].tobytes() == store and record["generation"] > meta["generation"]
        return REUSED if is_newer else "its header is another block's, or of another place"
    cuts = slice_lengths(length, int(record["layers"]))
    is_good = checksum.verify(memoryview(raw)[HEADER_BYTES:], table, cuts)
    return "" if is_good else "the bytes are not those of its digest"


def _extent(meta: np.void) -> StructArray:
    extent = np.zeros(1, EXTENT)
    for name in ("segment", "offset", "generation"):
        extent[name] = meta[name]
    extent["length"] = meta["stored_length"]
    return extent
