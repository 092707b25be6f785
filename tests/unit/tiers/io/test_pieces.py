"""Pieces of a file: the library's and Python's reads give the same bytes, sums and errors."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiled import NEEDS_LIBRARY
from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import StructArray
from tierd.tiers.io.pieces import NOT_READ, PIECE, plain_read_pieces, read_pieces
from tierd.tiers.store.slots import read_at

pytestmark = NEEDS_LIBRARY
PAGE = 4096
FILE_BYTES = 5 * (1 << 20) + 6000
"""It ends within a page."""
ROOM = 1 << 20
SLICES = 480
Read = Callable[[int, StructArray], None]


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> int:
    """A file of random bytes, opened with O_DIRECT if that works here."""
    path = tmp_path_factory.mktemp("pieces") / "file"
    path.write_bytes(np.random.default_rng(1).bytes(FILE_BYTES))
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


class Memory:
    """Room for pieces: heads, targets and sums, with bytes that no piece must touch."""

    def __init__(self, count: int) -> None:
        room = (max(1, count), ROOM + 2 * PAGE)
        self.bytes = np.frombuffer(mmap.mmap(-1, room[0] * room[1]), np.uint8).reshape(room)
        self.bytes[:] = 7
        self.sums = np.full((count, SLICES + 1), 9, "<u8")

    def pieces(self, shapes: list[tuple[int, int, int, bool]]) -> StructArray:
        """PIECE [n] of offsets in pages, lengths, layers, and whether there is a head."""
        pieces = np.zeros(len(shapes), PIECE)
        for i, (at, length, layers, has_head) in enumerate(shapes):
            here = self.bytes[i].ctypes.data
            sums = self.sums[i].ctypes.data
            pieces[i] = (at * PAGE, here if has_head else 0, here + PAGE, length, layers, sums, NOT_READ)
        return pieces


def plain(fd: int, pieces: StructArray) -> None:
    plain_read_pieces(partial(read_at, fd), pieces)


SHAPES = st.tuples(
    st.integers(0, FILE_BYTES // PAGE + 1),
    st.one_of(st.integers(1, 70_000), st.integers(1, ROOM)),
    st.one_of(st.integers(0, 9), st.sampled_from((32, 480))),
    st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(shapes=st.lists(SHAPES, max_size=4))
def test_both_forms_do_the_same(fd: int, shapes: list[tuple[int, int, int, bool]]) -> None:
    """Both forms give the same errors, sums and bytes, also where the file ends, and touch nothing else."""
    mine, other = Memory(len(shapes)), Memory(len(shapes))
    native, python = mine.pieces(shapes), other.pieces(shapes)
    read_pieces(fd, native)
    plain(fd, python)
    assert native["error"].tolist() == python["error"].tolist()
    came = native["error"] == 0
    assert (mine.sums == other.sums).all() and (mine.bytes[came] == other.bytes[came]).all()


@pytest.mark.parametrize("read", [read_pieces, plain])
def test_a_piece_has_the_files_bytes_and_sums(fd: int, read: Read) -> None:
    """The head has the 4 KiB at the offset, the target what follows it, and the sums are the daemon's."""
    memory, length = Memory(2), 5 * 20_480
    shapes = [(3, length, 5, True), (9, length, 5, False)]
    read(fd, pieces := memory.pieces(shapes))
    assert pieces["error"].tolist() == [0, 0]
    whole = np.fromfile(f"/proc/self/fd/{fd}", np.uint8)
    for row, first, (at, *_) in zip(memory.bytes, (0, PAGE), shapes, strict=True):
        assert (row[first : PAGE + length] == whole[at * PAGE :][: PAGE + length - first]).all()
        assert (row[PAGE + length :] == 7).all()
    wanted = [slice_sums(row[PAGE:], slice_lengths(length, 5)).tolist() for row in memory.bytes]
    assert memory.sums[:, :5].tolist() == wanted
    assert (memory.sums[:, 5:] == 9).all()


@pytest.mark.parametrize("read", [read_pieces, plain])
def test_a_piece_that_fails_leaves_the_others_alone(fd: int, read: Read) -> None:
    """A piece beyond the end was not read, one of a closed file has its errno, and others come."""
    memory = Memory(3)
    beyond = FILE_BYTES // PAGE + 1
    read(fd, pieces := memory.pieces([(0, 9000, 0, True), (beyond, 9000, 0, False), (1, 9000, 3, False)]))
    assert pieces["error"].tolist() == [0, NOT_READ, 0]
    assert (memory.sums[1] == 9).all()
    closed = os.dup(fd)
    os.close(closed)
    read(closed, pieces := memory.pieces([(0, 9000, 0, True)]))
    assert pieces["error"].tolist() == [errno.EBADF]
