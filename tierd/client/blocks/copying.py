"""Copies of puts and gets: each block is summed in the pass that copies it.

    BLOCK [n] ──▶ tierd/native, or Python; long copies by two threads ──▶ bytes at their targets,
    and the sums of all slices

writing.py and one_sided_get.py use the sums. A sum is of the bytes that were copied, even if the
source changes meanwhile. Once `sum_and_copy` has returned or raised, no copy goes on. The caller
checks addresses and lengths.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierd.client.blocks.buffers import address_of
from tierd.client.connect import cancellation, forks
from tierd.core.formats.block import slice_cut, slice_lengths
from tierd.core.formats.model import StructArray
from tierd.errors import InvalidArgument
from tierd.native import find_library

BLOCK = np.dtype([("source", "<u8"), ("target", "<u8"), ("length", "<u8"), ("layers", "<u8")])
"""A block to copy: addresses here (target 0: sum only), bytes, and layers for its slices."""
HELPED_BYTES = 4 << 20
"""A second thread helps with copies of at least this size."""

Sums = NDArray[np.uint64]
_library = find_library()


@lru_cache(maxsize=1024)
def slices_of(length: int, layers: int) -> int:
    """Number of slices of a block."""
    cut = slice_cut(length, layers)
    return cut.pieces * cut.layers


def blocks_of(
    sources: NDArray[np.uint64] | Sequence[int],
    targets: NDArray[np.uint64] | Sequence[int],
    lengths: NDArray[np.uint64] | Sequence[int],
    layers: NDArray[np.uint64] | Sequence[int] | int,
) -> StructArray:
    """BLOCK [n]."""
    blocks = np.empty(len(sources), BLOCK)
    blocks["source"], blocks["target"], blocks["length"], blocks["layers"] = sources, targets, lengths, layers
    return blocks


@lru_cache(maxsize=1024)
def are_slices(pieces: tuple[int, ...], length: int, layers: int) -> bool:
    """Whether pieces of these bytes hold whole slices of a block: each then has the block's sums."""
    return [*chain.from_iterable(slice_lengths(piece, 0) for piece in pieces)] == slice_lengths(length, layers)


def in_pieces(blocks: StructArray, pieces: Sequence[Sequence[NDArray[np.uint8]]]) -> StructArray:
    """BLOCK [n] with a row for each piece of each block. Raises InvalidArgument unless a block's
    pieces hold whole slices of it."""
    rows = list[tuple[int, int, int, int]]()
    for number, ((source, _, length, layers), its) in enumerate(zip(blocks.tolist(), pieces, strict=True)):
        sizes = tuple(map(len, its))
        if not are_slices(sizes, length, layers):
            raise InvalidArgument(
                f"buffer {number}: pieces of {list(sizes)} bytes for a block of {length} in {layers} layers; pass a piece"
                " for each layer, or one buffer"
            )
        starts = accumulate(sizes[:-1], initial=source)
        rows += [(at, address_of(to, writable=True), len(to), 0) for at, to in zip(starts, its, strict=True)]
    return np.array(rows, BLOCK)


def sum_and_copy(blocks: StructArray) -> Sums:
    """Copies BLOCK [n]. Returns the sums of all slices, xxh3-64, u64 little-endian, in block order.
    A cancellation from any thread raises Cancelled between two blocks."""
    cancellation.check()
    lengths = blocks["length"].tolist()
    ends = [0, *accumulate(map(slices_of, lengths, blocks["layers"].tolist()))]
    sums, half, is_over = np.empty(ends[-1], "<u8"), len(blocks) // 2, np.zeros(1, np.int32)

    def part(first: int, end: int) -> None:
        _do(blocks[first:end], sums[ends[first] :], is_over)

    def stop() -> None:
        is_over[0] = 1

    with cancellation.ended_by(stop):
        if half and sum(lengths) >= HELPED_BYTES:
            with _SECOND_THREAD.at(partial(part, half, len(blocks)), stop) as is_helped:
                part(0, half if is_helped else len(blocks))
        else:
            _do(blocks, sums, is_over)
    cancellation.check()
    return sums


def _do(blocks: StructArray, sums: Sums, is_over: NDArray[np.int32]) -> None:
    """Copies and sums some of the blocks, until is_over."""
    if _library is None:
        plain_sum_and_copy(blocks, sums, is_over)
    else:
        _library.tierd_sum_and_copy(address_of(blocks), len(blocks), address_of(sums), address_of(is_over))


def plain_sum_and_copy(blocks: StructArray, sums: Sums, is_over: NDArray[np.int32]) -> int:
    """`tierd_sum_and_copy` (tierd/native/plane.cpp) in Python. Returns how many blocks are done."""
    at = 0
    for done, (source, target, length, layers) in enumerate(blocks.tolist()):
        if is_over[0]:
            return done
        if target:
            ctypes.memmove(target, source, length)
        view, begin = memoryview((ctypes.c_ubyte * length).from_address(target or source)).cast("B"), 0
        for piece in slice_lengths(length, layers):
            sums[at] = xxhash.xxh3_64_intdigest(view[begin : begin + piece])
            at, begin = at + 1, begin + piece
    return len(blocks)


class _SecondThread:
    """A second thread for this process's copies. A copy goes alone if it is busy or missing."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()
        self._is_of_use = len(os.sched_getaffinity(0)) > 1
        forks.register(self)

    @contextmanager
    def at(self, work: Callable[[], None], stop: Callable[[], None]) -> Iterator[bool]:
        """Yields whether the thread does `work` too; on exit that work is done or was stopped."""
        if not self._is_of_use or not self._turn.acquire(blocking=False):
            yield False
            return
        try:
            done = self._begun(work)
            if done is None:
                yield False
                return
            try:
                yield True
            except BaseException:
                stop()
                done.exception()
                raise
            done.result()
        finally:
            self._turn.release()

    def _begun(self, work: Callable[[], None]) -> Future[None] | None:
        """None: the interpreter is ending, or the process has as many threads as it may."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tierd-copy")
        try:
            return self._pool.submit(work)
        except RuntimeError:
            self._pool = None  # it may have queued the work, and no later thread must do it
            return None

    def forked(self) -> None:
        """In a child process: abandons the parent's thread."""
        forks.abandon(self._pool)
        self._pool, self._turn = None, threading.Lock()


_SECOND_THREAD = _SecondThread()
