"""Words on a board: one put's at a time."""

from __future__ import annotations

import os

import numpy as np

from tierd.client.progress import Board
from tierd.client.session import _board


def test_a_word_is_one_puts_at_a_time() -> None:
    """There are as many puts as words, and a new one begins at 0, with the lower half of its reservation's number as its tag."""
    words = np.zeros(3, np.uint64)
    board = Board(words)
    puts = [board.take(9) for _ in range(4)]
    assert puts.pop() is None
    assert sorted(put.number for put in puts if put) == [1, 2, 3]
    for put in puts:
        assert put
        put.note(put.number)
        put.end()
    again = board.take((1 << 32) + 5)
    assert again
    assert words.tolist().count(5 << 32) == 1
    assert words[again.number - 1] == 5 << 32
    again.note(3)
    assert words[again.number - 1] == 5 << 32 | 3


def test_who_has_given_up_says_nothing_of_others() -> None:
    """A thread that still copies for a put that was cancelled leaves the word to the put that has it now."""
    board = Board(np.zeros(1, np.uint64))
    given_up = board.take(1)
    assert given_up
    given_up.end()
    now = board.take(2)
    assert now
    now.note(1)
    given_up.note(7)
    assert board.words.tolist() == [2 << 32 | 1]


def test_a_board_that_cannot_be_mapped_costs_no_session() -> None:
    """A client that finds no room for it goes on without."""
    nowhere = os.open("/proc/self/stat", os.O_RDONLY)
    assert _board(nowhere, 512) is None
    os.close(nowhere)
