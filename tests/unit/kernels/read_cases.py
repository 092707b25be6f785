"""Cases for the benchmarks' read kernel: the exclusive or of exactly the requested words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.unit.kernels.kernel_cases import allocate, placed
from tierd.kernels.buffers import Buffer
from tierd.kernels.library import Library
from tools.gpu.shapes import PIECE_BYTES, READ_THREADS, ReadParams


@dataclass(frozen=True)
class Read:
    """pieces: of 16 bytes."""

    pieces: int
    blocks: int = 2


def check_read(library: Library, shape: Read) -> None:
    """Raises AssertionError."""
    words = np.random.default_rng(shape.pieces).integers(1, 2**31, (shape.pieces + 1, PIECE_BYTES // 4), np.int32)
    sums = allocate((shape.blocks, READ_THREADS), "int32")
    with placed(library) as put:
        addresses = (Buffer.of(name, put(array)).address for name, array in (("words", words), ("sums", sums)))
        library.launch("read_all", (shape.blocks, 1, 1), ReadParams(*addresses, shape.pieces))
    got, want = np.bitwise_xor.reduce(sums.reshape(-1)), np.bitwise_xor.reduce(words[:-1].reshape(-1))
    assert got == want, f"{shape}: {got:#x}, not {want:#x}"


READS = (Read(0), Read(1), Read(5000), Read(8192, blocks=1))
"""None, one, one step of all blocks and a part, several steps of one block."""
