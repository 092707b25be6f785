"""How far puts are written, said without a message: words on a board that the daemon gave, which its hash process reads.

Purpose: a word for each put under way. Non-purpose: that all is written, which the daemon hears over the session socket and goes by (session.py). Invariants: a word is one put's at a time, and who
has given up his put writes to it no more, though a thread of his goes on; a put that finds none free is hashed when it is written. The store comes after those of the copy on x86; where a processor
reorders stores a block can be hashed too early, and is a miss later.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray


class Board:
    """words: u8, shared with the daemon."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words
        self.free = list(range(len(words)))
        self.turn = threading.Lock()

    def take(self) -> Progress | None:
        """A word for one put, if one is free."""
        with self.turn:
            return Progress(self, self.free.pop()) if self.free else None


class Progress:
    """How far one put is."""

    def __init__(self, board: Board, word: int) -> None:
        self._board, self._word, self._is_over = board, word, False
        board.words[word] = 0

    @property
    def number(self) -> int:
        """Of its word, from 1."""
        return self._word + 1

    def note(self, blocks: int) -> None:
        """So many blocks are written, from the first on."""
        with self._board.turn:
            if not self._is_over:
                self._board.words[self._word] = blocks

    def end(self) -> None:
        """Once: the put has been answered, or given up. The word is free."""
        with self._board.turn:
            self._is_over = True
            self._board.free.append(self._word)
