"""GPU processes on the fake driver, and the helpers that tests of a daemon and its workers share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE

SLAB = 2 << 20
"""The fake driver's granularity."""
PATIENCE_S = 100.0
"""No test runs into this patience unless it says so."""
HOST, LENGTH = 7, 1 << 20
RAGGED = (1, 0, 4096, 4095, 300_001, 262_145, 2)
"""Bytes of pages: none, one, a page and its neighbours, more than a slice."""


class Owner:
    """The owner of a GPU process: it is notified of the death, once."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def process(self, *, patience_s: float = PATIENCE_S) -> GpuProcess:
        """A process that has not started."""
        return GpuProcess(0, patience_s=patience_s, on_death=self.told.append)


@asynccontextmanager
async def running(
    *, patience_s: float = PATIENCE_S, slabs: Mapping[int, tuple[int, int]] = {}
) -> AsyncIterator[tuple[GpuProcess, Owner]]:
    """A process that has started; it is stopped at the end of the block."""
    owner = Owner()
    gpu = owner.process(patience_s=patience_s)
    await gpu.start(slabs=slabs)
    try:
        yield gpu, owner
    finally:
        await gpu.stop()


def memory(length: int = LENGTH, *, seed: int | None = None) -> int:
    """The descriptor of host memory: zeros, or random bytes from a seed."""
    fd = os.memfd_create("host")
    os.ftruncate(fd, length)
    if seed is not None:
        os.pwrite(fd, np.random.default_rng(seed).bytes(length), 0)
    return fd


def pieces_of(lengths: Sequence[int] = RAGGED, *, slab: int = 1, layers: int = 1, gap: int = 4096) -> np.ndarray:
    """Pages of these lengths, one after another on the slab, in reverse order on the host."""
    pieces = np.zeros(len(lengths), PIECE)
    pieces["slab"], pieces["host"], pieces["layers"], pieces["length"] = slab, HOST, layers, lengths
    for side, order in (("slab_offset", np.arange(len(lengths))), ("host_offset", np.arange(len(lengths))[::-1])):
        rooms = np.array(lengths)[order] + gap
        pieces[side][order] = np.cumsum(rooms) - rooms
    return pieces


def bytes_at(fd: int, pieces: np.ndarray, side: str) -> list[bytes]:
    """The stored bytes, piece by piece, read without any process in between. side: slab or host."""
    return [os.pread(fd, int(piece["length"]), int(piece[f"{side}_offset"])) for piece in pieces]


def sums_of(fd: int, pieces: np.ndarray, side: str) -> list[list[int]]:
    """The slice tables of the stored bytes."""
    each = zip(bytes_at(fd, pieces, side), pieces, strict=True)
    return [
        slice_sums(data, slice_lengths(int(piece["length"]), int(piece["layers"]))).tolist() for data, piece in each
    ]


def lists(tables: Sequence[np.ndarray]) -> list[list[int]]:
    """Slice tables as lists, for comparison."""
    return [table.tolist() for table in tables]


def descriptors(pid: int | str = "self") -> dict[str, str]:
    """The files that a process has open, by descriptor number."""
    folder = f"/proc/{pid}/fd"
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    found = {}
    for name in names:
        try:
            found[name] = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
