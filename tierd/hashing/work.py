"""What the hash process is at: the pages of each message in their order, of several messages in turns, none before it is written.

Purpose: `Work`. Non-purpose: messages and the wait for them (__main__.py). Invariants: memory is read alone; every page that is asked for is answered, with no sums where its memory is not there,
unless it is dropped; a writer who stands still holds up nobody.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash

from tierd.hashing import wire
from tierd.huge_pages import map_shared

TURN_BYTES = 1 << 20
"""After so much of one message it is the next one's turn."""


@dataclass(slots=True)
class Job:
    """One message. pages: that are still to be hashed, last first; made: sums that were not sent yet."""

    number: int
    where: wire.Word
    pages: list[wire.Page]
    made: list[list[int]] = field(default_factory=list)
    made_bytes: int = 0


class Work:
    """See the module."""

    def __init__(self) -> None:
        self._memories: dict[int, memoryview] = {}
        self._jobs: dict[int, Job] = {}
        self.is_idle = True
        """Whether nothing was written in the last turn."""

    def attach(self, memory: int, descriptor: int, length_bytes: int) -> None:
        """Maps a file for reading; what cannot be mapped is as if it had not been attached."""
        try:
            array: ctypes.Array[ctypes.c_ubyte] = map_shared(descriptor, length_bytes, mmap.PROT_READ)
            self._memories[memory] = memoryview(array).cast("B")
        except OSError:
            self.detach(memory)
        finally:
            with suppress(OSError):  # closed it is all the same, and a mapping needs it no more
                os.close(descriptor)

    def detach(self, memory: int) -> None:
        """Unmaps it. Of a board that has ended nobody says any more what is written: the rest waits until that is said otherwise, or it is dropped."""
        self._memories.pop(memory, None)

    def add(self, number: int, where: wire.Word, pages: list[wire.Page]) -> None:
        """Takes a message; of no page there is nothing to answer."""
        if pages:
            self._jobs[number] = Job(number, where, pages[::-1])

    def written(self, number: int) -> None:
        """All of its pages are."""
        if job := self._jobs.get(number):
            job.where = wire.NOWHERE

    def drop(self, number: int) -> None:
        """Nobody wants its sums."""
        self._jobs.pop(number, None)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def turn(self) -> list[bytes]:
        """One turn of each message; the answers that it brings."""
        answers, self.is_idle = list[bytes](), True
        for job in list(self._jobs.values()):
            if self._hash(job):
                self.is_idle = False
                if not job.pages or job.made_bytes >= wire.MESSAGE_BYTES:
                    answers.append(wire.answer(job.number, job.made))
                    job.made, job.made_bytes = [], 0
                if not job.pages:
                    del self._jobs[job.number]
        return answers

    def _hash(self, job: Job) -> bool:
        """Whether a page was written."""
        end, left = self._written(job.where), TURN_BYTES
        while job.pages and job.pages[-1].block < end and left > 0 and job.made_bytes < wire.MESSAGE_BYTES:
            page = job.pages.pop()
            job.made.append(self._sums(page))
            job.made_bytes += wire.SUM_BYTES * (1 + len(job.made[-1]))
            left -= sum(page.lengths)
        return left < TURN_BYTES

    def _written(self, where: wire.Word) -> int:
        """Before which index the blocks are; a board that could not be mapped says nothing, nor does what is said there of another put."""
        if where == wire.NOWHERE:
            return wire.ALL
        board = self._memories.get(where.board)
        said = int(wire.WORD.unpack_from(board, wire.WORD.size * where.word)[0]) if board is not None else 0
        return wire.blocks_written(said, where.tag)

    def _sums(self, page: wire.Page) -> list[int]:
        """xxh3-64 of each slice; none of a page that is not there."""
        memory, at, sums = self._memories.get(page.segment), page.offset, list[int]()
        for length in page.lengths if memory is not None else ():
            sums.append(xxhash.xxh3_64_intdigest(memory[at : at + length]))  # type: ignore[index]
            at += length
        return sums
