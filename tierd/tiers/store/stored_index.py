"""The index of a store as a value: the blocks in its slots, and the effect of journal records.

No file is used here. A slot has at most one block. Every block is in a living segment, on a slot of
its class. Of two records about one slot the later wins. Replaying works on whole columns, so that
100,000 blocks take milliseconds. The rows of a snapshot of ten million blocks stay in its file, and
are read a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import distinct, true_rows
from tierd.core.formats.meta import META, is_meta, joined, picked, put_at
from tierd.core.formats.model import CODED, EXTENT, PAGE_ALIGN_BYTES, UNVERIFIED, SegmentAssignment, StructArray
from tierd.tiers.store.journal import REMOVED, BlocksRemoved, BlocksStored, Marks, NamespaceKept, Record, SegmentBegun

Keys = NDArray[np.uint64]
GENERATION_LIMIT = np.uint64(1 << 63)
"""No page has had so many uses: a record with more is invalid."""
STRETCH_ROWS = 1 << 13
PIECE_ROWS = 1 << 14
"""Rows of journals joined at a time: 4 MiB, a mapping that the kernel gets back when freed."""
_OFFSET = np.uint64(0xFFFF_FFFF)
"""Of a key: the pages before the slot."""


class Filed(Protocol):
    """Rows in a file. count: their maximum."""

    @property
    def count(self) -> int:
        """From the header of the file."""

    def stretches(self) -> Iterator[StructArray]:
        """META in order, some thousand at a time. Raises OSError."""


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """segments: by place. metas: META [blocks]. namespaces: opaque, oldest first. next_*: first
    numbers never used.

    filed: rows of older blocks in a file. journaled: slots with later records, ascending; for these
    only `metas` holds.
    """

    segments: dict[int, SegmentBegun] = field(default_factory=dict)
    metas: StructArray = field(default_factory=lambda: np.zeros(0, META))
    namespaces: list[bytes] = field(default_factory=list)
    next_segment: int = 1
    next_generation: int = 1
    filed: Filed | None = None
    journaled: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))


class Stretch(NamedTuple):
    """Some blocks of an index: metas META [n], slots int64 [n]."""

    metas: StructArray
    slots: NDArray[np.int64]


def stretches(index: StoredIndex) -> Iterator[Stretch]:
    """All blocks of the index, some thousand at a time, the filed ones first. Raises OSError."""
    for sift in unsifted(index):
        yield sift()


def unsifted(index: StoredIndex) -> Iterator[Callable[[], Stretch]]:
    """`stretches` in two steps: reading rows, and selecting blocks. Raises OSError."""
    for metas in index.filed.stretches() if index.filed else ():
        yield partial(_sift, index, metas, journaled=index.journaled)
    for start in range(0, len(index.metas), STRETCH_ROWS):
        yield partial(_sift, index, index.metas[start : start + STRETCH_ROWS], journaled=index.journaled[:0])


def gathered(index: StoredIndex) -> StoredIndex:
    """The same, all of it in memory. Raises OSError."""
    metas = joined([index.metas[:0], *(stretch.metas for stretch in stretches(index))])
    return replace(index, metas=metas, filed=None, journaled=index.journaled[:0])


def assignment_of(begun: SegmentBegun, *, tier: int) -> SegmentAssignment:
    """The segment in the core's form. tier: its position."""
    return SegmentAssignment(
        tier=tier,
        slot=begun.place,
        segment=begun.segment,
        domain=begun.domain,
        class_bytes=begun.class_bytes,
        pages=begun.pages,
        writer=0,
        replaces=None,
        fresh=False,
    )


def extents_of(metas: StructArray, slots: NDArray[np.int64], *, tier: int) -> StructArray:
    """EXTENT [n] of blocks, META [n]. tier: the store's position."""
    extents = np.zeros(len(metas), dtype=EXTENT)
    extents["tier"], extents["page"], extents["slot"] = tier, -1, slots
    # A slot may be overwritten before the removal of its block is durable.
    extents["flags"] = np.where(metas["codec"] > 0, UNVERIFIED | CODED, UNVERIFIED)
    extents["length"] = metas["stored_length"]
    for name in ("segment", "offset", "generation"):
        extents[name] = metas[name]
    return extents


def count_of(index: StoredIndex) -> int:
    """Number of blocks. Raises OSError."""
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
    metas, keys = changes.result()
    metas = picked(metas, true_rows(metas["generation"] < GENERATION_LIMIT))
    top = int(metas["generation"].max()) + 1 if len(metas) else 1
    marks = _higher(marks, Marks(1, top))
    journaled = distinct(np.concatenate((index.journaled, keys))) if index.filed else index.journaled
    after = StoredIndex(
        segments, metas, list(namespaces), marks.next_segment, marks.next_generation, index.filed, journaled
    )
    return _consistent(after)


def changes_since(snapshot: StoredIndex, index: StoredIndex) -> Iterator[Record]:
    """Changes between the two, without marks: the last record of each place, slot and name. index:
    replayed over the snapshot, whose rows are filed.

    Replaying them over the snapshot, even after some of the original records, gives the index
    again. Only the order of names may differ.
    """
    yield from (segment for place, segment in index.segments.items() if snapshot.segments.get(place) != segment)
    known = set(snapshot.namespaces)
    yield from (NamespaceKept(name) for name in index.namespaces if name not in known)
    emptied = np.setdiff1d(index.journaled, _keys(index.metas), assume_unique=True)
    rows = np.zeros(len(emptied), dtype=REMOVED)
    rows["segment"] = emptied >> np.uint64(32)
    rows["offset"] = (emptied & _OFFSET) * np.uint64(PAGE_ALIGN_BYTES)
    living = [segment.segment for segment in index.segments.values()]
    rows = rows[np.isin(rows["segment"], living)]
    if len(rows):
        yield BlocksRemoved(rows)
    for start in range(0, len(index.metas), STRETCH_ROWS):
        yield BlocksStored(index.metas[start : start + STRETCH_ROWS])


def select(index: StoredIndex, *, within: Callable[[SegmentBegun], bool]) -> StoredIndex:
    """The index with only those segments, and their blocks."""
    segments = {place: segment for place, segment in index.segments.items() if within(segment)}
    return _consistent(replace(index, segments=segments))


def moved(index: StoredIndex, places: Mapping[int, int]) -> StoredIndex:
    """The index with these segments at other places. places: from, to; no target is in use."""
    segments = {places.get(at, at): replace(s, place=places.get(at, at)) for at, s in index.segments.items()}
    return replace(index, segments=segments)


def latest_times(index: StoredIndex) -> dict[int, int]:
    """Commit time of each segment's newest block, Unix ms; 0 without blocks. Raises OSError."""
    ids = np.unique(np.array([s.segment for s in index.segments.values()], dtype=np.uint64))
    times = np.zeros(len(ids), dtype=np.uint64)
    for metas, _ in stretches(index):
        np.maximum.at(times, np.searchsorted(ids, metas["segment"]), metas["time_ms"])
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def slots_of(metas: StructArray, segments: Iterable[SegmentBegun]) -> NDArray[np.int64]:
    """The slot of each block within its segment: int64 [n]; -1 if it is in none of these segments."""
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
    """Without blocks in memory that are in no living segment, or are unreadable by this version."""
    return replace(index, metas=_sound(index.metas, index.segments).metas)


def _sound(metas: StructArray, segments: Mapping[int, SegmentBegun]) -> Stretch:
    """The blocks in living segments that this version can read."""
    slots = slots_of(metas, segments.values())
    good = true_rows(is_meta(metas) & (slots >= 0) & (metas["generation"] < GENERATION_LIMIT))
    return Stretch(picked(metas, good), slots[good])


def _higher(one: Marks, other: Marks) -> Marks:
    return Marks(
        max(one.next_segment, other.next_segment),
        max(one.next_generation, other.next_generation),
    )


def _keys(rows: StructArray) -> Keys:
    """One number per slot of the store; offsets are multiples of 4 KiB below 16 TiB."""
    offset = (rows["offset"] // PAGE_ALIGN_BYTES).astype(np.uint64) & _OFFSET
    return np.asarray(rows["segment"].astype(np.uint64) << np.uint64(32) | offset)


def _sift(index: StoredIndex, metas: StructArray, *, journaled: Keys) -> Stretch:
    if len(journaled):
        metas = picked(metas, true_rows(~_among(_keys(metas), journaled)))
    return _sound(metas, index.segments)


def _among(keys: Keys, pool: Keys) -> NDArray[np.bool_]:
    """Which keys are in the pool, which ascends."""
    at = np.minimum(np.searchsorted(pool, keys), len(pool) - 1)
    return np.asarray(pool[at] == keys)


class _Piece(NamedTuple):
    """metas: META [m]. keys [n]: slots in the order of records.
    rows int64 [n]: index of the slot's block in metas; -1: none."""

    metas: StructArray
    keys: Keys
    rows: NDArray[np.int64]


class _Changes:
    """Stored and removed rows in order; the last about a slot wins. Some thousand are joined at a
    time. Joining all at once would block every other thread during the copy."""

    def __init__(self, metas: StructArray) -> None:
        self._pieces = list[_Piece]()
        self._begin()
        self.store(metas)

    def store(self, metas: StructArray) -> None:
        self._stored.append(metas)
        self._note(len(metas), is_stored=True)

    def remove(self, rows: StructArray) -> None:
        self._removed.append(rows)
        self._note(len(rows), is_stored=False)

    def result(self) -> tuple[StructArray, Keys]:
        """The valid rows, and the slots with records, both ascending by slot. Call it once."""
        if self._order:
            self._finish()
        keys, rows = (np.concatenate(parts) for parts in zip(*(piece[1:] for piece in self._pieces), strict=True))
        end = len(keys)
        journaled, from_end = np.unique(keys[::-1], return_index=True)
        last = end - 1 - from_end
        last = last[rows[last] >= 0]
        metas, order = np.empty(len(last), META), np.argsort(last)
        while self._pieces:  # the latest first, whose memory was allocated last
            piece = self._pieces.pop()
            begin = end - len(piece.keys)
            at = order[slice(*np.searchsorted(last, (begin, end), sorter=order))]
            put_at(metas, at, piece.metas.take(rows[last[at]]))
            end = begin
        return metas, journaled

    def _begin(self) -> None:
        self._stored, self._removed = list[StructArray](), list[StructArray]()
        self._order, self._count = list[tuple[bool, int]](), 0

    def _note(self, count: int, *, is_stored: bool) -> None:
        self._order.append((is_stored, count))
        self._count += count
        if self._count >= PIECE_ROWS:
            self._finish()

    def _finish(self) -> None:
        """Make a piece of the records since the last one."""
        metas = joined(self._stored or [np.empty(0, META)])
        kinds, counts = zip(*self._order, strict=True)
        are_stored = np.repeat(kinds, counts)
        keys, rows = np.empty(len(are_stored), np.uint64), np.full(len(are_stored), -1)
        keys[are_stored], rows[are_stored] = _keys(metas), np.arange(len(metas))
        if self._removed:
            keys[~are_stored] = _keys(np.concatenate(self._removed))
        self._pieces.append(_Piece(metas, keys, rows))
        self._begin()
