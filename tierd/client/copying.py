"""Copies of puts and gets: each block is summed and copied while it is in the processor's caches.

Purpose: bytes to where they are wanted, and their sums. Non-purpose: whose they are, what becomes of the sums (writing.py, onesided.py). Invariants: what is summed is
the source, so a put that was torn is found by the first reader; when `sum_and_copy` has returned or raised, nothing of it is copied any more.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import cast

import xxhash

from tierd.client import forks, stopping
from tierd.client.buffers import Bytes, address_of
from tierd.core.block import slice_cut
from tierd.streaming import STREAMING

HELPED_BYTES = 4 << 20
"""A copy of so many bytes or more is shared with a second thread."""
Piece = tuple[memoryview, int]
"""What is summed, and where it lies."""
_cut = lru_cache(maxsize=64)(slice_cut)


def piece_of(source: Bytes) -> Piece:
    """A caller's buffer."""
    return memoryview(cast("bytes", source)), address_of(source)


def sum_and_copy(targets: Sequence[Bytes | None], sources: Sequence[Piece], *, layers: Sequence[int]) -> list[bytes]:
    """Copies each source that has a target. The slice table of each of these, xxh3-64 of its slices, u64 little-endian; of the others nothing. layers: of each block. Raises ValueError, Stopped."""
    rows = [i for i, target in enumerate(targets) if target is not None]
    copy, half = _Copy(targets, sources, layers), len(rows) // 2
    is_long = half and sum(len(sources[i][0]) for i in rows) >= HELPED_BYTES
    with _SECOND_THREAD.at(copy, rows[half:]) if is_long else nullcontext(False) as is_helped:
        copy.do(rows[:half] if is_helped else rows, stopping.check)
    return copy.tables


class _Copy:
    """What `sum_and_copy` says. tables: what it gives."""

    def __init__(self, targets: Sequence[Bytes | None], sources: Sequence[Piece], layers: Sequence[int]) -> None:
        self._targets, self._sources, self._layers = targets, sources, layers
        self.tables = [b""] * len(sources)

    def do(self, rows: Sequence[int], check: Callable[[], None]) -> None:
        """A part. check: called before each block; what it raises ends this."""
        for row in rows:
            check()
            target, (source, at) = self._targets[row], self._sources[row]
            assert target is not None, "a row has a target"
            if len(target) != len(source):
                raise ValueError(f"copy {row}: {len(source)} bytes into {len(target)}")
            self.tables[row] = _summed(source, self._layers[row])
            STREAMING.copy_bytes(address_of(target, writable=True), at, len(source))


def _summed(source: memoryview, layers: int) -> bytes:
    """Its slice table."""
    cut = _cut(len(source), layers)
    if cut.pieces * cut.layers == 1:
        return struct.pack("<Q", xxhash.xxh3_64_intdigest(source))
    sums, at = [], 0
    for length in ([cut.piece] * (cut.pieces - 1) + [cut.last]) * cut.layers:
        sums.append(xxhash.xxh3_64_intdigest(source[at : at + length]))
        at += length
    return struct.pack(f"<{len(sums)}Q", *sums)


class _SecondThread:
    """For the copies of this process, one at a time; who finds it at work copies alone."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()
        self._is_of_use = len(os.sched_getaffinity(0)) > 1
        forks.register(self)

    @contextmanager
    def at(self, copy: _Copy, rows: Sequence[int]) -> Iterator[bool]:
        """Around one's own part: whether it does these rows. When this ends it has, or has let go of them."""
        if not self._is_of_use or not self._turn.acquire(blocking=False):
            yield False
            return
        is_over = threading.Event()

        def check() -> None:
            if is_over.is_set():
                raise InterruptedError

        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="tierd-copy")
            part = self._pool.submit(copy.do, rows, check)
            try:
                yield True
            except BaseException:
                is_over.set()
                part.exception()
                raise
            part.result()
        finally:
            self._turn.release()

    def forked(self) -> None:
        """In a child: the thread is the parent's."""
        forks.abandon(self._pool)
        self._pool, self._turn = None, threading.Lock()


_SECOND_THREAD = _SecondThread()
