"""Check of an arena that no daemon has open: its head, catalogues, names and every page's digest.

The check repairs nothing (the daemon's start does) and writes nothing: a reader that repairs gets a
copy. Processes that still map the files are not considered. Normal traces of a crash are notes, not
findings: a catalogue without a head, an entry whose page was just freed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierd import checksum
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.layout import CATALOGUE_HEADER, HEADER_BYTES, NO_GENERATION, RETIRED
from tierd.core.formats.meta import META
from tierd.core.formats.model import TierSpec
from tierd.errors import CorruptRecord, VersionMismatch
from tierd.tiers.arena import marks
from tierd.tiers.arena.arena_recovery import SUFFIX, find_fault
from tierd.tiers.arena.catalogue import Catalogue, Survivors, read_head
from tierd.tiers.arena.data_files import SUFFIX as DATA_SUFFIX
from tierd.tiers.arena.holds import HoldTable
from tierd.tiers.fsck.fsck import Part, copied
from tierd.tiers.io.format_check import check_versions

MARKS_NAME = "arena.tbl"
NAMES_NAME = "namespaces.log"
DROPPED = "the segment is dropped: its blocks are misses"


def check_arena(spec: TierSpec, *, data: Path, tables: Path, part: Part) -> Iterator[None]:
    """Check everything; yields after each page. Raises OSError if files cannot be read."""
    if not (tables / MARKS_NAME).exists():
        return
    try:
        check_versions(tables)
        with copied(tables / MARKS_NAME) as path:
            store = marks.Marks(path).store
    except VersionMismatch as error:
        part.add(str(tables), str(error).partition("; ")[0], "the daemon does not start")
        return
    except CorruptRecord as error:
        fault = str(error).rpartition(": ")[2]
        part.add(str(tables / MARKS_NAME), fault, "the arena starts empty: every block in it is a miss")
        return
    _check_names(tables / NAMES_NAME, part)
    found = [segment for path in sorted(tables.glob(f"*{SUFFIX}")) if (segment := _read(path, spec, store, part))]
    part.files += 2 + len(found)
    part.total_bytes = sum(int(survivors.metas["stored_length"].sum()) for _, survivors in found)
    for catalogue, survivors in found:
        yield from _check_pages(catalogue, survivors, data=data, part=part)


def check_holds(path: Path, part: Part) -> None:
    """Check a session table."""
    if not path.exists():
        return
    part.files += 1

    def found(fault: str) -> None:
        outcome = "recovered segments are verified at every hit and freed whole"
        part.add(str(path), fault.partition(": ")[2], outcome)

    with copied(path) as copy:
        try:
            table = HoldTable(copy)
            table.open(distrust=found)
            table.close(release=False)
        except VersionMismatch as error:
            part.add(str(path), str(error).partition("; ")[0], "the daemon does not start")


def _check_names(path: Path, part: Part) -> None:
    """Check a log of records. A torn end is normal; other mismatches are damage."""
    if not path.exists():
        return
    with copied(path) as copy:
        marks.read_records(copy)
        rest = path.read_bytes()[copy.stat().st_size :]
    if not rest:
        return
    if len(rest) < 16 or int.from_bytes(rest[:8], "little") > len(rest) - 16:
        part.notes.append(f"{path}: a torn record of {len(rest)} bytes at the end")
    else:
        part.add(
            str(path),
            "a record's checksum does not match",
            "it is cut there; blocks of namespaces known nowhere else are misses",
        )


def _read(path: Path, spec: TierSpec, store: bytes, part: Part) -> tuple[Catalogue, Survivors] | None:
    """A copy of a catalogue and its valid entries; None if the segment would be dropped."""
    raw = bytearray(path.read_bytes())
    if not any(raw[:HEADER_BYTES]):
        part.notes.append(f"{path}: a segment that was about to begin")
        return None
    try:
        head = read_head(bytes(raw[: CATALOGUE_HEADER.itemsize]), name=str(path))
    except CorruptRecord as error:
        part.add(str(path), str(error).partition(": ")[2].partition("; ")[0], DROPPED)
        return None
    if len(raw) != head.layout.total_bytes:
        part.add(str(path), f"{len(raw)} bytes, its header asks for {head.layout.total_bytes}", DROPPED)
        return None
    catalogue = Catalogue(memoryview(raw), head=head)
    fault = find_fault(catalogue, name=path.stem, spec=spec, store=store)
    if fault:
        part.add(str(path), fault, DROPPED)
        return None
    survivors = catalogue.survivors()
    _check_entries(path, raw, catalogue, survivors, part)
    return catalogue, survivors


def _check_entries(path: Path, raw: bytearray, catalogue: Catalogue, survivors: Survivors, part: Part) -> None:
    pages, layout = catalogue.head.assignment.pages, catalogue.layout
    written = np.flatnonzero(np.frombuffer(raw, META, pages, layout.meta_offset)["checksum"])
    words = np.frombuffer(raw, "<u8", pages, HEADER_BYTES)
    for slot in np.setdiff1d(written, survivors.slots).tolist():
        if words[slot] == NO_GENERATION:
            part.notes.append(f"{path} page {slot}: freed shortly before the end")
        elif words[slot] & RETIRED:
            part.notes.append(f"{path} page {slot}: no block any more, and held by a lease at the end")
        else:
            part.add(f"{path} page {slot}", "its entry is damaged", "a miss")


def _check_pages(catalogue: Catalogue, survivors: Survivors, *, data: Path, part: Part) -> Iterator[None]:
    head, path = catalogue.head, data / f"{catalogue.head.assignment.segment}{DATA_SUFFIX}"
    size = path.stat().st_size if path.exists() else -1
    if size != head.segment_bytes:
        if len(survivors.slots):
            part.add(
                str(path), "missing" if size < 0 else f"{size} bytes, not the segment's {head.segment_bytes}", DROPPED
            )
        return
    part.files += 1
    tables = catalogue.find_tables(survivors.slots, survivors.metas["generation"])
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for slot, meta, table in zip(survivors.slots.tolist(), survivors.metas, tables, strict=True):
            length = int(meta["stored_length"])
            raw = os.pread(fd, length, int(meta["offset"]))
            cuts = slice_lengths(length, int(meta["layers"]))
            part.blocks += 1
            part.bytes += length
            if table is None or not checksum.verify(raw, table, cuts):
                part.add(f"{path} page {slot}", "the bytes are not those of its digest", "a miss at its first hit")
            yield
    finally:
        os.close(fd)
