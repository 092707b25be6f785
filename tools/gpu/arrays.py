"""Tensors of torch and arrays of cupy, stored to and loaded from registered pages as the SDK does.

Invariants: work before and after is in one stream that does not wait for others, and nobody waits
for it in between. So bytes are right only if the copies are in that stream.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from tierd.client.session import stream_copies
from tierd.client.session.gpu_arrays import GpuBytes, all_seen
from tierd.client.session.mapping import MappedSegment, map_file
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.results import Check, Left, Result, row_of

PAGE_BYTES = 2 << 20
PAGES, ROUNDS = 128, 5
GIGA, PATIENCE_S = 1e9, 10.0


class Library(NamedTuple):
    """The calls of torch or cupy that the check makes."""

    stream: Any
    entered: Callable[[Any], AbstractContextManager[Any]]
    made: Callable[[Any], Any]
    read: Callable[[Any], Any]


def results(bench: Bench, torch: Any) -> Iterator[Result]:
    """A check for each library, and the rate of loads against one copy of all pages."""
    pages = bench.pick(PAGES, 4)
    descriptor = host.made(pages * PAGE_BYTES)
    data = map_file(descriptor, pages * PAGE_BYTES, writable=True)
    os.close(descriptor)
    none = memoryview(b"")
    segment = MappedSegment(1, 0, data, np.zeros(0, np.uint64), none, none, 0, PAGE_BYTES, is_writable=True)
    of_torch = Library(
        torch.cuda.Stream(),
        torch.cuda.stream,
        lambda array: torch.from_numpy(array).cuda(),
        lambda it: it.cpu().numpy(),
    )
    yield _check("arrays_torch", of_torch, segment)
    yield row_of("arrays_load", *_rates(of_torch, segment), "limit: one copy of them all")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        yield Left("arrays_cupy", "cupy is not installed")
        return
    stream = cupy.cuda.Stream(non_blocking=True)
    yield _check("arrays_cupy", Library(stream, lambda it: it, cupy.asarray, cupy.asnumpy), segment)


def _pages(segment: MappedSegment) -> stream_copies.Pages:
    starts = np.arange(0, segment.data.nbytes, PAGE_BYTES, np.uint64)
    return stream_copies.Pages(starts + np.uint64(segment.address), [segment])


def _check(name: str, library: Library, segment: MappedSegment) -> Result:
    """Stores what the stream still computes, and loads it over other bytes."""
    pages, until = _pages(segment), time.monotonic() + PATIENCE_S
    want = np.random.default_rng(3).integers(0, 128, (len(pages.addresses), PAGE_BYTES), np.uint8)
    with library.entered(library.stream):
        pool = library.made(want)
        pool *= 2
        rows: list[GpuBytes] = all_seen(list(pool))
        stream_copies.store(stream_copies.side_of(rows), rows, pages, until)
        is_stored = bool((segment.data.reshape(want.shape) == want * 2).all())
        pool *= 0
        flight = stream_copies.load(stream_copies.side_of(rows), rows, pages, until)
        pool += 1
        is_loaded = bool((library.read(pool) == want * 2 + 1).all())
    flight.wait(until)
    words = "bytes are right both ways, in the caller's stream"
    return Check(name, is_stored and is_loaded, words if is_stored and is_loaded else "bytes differ")


def _rates(library: Library, segment: MappedSegment) -> tuple[list[float], str, list[float]]:
    """GB/s of loads to scattered tensors and of one copy, in turns, as the caller waits for them."""
    pages, length = _pages(segment), segment.data.nbytes
    ours, plain = list[float](), list[float]()
    with library.entered(library.stream):
        pool = library.made(segment.data.reshape(-1, PAGE_BYTES))
        order = np.random.default_rng(4).permutation(len(pool)).tolist()
        rows: list[GpuBytes] = all_seen([pool[i] for i in order])
        side, first = stream_copies.side_of(rows), min(row.address for row in rows)
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            stream_copies.load(side, rows, pages, begun + PATIENCE_S)
            library.stream.synchronize()
            ours.append(length / (time.perf_counter() - begun) / GIGA)
            begun = time.perf_counter()
            with side.gpu.entered():
                side.gpu.ask("cuMemcpyHtoDAsync", first, segment.address, length, side.stream)
            library.stream.synchronize()
            plain.append(length / (time.perf_counter() - begun) / GIGA)
    return ours, "GB/s", plain
