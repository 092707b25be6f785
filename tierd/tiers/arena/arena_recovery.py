"""Recovery of an arena: reads its files at start, before anything is written.

It keeps segments whose header and data file are whole and that fit, and drops the rest with a
notice. It does not verify pages: they are flagged UNVERIFIED and checked before others see them. A
catalogue of a newer version stops the start before any removal. A data file without a good
catalogue is unlinked, never reused, since a process may map it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tierd.core.formats.meta import META
from tierd.core.formats.model import (
    EXTENT,
    NO_PAGE,
    PAGE_ALIGN_BYTES,
    UNVERIFIED,
    SegmentAssignment,
    StructArray,
    TierSpec,
)
from tierd.errors import CorruptRecord, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.arena.catalogue import Catalogue, Survivors
from tierd.tiers.arena.data_files import SUFFIX as DATA_SUFFIX
from tierd.tiers.arena.data_files import DataFiles

SUFFIX = ".cat"


@dataclass(slots=True)
class FoundSegment:
    """A segment that is kept, with its catalogue and its memory."""

    catalogue: Catalogue
    memory: memoryview
    survivors: Survivors

    @property
    def assignment(self) -> SegmentAssignment:
        """As its header says."""
        return self.catalogue.head.assignment

    def extents(self) -> StructArray:
        """EXTENT of each survivor."""
        slots, metas, given = self.survivors.slots, self.survivors.metas, self.assignment
        rows = np.zeros(len(slots), dtype=EXTENT)
        rows["tier"], rows["flags"], rows["segment"], rows["page"] = given.tier, UNVERIFIED, given.segment, NO_PAGE
        rows["slot"], rows["offset"] = slots, metas["offset"]
        rows["length"], rows["generation"] = metas["stored_length"], metas["generation"]
        return rows


@dataclass(frozen=True, slots=True)
class Recovered:
    """segments: kept. highest_*: of all that were read. dropped: reasons, for people."""

    segments: list[FoundSegment]
    highest_segment: int
    highest_generation: int
    dropped: list[str]


def recover(tables: Path, data: DataFiles, *, spec: TierSpec, position: int, store: bytes) -> Recovered:
    """Keep segments that fit, remove other files. Raises VersionMismatch, OSError."""
    catalogues, dropped = _read_catalogues(tables, spec=spec, store=store)
    survivors = {segment: catalogue.survivors() for segment, catalogue in catalogues.items()}
    placed = _place(catalogues, survivors, places=spec.capacity_bytes // spec.segment_bytes)
    for segment in sorted(catalogues.keys() - placed.keys()):
        dropped.append(f"segment {segment}: {len(survivors[segment].slots)} blocks, beyond the tier's capacity")
    kept = []
    for segment, place in sorted(placed.items(), key=lambda item: item[1]):
        try:
            memory = data.adopt(segment)
        except (OSError, TierFailed) as error:
            dropped.append(f"segment {segment}: {error}")
            continue
        _settle(catalogues[segment], position=position, place=place)
        kept.append(FoundSegment(catalogues[segment], memory, survivors[segment]))
    failpoint("arena.recovery.before_removal")
    _remove_others(tables, data, keep={found.assignment.segment for found in kept})
    highest = max((s.highest for s in survivors.values()), default=0)
    return Recovered(kept, max(catalogues, default=0), highest, dropped)


def drop_everything(tables: Path, data: Path) -> None:
    """Unlink every segment and spare file. Processes that map one keep its bytes. Raises OSError."""
    for path in (*tables.glob(f"*{SUFFIX}"), *data.glob(f"*{DATA_SUFFIX}")):
        path.unlink()


def joined(found: Sequence[FoundSegment]) -> tuple[StructArray, StructArray]:
    """All survivors, cold to hot: EXTENT[n] and META[n]. The tail of a batch is the coldest."""
    if not found:
        return np.zeros(0, dtype=EXTENT), np.zeros(0, dtype=META)
    extents = np.concatenate([f.extents() for f in found])
    metas = np.concatenate([f.survivors.metas for f in found])
    order = np.lexsort((-metas["position"].astype(np.int64), metas["time_ms"]))
    return extents[order], metas[order]


def _read_catalogues(tables: Path, *, spec: TierSpec, store: bytes) -> tuple[dict[int, Catalogue], list[str]]:
    good: dict[int, Catalogue] = {}
    dropped: list[str] = []
    for path in sorted(tables.glob(f"*{SUFFIX}")):
        try:
            catalogue = Catalogue.open(path)
        except CorruptRecord as error:
            dropped.append(str(error))
            continue
        fault = find_fault(catalogue, name=path.stem, spec=spec, store=store)
        if fault:
            dropped.append(f"segment {path.stem}: {fault}")
        else:
            good[catalogue.head.assignment.segment] = catalogue
    return good, dropped


def find_fault(catalogue: Catalogue, *, name: str, spec: TierSpec, store: bytes) -> str | None:
    """Why a segment with a valid header cannot be kept. name: of its file, without the suffix."""
    head, given = catalogue.head, catalogue.head.assignment
    if head.store != store:
        return "it belongs to another arena"
    if name != str(given.segment):
        return f"its header says {given.segment}"
    if head.segment_bytes != spec.segment_bytes:
        return f"{head.segment_bytes} bytes, segments of this tier now have {spec.segment_bytes}"
    if (
        given.class_bytes <= 0
        or given.class_bytes % PAGE_ALIGN_BYTES
        or given.pages * given.class_bytes > head.segment_bytes
    ):
        return f"{given.pages} pages of {given.class_bytes} bytes do not lie in {head.segment_bytes}"
    return None


def _place(catalogues: dict[int, Catalogue], survivors: dict[int, Survivors], *, places: int) -> dict[int, int]:
    """Segment -> place: the hottest that fit, at their old places if these exist and are free."""
    heat = {segment: int(found.metas["time_ms"].max(initial=0)) for segment, found in survivors.items()}
    hottest = sorted(heat, key=lambda segment: (heat[segment], segment), reverse=True)[:places]
    placed: dict[int, int] = {}
    for segment in hottest:
        place = catalogues[segment].head.assignment.slot
        if place < places and place not in placed.values():
            placed[segment] = place
    taken = set(placed.values())
    free = (place for place in range(places) if place not in taken)
    for segment in hottest:
        if segment not in placed:
            placed[segment] = next(free)
    return placed


def _settle(catalogue: Catalogue, *, position: int, place: int) -> None:
    head = catalogue.head
    now = replace(head.assignment, tier=position, slot=place)
    if now != head.assignment:
        catalogue.write_head(replace(head, assignment=now))


def _remove_others(tables: Path, data: DataFiles, *, keep: set[int]) -> None:
    for path in tables.glob(f"*{SUFFIX}"):
        if path.stem not in {str(segment) for segment in keep}:
            path.unlink()
    for segment in data.find_segments():
        if segment not in keep:
            data.path(segment).unlink()
