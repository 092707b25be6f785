"""Pieces of a file, read into memory and summed: in C++ (tierd/native), or in Python.

One call handles many pieces. The C++ form holds no interpreter lock meanwhile. A piece that fails
leaves the others alone. The caller checks addresses and lengths, and keeps the memory until the
call returns.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence

import numpy as np

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.native import find_library

PIECE = np.dtype(
    [(name, "<u8") for name in ("offset", "head", "target", "length", "layers", "sums")] + [("error", "<i8")]
)
"""offset: in the file, a multiple of 4 KiB. head: address of the first 4 KiB; 0: there is none.
target: address of the rest. length: bytes of the rest that are summed; up to 4 KiB more are read.
layers: as `slice_cut` needs them. sums: address of a u64 for each slice. error: 0 if the piece
came, else an errno; NOT_READ if the file ends before it, or nobody tried."""
NOT_READ = -1

library = find_library()


def read_pieces(fd: int, pieces: StructArray) -> None:
    """Reads PIECE [n] of a file that was opened with O_DIRECT. Needs `library`."""
    assert library is not None
    library.tierd_read_pieces(fd, pieces.ctypes.data, len(pieces))


def plain_read_pieces(read: Callable[[int, Sequence[memoryview]], int], pieces: StructArray) -> None:
    """`tierd_read_pieces` in Python. read: fills buffers from an offset on, and returns the bytes read."""
    for i, (offset, head, target, length, layers, sums, _) in enumerate(pieces.tolist()):
        whole = -(-length // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        buffers = [_memory(head, PAGE_ALIGN_BYTES)] * (head > 0) + [_memory(target, whole)]
        try:
            if read(offset, buffers) == sum(map(len, buffers)):
                cut = slice_lengths(length, layers)
                _memory(sums, 8 * len(cut))[:] = slice_sums(buffers[-1], cut).view(np.uint8).data
                pieces["error"][i] = 0
        except OSError as error:
            pieces["error"][i] = error.errno or errno.EIO


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")
