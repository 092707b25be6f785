"""The index of a store as a value: which blocks lie in which slots, and what the records of a journal make of it.

Purpose: `StoredIndex` and `replay`. Non-purpose: files. Invariants: at most one block per slot; every block lies in a segment that
is alive, on a slot of its class; of two records about one slot the later holds. Replaying is a matter of whole columns, so
that a hundred thousand blocks take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tierd.core.meta import META, is_meta
from tierd.core.model import PAGE_ALIGN_BYTES, StructArray
from tierd.tiers.journal import BlocksRemoved, BlocksStored, Marks, NamespaceKept, Record, SegmentBegun

Keys = NDArray[np.uint64]
GENERATION_LIMIT = np.uint64(1 << 63)
"""No page has had so many uses: a record that says so is none."""


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """segments: by place. metas: META [blocks]. namespaces: opaque, oldest first. next_*: first numbers never used."""

    segments: dict[int, SegmentBegun] = field(default_factory=dict)
    metas: StructArray = field(default_factory=lambda: np.zeros(0, META))
    namespaces: list[bytes] = field(default_factory=list)
    next_segment: int = 1
    next_generation: int = 1


def replay(index: StoredIndex, records: Iterable[Record]) -> StoredIndex:
    """The index after these records, in order."""
    segments, namespaces = dict(index.segments), dict.fromkeys(index.namespaces)
    marks = Marks(index.next_segment, index.next_generation)
    changes = _Changes(index.metas)
    for record in records:
        match record:
            case SegmentBegun():
                segments[record.place] = record
                marks = Marks(max(marks.next_segment, record.segment + 1), marks.next_generation)
            case BlocksStored():
                changes.store(record.metas)
            case BlocksRemoved():
                changes.remove(record.rows)
            case NamespaceKept():
                namespaces[record.record] = None
            case _:
                marks = _higher(marks, record)
    metas = changes.result()
    metas = metas[metas["generation"] < GENERATION_LIMIT]
    top = int(metas["generation"].max()) + 1 if len(metas) else 1
    marks = _higher(marks, Marks(1, top))
    after = StoredIndex(segments, metas, list(namespaces), marks.next_segment, marks.next_generation)
    return _consistent(after)


def select(index: StoredIndex, *, within: Callable[[SegmentBegun], bool]) -> StoredIndex:
    """The index with only those segments, and the blocks that truly lie in one of them."""
    segments = {place: segment for place, segment in index.segments.items() if within(segment)}
    return _consistent(replace(index, segments=segments))


def moved(index: StoredIndex, places: Mapping[int, int]) -> StoredIndex:
    """The index with these segments at other places. places: from, to; no target is in use."""
    segments = {places.get(at, at): replace(s, place=places.get(at, at)) for at, s in index.segments.items()}
    return replace(index, segments=segments)


def latest_times(metas: StructArray, segments: Iterable[SegmentBegun]) -> dict[int, int]:
    """Segment to when its newest block was committed, Unix milliseconds; 0 for one without blocks."""
    ids = np.unique(np.array([s.segment for s in segments], dtype=np.uint64))
    times = np.zeros(len(ids), dtype=metas["time_ms"].dtype)
    at = np.searchsorted(ids, metas["segment"])
    mine = np.flatnonzero(np.isin(metas["segment"], ids))
    np.maximum.at(times, at[mine], metas["time_ms"][mine])
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def slots_of(metas: StructArray, segments: Iterable[SegmentBegun]) -> NDArray[np.int64]:
    """The slot of each block within its segment: int64 [n]; -1 where it lies in none of these segments."""
    rows = sorted(segments, key=lambda s: s.segment)
    slots = np.full(len(metas), -1, dtype=np.int64)
    if not rows or not len(metas):
        return slots
    ids = np.array([s.segment for s in rows], dtype=np.int64)
    at = np.minimum(np.searchsorted(ids, metas["segment"]), len(ids) - 1)
    slot, rest = np.divmod(metas["offset"].astype(np.int64), np.array([s.class_bytes for s in rows])[at])
    pages = np.array([s.pages for s in rows], dtype=np.int64)[at]
    good = (ids[at] == metas["segment"]) & (rest == 0) & (slot >= 0) & (slot < pages)
    slots[good] = slot[good]
    return slots


def _consistent(index: StoredIndex) -> StoredIndex:
    """Less the blocks that lie in no living segment, or are no records that this version reads."""
    known = is_meta(index.metas)
    placed = slots_of(index.metas, index.segments.values()) >= 0
    good = known & placed
    return index if good.all() else replace(index, metas=index.metas[good])


def _higher(one: Marks, other: Marks) -> Marks:
    return Marks(
        max(one.next_segment, other.next_segment),
        max(one.next_generation, other.next_generation),
    )


def _keys(rows: StructArray) -> Keys:
    """One number per slot of the store; offsets are multiples of 4 KiB below 16 TiB."""
    offset = (rows["offset"] // PAGE_ALIGN_BYTES).astype(np.uint64) & np.uint64(0xFFFF_FFFF)
    return np.asarray(rows["segment"].astype(np.uint64) << np.uint64(32) | offset)


class _Changes:
    """Stored and removed rows in order; the last about a slot decides."""

    def __init__(self, metas: StructArray) -> None:
        self._metas = [metas]
        self._keys = [_keys(metas)]
        self._rows = [np.arange(len(metas))]  # into the concatenation of metas; -1: removed
        self._count = len(metas)

    def store(self, metas: StructArray) -> None:
        self._metas.append(metas)
        self._keys.append(_keys(metas))
        self._rows.append(np.arange(self._count, self._count + len(metas)))
        self._count += len(metas)

    def remove(self, rows: StructArray) -> None:
        self._keys.append(_keys(rows))
        self._rows.append(np.full(len(rows), -1))

    def result(self) -> StructArray:
        if len(self._keys) == 1:
            return self._metas[0]
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        _, from_end = np.unique(keys[::-1], return_index=True)
        kept = rows[::-1][from_end]
        # As bytes without fields: copying records field by field is many times slower.
        metas = np.concatenate([np.ascontiguousarray(m).view(f"V{META.itemsize}") for m in self._metas])
        return metas[kept[kept >= 0]].view(META)
