"""What the hash process does with its messages: every page once, not before it is written, each message's in order, nobody kept waiting by another."""

from __future__ import annotations

import errno
import os
import random
import struct

import numpy as np
import pytest

from tierd.core.block import slice_cut, slice_lengths
from tierd.hashing import wire
from tierd.hashing.work import TURN_BYTES, Work
from tierd.tiers.checksum import slice_sums

PAGES, PAGE = 12, 1 << 19
SEGMENT, BOARD, TAG = 7, 1 << 63, 11


class Bench:
    """A segment of pages, a board, and work that has both."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(5).integers(0, 256, PAGES * PAGE, dtype=np.uint8)
        self.work = Work()
        self._board = self._attached(BOARD, bytes(4096))
        os.close(self._attached(SEGMENT, self.data.tobytes()))

    def _attached(self, number: int, content: bytes) -> int:
        file = os.memfd_create("memory")
        os.write(file, content)
        self.work.attach(number, os.dup(file), len(content))
        return file

    def note(self, word: int, blocks: int, *, tag: int = TAG) -> None:
        os.pwrite(self._board, struct.pack("<II", blocks, tag), 8 * word)

    def ask(self, number: int, blocks: list[int], *, where: wire.Word = wire.NOWHERE, segment: int = SEGMENT) -> None:
        """Pages of these numbers; the i-th is block i of its put."""
        self.work.add(
            number, where, [wire.Page(segment, at * PAGE, i, *slice_cut(PAGE, 1)) for i, at in enumerate(blocks)]
        )

    def table(self, block: int) -> bytes:
        return slice_sums(self.data[block * PAGE : (block + 1) * PAGE], slice_lengths(PAGE, 1)).tobytes()

    def turns(self, count: int) -> list[tuple[int, list[bytes]]]:
        return [wire.answered(message) for _ in range(count) for message in self.work.turn()]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_hashed_before_it_is_written(bench: Bench) -> None:
    """A message is answered when its last page is, by its own word and no other's, with its own tag and no other's."""
    bench.ask(1, [0, 1, 2], where=wire.Word(BOARD, 5, TAG))
    bench.note(4, 3)
    bench.note(5, 3, tag=TAG + 1)
    assert (bench.turns(9), bench.work.is_idle) == ([], True)
    bench.note(5, 2)
    assert (bench.turns(1), bench.work.is_idle) == ([], False)
    assert (bench.turns(1), bench.work.is_idle) == ([], True)
    bench.note(5, 3)
    assert bench.turns(1) == [(1, [bench.table(0), bench.table(1), bench.table(2)])]
    assert not bench.work


def test_messages_take_turns(bench: Bench) -> None:
    """One that asks for little is answered while a long one is at it, though it came later."""
    assert 2 * PAGE == TURN_BYTES
    bench.ask(1, list(range(PAGES)))
    bench.ask(2, [3])
    answers = bench.turns(PAGES // 2)
    assert [number for number, _ in answers] == [2, 1]
    assert answers[0][1] == [bench.table(3)]


def test_all_is_written_when_that_is_said(bench: Bench) -> None:
    """Whatever the board says."""
    bench.ask(1, [4], where=wire.Word(BOARD, 0, TAG))
    assert bench.turns(2) == []
    bench.work.written(1)
    assert bench.turns(1) == [(1, [bench.table(4)])]


def test_a_board_that_has_ended_says_nothing_more(bench: Bench) -> None:
    """What it has not said to be written is not hashed, until somebody else says so, or it is dropped."""
    bench.ask(1, [4, 5], where=wire.Word(BOARD, 0, TAG))
    bench.ask(2, [6], where=wire.Word(BOARD, 1, TAG))
    bench.note(0, 1)
    assert bench.turns(2) == []
    bench.work.detach(BOARD)
    assert (bench.turns(2), bench.work.is_idle) == ([], True)
    bench.work.written(1)
    assert bench.turns(1) == [(1, [bench.table(4), bench.table(5)])]
    bench.work.drop(2)
    assert not bench.work


def test_a_board_that_never_came_says_nothing(bench: Bench) -> None:
    """Where none could be mapped pages are hashed when all are said to be written, not before: sums of what stood there until then would condemn good blocks."""
    nowhere = os.open("/proc/self/stat", os.O_RDONLY)
    bench.work.attach(BOARD + 1, nowhere, 4096)
    bench.ask(1, [4, 5], where=wire.Word(BOARD + 1, 0, TAG))
    assert (bench.turns(2), bench.work.is_idle) == ([], True)
    bench.work.written(1)
    assert bench.turns(1) == [(1, [bench.table(4), bench.table(5)])]


def test_a_descriptor_whose_close_fails_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory was mapped before it is closed: its pages are hashed."""
    close = os.close

    def closed_with_an_error(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "as a file system may say")

    file = os.memfd_create("memory")
    os.write(file, bench.data.tobytes())
    monkeypatch.setattr(os, "close", closed_with_an_error)
    bench.work.attach(SEGMENT + 1, file, len(bench.data))
    monkeypatch.undo()
    bench.ask(1, [3], segment=SEGMENT + 1)
    assert bench.turns(1) == [(1, [bench.table(3)])]


def test_what_is_dropped_is_not_answered(bench: Bench) -> None:
    """Nor is what is of no page; and of a segment that has ended there are no sums."""
    bench.ask(1, [0, 1], where=wire.Word(BOARD, 0, TAG))
    bench.ask(2, [])
    bench.work.drop(1)
    bench.work.drop(3)
    bench.work.written(1)
    assert not bench.work
    bench.ask(4, [0, 1], segment=8)
    assert bench.turns(2) == [(4, [b"", b""])]


def test_an_answer_is_no_longer_than_is_read(bench: Bench) -> None:
    """However many slices the pages of a message have: what is too long for one answer comes in several."""
    pages = [wire.Page(SEGMENT, 0, i, *slice_cut(1 << 19, 128)) for i in range(100)]
    bench.work.add(1, wire.NOWHERE, pages)
    answers = [answer for _ in range(100) for answer in bench.work.turn()]
    assert len(answers) > 2
    assert max(map(len, answers)) <= wire.ANSWER_BYTES
    assert sum(len(wire.answered(answer)[1]) for answer in answers) == len(pages)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_is_answered_once(bench: Bench, seed: int) -> None:
    """However messages, words, drops and turns fall: each message's tables are those of its pages, in their order."""
    rng, wanted, words = random.Random(seed), dict[int, list[int]](), dict[int, int]()
    came = dict[int, list[bytes]]()
    for number in range(1, 40):
        wanted[number] = [rng.randrange(PAGES) for _ in range(rng.randint(1, 5))]
        words[number] = number % 8
        bench.note(words[number], 0)
        where = wire.Word(BOARD, words[number], TAG) if rng.random() < 0.7 else wire.NOWHERE
        bench.ask(number, wanted[number], where=where)
        for _ in range(rng.randint(0, 3)):
            bench.note(rng.randrange(8), rng.randint(0, 5))
            for answered, tables in bench.turns(1):
                came.setdefault(answered, []).extend(tables)
    gone = {number for number in wanted if number not in came and rng.random() < 0.3}
    for number in wanted:
        (bench.work.drop if number in gone else bench.work.written)(number)
    while bench.work:
        for answered, tables in bench.turns(1):
            came.setdefault(answered, []).extend(tables)
    assert came == {number: list(map(bench.table, its)) for number, its in wanted.items() if number not in gone}
