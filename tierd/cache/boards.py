"""Boards: a page of memory of each session that puts, on which its client says how many blocks of a put are written, and the hash process, or the daemon, reads it.

Purpose: their files and their ends. Non-purpose: what is written there (client/progress.py), what follows from it (hashing/work.py). Invariants: a board is its own session's
alone; its length is sealed, so that no client can take memory away under who reads it; what a client writes there says of its own pages alone that they are written.
"""

from __future__ import annotations

import fcntl
import os

from tierd.hashing.wire import WORD, Word, blocks_written
from tierd.tiers.tier import Descriptor

WORDS = 64
"""Puts of one session that are followed at one time: each {u4 before which of its blocks they are written, u4 lower half of its reservation}, little-endian."""
BOARD_BYTES = 8 * WORDS
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FIRST = 1 << 63


def board_of(session: int) -> int:
    """The number of its board among memories: above those of segments."""
    return _FIRST | session


class Boards:
    """Descriptors, by number."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def opened(self, board: int) -> Descriptor:
        """A new descriptor. Raises KeyError, OSError."""
        return Descriptor(os.dup(self._files[board]), BOARD_BYTES)

    def give(self, session: int) -> Descriptor:
        """A new descriptor for its client; of a board made now if there is none. Raises OSError."""
        board = board_of(session)
        if board not in self._files:
            file = os.memfd_create("tierd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(file, BOARD_BYTES)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(file)
                raise
            self._files[board] = file
        return self.opened(board)

    def read_written(self, where: Word) -> int:
        """Before which index the blocks of a put are, as is said of them by now. Raises KeyError, OSError."""
        said = WORD.unpack(os.pread(self._files[where.board], WORD.size, WORD.size * where.word))
        return blocks_written(said[0], where.tag)

    def __contains__(self, board: int) -> bool:
        return board in self._files

    def end(self, session: int) -> None:
        """Its session has ended."""
        file = self._files.pop(board_of(session), None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """All of them."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
