"""How far puts are written, said without a message: words on a board that the daemon gave, which its hash process reads.

Purpose: a word for each put under way. Non-purpose: what the daemon makes of it (cache/ahead.py). Invariants: a word is one put's at a time, and who has given up his put writes to it no more, though
a thread of his goes on; what it says has the tag of its put, so that of one which was given up the next one in its place says nothing; a put that finds none free is hashed when it is written. The
store comes after those of the copy on x86; where a processor reorders stores a block can be hashed too early, and is a miss later.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

TAG_BITS = 32
"""A word is {u4 blocks, u4 tag}, the lower half of a reservation's number (cache.proto)."""
_ALL = (1 << 64) - 1


class Board:
    """words: u8, shared with the daemon."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words
        self.free = list(range(len(words)))
        self.turn = threading.Lock()

    def take(self, reservation: int) -> Progress | None:
        """A word for one put, into pages of a reservation, if one is free."""
        with self.turn:
            return Progress(self, self.free.pop(), reservation) if self.free else None


class Progress:
    """How far one put is."""

    def __init__(self, board: Board, word: int, reservation: int) -> None:
        self._board, self._word, self._is_over = board, word, False
        self._tag = (reservation << TAG_BITS) & _ALL
        board.words[word] = self._tag

    @property
    def number(self) -> int:
        """Of its word, from 1."""
        return self._word + 1

    def note(self, blocks: int) -> None:
        """So many blocks are written, from the first on."""
        with self._board.turn:
            if not self._is_over:
                self._board.words[self._word] = self._tag | blocks

    def end(self) -> None:
        """Once: the put has been answered, or given up. The word is free."""
        with self._board.turn:
            self._is_over = True
            self._board.free.append(self._word)
