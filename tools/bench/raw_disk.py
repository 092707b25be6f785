"""The limit of a store: raw O_DIRECT reads and writes, as fio makes them, by plain threads.

The file is preallocated and was written once. Purpose: the disk's rate at the best depth.
Non-purpose: checks, names, order. Invariant: the context's end removes the file.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

DEPTHS = (1, 2, 4, 8, 16, 32)
TRIES = 3
"""Batches at each depth from which the best is chosen."""
_Move = Callable[[int, list[memoryview], int], int]


class RawFile:
    """A file of length_bytes, for batches of at most `count` pieces; none is near the one before.

    depths: the best ones, of reads and of writes. Raises OSError without O_DIRECT.
    """

    def __init__(self, directory: Path, *, length_bytes: int, piece_bytes: int, count: int) -> None:
        self._path = directory / "raw.bin"
        self._length, self._piece_bytes, self._count = length_bytes, piece_bytes, count
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        self._memory = mmap.mmap(-1, count * piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)  # a disk's best case, as an arena's
        self._threads = ThreadPoolExecutor(max(DEPTHS))
        self._at = 0
        self.depths = {"read": 1, "write": 4}

    def allocate(self) -> None:
        """Allocates the file and writes zeros over it once; later batches are random bytes."""
        os.posix_fallocate(self._fd, 0, self._length)
        for _ in range(self._length // (self._count * self._piece_bytes)):
            self.write()
        noise = np.random.default_rng(0).integers(0, 256, len(self._memory), dtype=np.uint8)
        self._memory[:] = noise.tobytes()

    def calibrate(self) -> None:
        """Determines the best depths."""
        for name, move in (("write", os.pwritev), ("read", os.preadv)):
            self.depths[name] = min(DEPTHS, key=partial(self._median_s, move))

    def write(self, count: int | None = None) -> None:
        """The next batch, not synced."""
        self._move(os.pwritev, self.depths["write"], count)

    def write_synced(self, count: int | None = None) -> None:
        """The next batch, and one fdatasync."""
        self.write(count)
        self.sync()

    def sync(self) -> None:
        """Syncs all writes so far; with most disks, those of other files too."""
        os.fdatasync(self._fd)

    def read(self) -> None:
        """The next batch."""
        self._move(os.preadv, self.depths["read"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _move(self, move: _Move, depth: int, count: int | None = None) -> None:
        """Threads take the pieces from one iterator, whose next() is one step of the interpreter."""
        count, size = count or self._count, self._piece_bytes
        begin = self._at if self._at + count * size <= self._length else 0
        self._at = begin + count * size
        pieces, memory = iter(range(count)), memoryview(self._memory)

        def run() -> None:
            for i in pieces:
                moved = move(self._fd, [memory[i * size : (i + 1) * size]], begin + i * size)
                if moved != size:
                    raise OSError(f"raw file: {moved} bytes of {size} were moved; is the disk full?")

        for done in [self._threads.submit(run) for _ in range(depth)]:
            done.result()

    def _median_s(self, move: _Move, depth: int) -> float:
        taken = []
        for _ in range(TRIES):
            begun = time.perf_counter()
            self._move(move, depth)
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)
