"""UseOrder: blocks from the least to the most recently used, kept as a log instead of a sorted set.

LRU is this order; elsewhere it breaks ties. The policy passes in a column of stamps, which says
which blocks are tracked. Stamps in the log ascend. An entry is alive while its stamp is the one in
the column for its block, so at most one entry of a block is.

A use appends an entry, and the old entry is dead from then on. So a use costs the same for any
number of blocks, and no sort is needed. The log is a list of pieces. Dead entries are dropped from
the front during a search for victims, and from the last piece when it is full. A round that
advances with the uses packs the other pieces one by one, so no call pays for the whole log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import lengthen, rows_for
from tierd.core.eviction import Ids, Mask

Item = TypeVar("Item", bound=np.generic)
Stamps = NDArray[np.int64]
"""By block id: the number of its last use, 0 if it is not tracked."""

FIRST_ENTRIES = 64
PIECE_ENTRIES = 1 << 14
ROUND_ENTRIES = 2
"""Entries that the round looks at for each one appended."""
_SCAN_ENTRIES = 64
"""Least number of entries per numpy step: below it the call's overhead dominates."""
_STEPS = 4
"""Entries at the front that are looked at one by one: cheaper if one is evicted at a time."""
_SPAN = (1 << 31) - 1
"""The largest stamp in a piece, as uint32 above its base, and distance of two joined bases."""


def grown(column: NDArray[Item], size: int) -> NDArray[Item]:
    """The column with room for at least `size` entries, new ones zero."""
    if size > len(column):
        lengthen(column, rows_for(len(column), size))
    return column


def stamped(stamps: Stamps, blocks: Ids) -> Mask:
    """Which of the blocks have a stamp."""
    known = blocks < len(stamps)
    known[known] = stamps[blocks[known]] > 0
    return np.asarray(known, np.bool_)


class _Piece:
    """A stretch of the log. head: no entry before it is alive."""

    __slots__ = ("base", "blocks", "head", "offsets", "size")

    def __init__(self, base: int) -> None:
        self.base, self.head, self.size = base, 0, 0
        self.blocks, self.offsets = np.zeros(FIRST_ENTRIES, np.int32), np.zeros(FIRST_ENTRIES, np.uint32)

    def alive(self, start: int, stop: int, stamps: Stamps) -> Mask:
        """Which of the entries are alive."""
        alive: Mask = stamps[self.blocks[start:stop]] == self.offsets[start:stop] + np.int64(self.base)
        return alive

    def pack(self, stamps: Stamps) -> None:
        """Drops the dead."""
        rows = self.head + np.flatnonzero(self.alive(self.head, self.size, stamps))
        self.head, self.size = 0, len(rows)
        self.blocks[: self.size], self.offsets[: self.size] = self.blocks[rows], self.offsets[rows]

    def put(self, blocks: Ids, stamp: int) -> None:
        """Appends entries; the caller checked that there is room."""
        stop = self.size + len(blocks)
        self.blocks[self.size : stop] = blocks
        self.offsets[self.size : stop] = np.arange(stamp - self.base, stamp - self.base + len(blocks))
        self.size = stop

    def trim(self) -> None:
        """Releases the memory beyond the entries."""
        self.blocks, self.offsets = (
            self.blocks[self.head : self.size].copy(),
            self.offsets[self.head : self.size].copy(),
        )
        self.head, self.size = 0, len(self.blocks)


class UseOrder:
    """A log of (block, stamp)."""

    __slots__ = ("_due", "_pieces", "_round")

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._round = 0  # the piece that the round looks at next
        self._due = 0  # entries that it should have looked at

    def __len__(self) -> int:
        """Entries, alive or dead, that memory is allocated for."""
        return sum(len(piece.blocks) for piece in self._pieces)

    def append(self, blocks: Ids, first_stamp: int, stamps: Stamps) -> None:
        """Adds entries stamped first_stamp, first_stamp + 1, ...; by `stamps` older ones die."""
        at = 0
        while at < len(blocks):
            piece = self._last(first_stamp + at, stamps)
            stop = at + len(piece.blocks) - piece.size
            piece.put(blocks[at:stop], first_stamp + at)
            at = stop
        self._due += ROUND_ENTRIES * len(blocks)
        if self._due >= PIECE_ENTRIES:
            self._go_on(stamps)

    def oldest(self, count: int, stamps: Stamps, pinned: Mask) -> Ids:
        """Up to `count` blocks that are alive and not pinned, oldest first."""
        self._drop_dead_front(stamps)
        if count == 1 and self._pieces and not pinned[first := self._pieces[0].blocks[self._pieces[0].head]]:
            return np.array([first], np.int64)
        found: list[Ids] = [np.zeros(0, np.int64)]
        missing = count
        for blocks in self.walk(stamps, max(_SCAN_ENTRIES, count)) if count else ():
            found.append(blocks[~pinned[blocks]][:missing])
            missing -= len(found[-1])
            if not missing:
                break
        return np.concatenate(found)

    def walk(self, stamps: Stamps, step: int = _SCAN_ENTRIES) -> Iterator[Ids]:
        """All alive blocks, oldest first, in parts that grow from `step` entries. The log must not
        change meanwhile."""
        self._drop_dead_front(stamps)
        for piece in self._pieces:
            at = piece.head
            while at < piece.size:
                stop = min(at + step, piece.size)
                yield piece.blocks[at:stop][piece.alive(at, stop, stamps)].astype(np.int64)
                at, step = stop, 2 * step

    def _last(self, stamp: int, stamps: Stamps) -> _Piece:
        """The last piece, with room for an entry."""
        piece = self._pieces[-1] if self._pieces else None
        if piece is not None and piece.size == len(piece.blocks):
            piece.pack(stamps)
            if 2 * piece.size > len(piece.blocks):
                if len(piece.blocks) < PIECE_ENTRIES:
                    for column in (piece.blocks, piece.offsets):
                        lengthen(column, 2 * len(column))
                else:
                    piece.trim()
                    piece = None
        if piece is None or stamp - piece.base > _SPAN:
            piece = _Piece(stamp)
            self._pieces.append(piece)
        return piece

    def _go_on(self, stamps: Stamps) -> None:
        """The round: drops the dead, and joins a small piece to the one before."""
        self._drop_dead_front(stamps)
        while self._due >= PIECE_ENTRIES and len(self._pieces) > 1:
            self._due -= PIECE_ENTRIES
            at = self._round % (len(self._pieces) - 1)
            self._pieces[at].pack(stamps)
            self._pieces[at].trim()
            self._round = at if at and self._join(at) else at + 1
        self._due %= PIECE_ENTRIES

    def _join(self, at: int) -> bool:
        """Appends a packed piece to the one before it, if one can hold both."""
        before, piece = self._pieces[at - 1 : at + 1]
        shift = piece.base - before.base
        fits = before.size - before.head + piece.size <= PIECE_ENTRIES and shift <= _SPAN
        if fits:
            before.blocks = np.concatenate((before.blocks[before.head : before.size], piece.blocks))
            before.offsets = np.concatenate(
                (before.offsets[before.head : before.size], piece.offsets + np.uint32(shift))
            )
            before.head, before.size = 0, len(before.blocks)
            del self._pieces[at]
        return fits

    def _drop_dead_front(self, stamps: Stamps) -> None:
        while self._pieces:
            piece = self._pieces[0]
            for head in range(piece.head, min(piece.head + _STEPS, piece.size)):
                if stamps[piece.blocks[head]] == piece.base + int(piece.offsets[head]):
                    piece.head = head
                    return
            step = _SCAN_ENTRIES
            while piece.head < piece.size:
                stop, step = min(piece.head + step, piece.size), 2 * step
                alive = piece.alive(piece.head, stop, stamps)
                if alive.any():
                    piece.head += int(alive.argmax())
                    return
                piece.head = stop
            del self._pieces[0]
            self._round = max(0, self._round - 1)
