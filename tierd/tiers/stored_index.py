"""The index of a store as a value: which blocks lie in which slots, and what the records of a journal make of it.

Purpose: `StoredIndex`, `replay` and `stretches`. Non-purpose: files. Invariants: at most one block per slot; every block lies in a segment that
is alive, on a slot of its class; of two records about one slot the later holds. Replaying is a matter of whole columns, so
that a hundred thousand blocks take milliseconds. What a snapshot says of ten million stays in its file, and is gone through a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.core.meta import META, is_meta
from tierd.core.model import PAGE_ALIGN_BYTES, StructArray
from tierd.core.sets import every
from tierd.tiers.journal import BlocksRemoved, BlocksStored, Marks, NamespaceKept, Record, SegmentBegun

Keys = NDArray[np.uint64]
GENERATION_LIMIT = np.uint64(1 << 63)
"""No page has had so many uses: a record that says so is none."""
STRETCH_ROWS = 1 << 13


class Filed(Protocol):
    """Rows that lie in a file. count: at most so many."""

    @property
    def count(self) -> int:
        """As the header of the file says."""

    def stretches(self) -> Iterator[StructArray]:
        """META, in order, some thousand at a time. Raises OSError."""


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """segments: by place. metas: META [blocks]. namespaces: opaque, oldest first. next_*: first numbers never used.

    filed: more rows, those of the older blocks. told: the slots of which something was told since they were filed, ascending; in these `metas` alone holds.
    """

    segments: dict[int, SegmentBegun] = field(default_factory=dict)
    metas: StructArray = field(default_factory=lambda: np.zeros(0, META))
    namespaces: list[bytes] = field(default_factory=list)
    next_segment: int = 1
    next_generation: int = 1
    filed: Filed | None = None
    told: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))


class Stretch(NamedTuple):
    """Some blocks of an index: metas META [n], slots int64 [n]."""

    metas: StructArray
    slots: NDArray[np.int64]


def stretches(index: StoredIndex) -> Iterator[Stretch]:
    """All blocks of the index, some thousand at a time, the filed ones first. Raises OSError."""
    for sift in unsifted(index):
        yield sift()


def unsifted(index: StoredIndex) -> Iterator[Callable[[], Stretch]]:
    """`stretches` in two steps: what blocks, and the rest of it. Raises OSError."""
    for metas in index.filed.stretches() if index.filed else ():
        yield partial(_sift, index, metas, told=index.told)
    for start in range(0, len(index.metas), STRETCH_ROWS):
        yield partial(_sift, index, index.metas[start : start + STRETCH_ROWS], told=index.told[:0])


def gathered(index: StoredIndex) -> StoredIndex:
    """The same, all of it in memory. Raises OSError."""
    metas = [_raw(stretch.metas) for stretch in stretches(index)]
    whole = np.concatenate([_raw(index.metas[:0]), *metas]).view(META)
    return replace(index, metas=whole, filed=None, told=index.told[:0])


def count_of(index: StoredIndex) -> int:
    """How many blocks are in it. Raises OSError."""
    return sum(len(stretch.metas) for stretch in stretches(index))


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
    told = np.union1d(index.told, changes.told()) if index.filed else index.told
    after = StoredIndex(segments, metas, list(namespaces), marks.next_segment, marks.next_generation, index.filed, told)
    return _consistent(after)


def select(index: StoredIndex, *, within: Callable[[SegmentBegun], bool]) -> StoredIndex:
    """The index with only those segments, and the blocks that truly lie in one of them."""
    segments = {place: segment for place, segment in index.segments.items() if within(segment)}
    return _consistent(replace(index, segments=segments))


def moved(index: StoredIndex, places: Mapping[int, int]) -> StoredIndex:
    """The index with these segments at other places. places: from, to; no target is in use."""
    segments = {places.get(at, at): replace(s, place=places.get(at, at)) for at, s in index.segments.items()}
    return replace(index, segments=segments)


def latest_times(index: StoredIndex) -> dict[int, int]:
    """Segment to when its newest block was committed, Unix milliseconds; 0 for one without blocks. Raises OSError."""
    ids = np.unique(np.array([s.segment for s in index.segments.values()], dtype=np.uint64))
    times = np.zeros(len(ids), dtype=np.uint64)
    for metas, _ in stretches(index):
        np.maximum.at(times, np.searchsorted(ids, metas["segment"]), metas["time_ms"])
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
    """Less the blocks in memory that lie in no living segment, or are no records that this version reads."""
    return replace(index, metas=_sound(index.metas, index.segments).metas)


def _sound(metas: StructArray, segments: Mapping[int, SegmentBegun]) -> Stretch:
    """Those that lie in a living segment, and are records that this version reads."""
    slots = slots_of(metas, segments.values())
    good = is_meta(metas) & (slots >= 0) & (metas["generation"] < GENERATION_LIMIT)
    return Stretch(metas, slots) if every(good) else Stretch(metas[good], slots[good])


def _higher(one: Marks, other: Marks) -> Marks:
    return Marks(
        max(one.next_segment, other.next_segment),
        max(one.next_generation, other.next_generation),
    )


def _keys(rows: StructArray) -> Keys:
    """One number per slot of the store; offsets are multiples of 4 KiB below 16 TiB."""
    offset = (rows["offset"] // PAGE_ALIGN_BYTES).astype(np.uint64) & np.uint64(0xFFFF_FFFF)
    return np.asarray(rows["segment"].astype(np.uint64) << np.uint64(32) | offset)


def _sift(index: StoredIndex, metas: StructArray, *, told: Keys) -> Stretch:
    return _sound(metas[~_among(_keys(metas), told)] if len(told) else metas, index.segments)


def _among(keys: Keys, pool: Keys) -> NDArray[np.bool_]:
    """Which keys are in the pool, which ascends."""
    at = np.minimum(np.searchsorted(pool, keys), len(pool) - 1)
    return np.asarray(pool[at] == keys)


def _raw(metas: StructArray) -> NDArray[np.void]:
    """As bytes without fields: copying records field by field is many times slower."""
    return np.ascontiguousarray(metas).view(f"V{META.itemsize}")


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

    def told(self) -> Keys:
        """The slots of which something was told, in no order."""
        return np.concatenate(self._keys)

    def result(self) -> StructArray:
        if len(self._keys) == 1:
            return self._metas[0]
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        _, from_end = np.unique(keys[::-1], return_index=True)
        kept = rows[::-1][from_end]
        metas = np.concatenate([_raw(m) for m in self._metas])
        return metas[kept[kept >= 0]].view(META)
