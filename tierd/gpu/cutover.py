"""Up to which length runs are sooner copied by the kernel than by the copy engines, measured.

Purpose: `measured`. Non-purpose: copying. Invariants: what is timed are whole calls, as they will be made, between buffers of its own; it takes bounded time, some
milliseconds for each length.

The engines take microseconds for each run: pieces of 4 to 24 KiB are copied at 4 to 7 GB/s, those of 64 KiB at 52, on an H100 (vLLM issue 42212). Where a kernel
overtakes them differs from machine to machine (vLLM issues 57555 and 57569).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from tierd.gpu.device import Device
from tierd.gpu.runs import RUNS_MIN, Runs, Way

SIZES = tuple(1 << bits for bits in range(12, 17))
"""Lengths that are measured: 4 to 64 KiB."""
ROUNDS, ROUND_S = 5, 0.005
"""Of one length, way and direction: two calls at least, of which the first may bring code to the GPU, and more while all of them took less than this."""


def measured(device: Device, seconds: Callable[..., float]) -> dict[bool, int]:
    """Up to how many bytes runs are sooner copied by the kernel, 0: never; to the device under True, from it under False.

    seconds: `Copies.seconds`. As few runs as are gathered at all are timed: more of them only widen
    its lead. Raises Overloaded if there is no room for the buffers, TierFailed.
    """
    engines = Way.BATCH if device.has_batches else Way.SINGLY
    with _buffers(device) as (there, here):
        return {
            to_device: _limit(
                *((partial(seconds, way, to_device=to_device)) for way in (Way.GATHER, engines)),
                to=there if to_device else here,
                of=here if to_device else there,
            )
            for to_device in (True, False)
        }


def _limit(kernel: Callable[[Runs], float], engines: Callable[[Runs], float], *, to: int, of: int) -> int:
    """The last of SIZES before the first for which the kernel is not sooner."""
    found = 0
    for size in SIZES:
        places = np.arange(RUNS_MIN, dtype=np.uint64) * np.uint64(2 * size)  # with gaps, as scattered pages have them
        runs = Runs(places + np.uint64(to), places + np.uint64(of), np.full(RUNS_MIN, size, np.uint64))
        if _best(kernel, runs) >= _best(engines, runs):
            break
        found = size
    return found


def _best(seconds: Callable[[Runs], float], runs: Runs) -> float:
    """The shortest of some rounds."""
    end = time.monotonic() + ROUND_S
    times = [seconds(runs), seconds(runs)]
    while len(times) < ROUNDS and time.monotonic() < end:
        times.append(seconds(runs))
    return min(times)


@contextmanager
def _buffers(device: Device) -> Iterator[tuple[int, int]]:
    """Addresses of memory of the device and of the host."""
    cuda, ask, length_bytes = device.cuda, device.call, 2 * RUNS_MIN * SIZES[-1]
    with ExitStack() as ends:
        there = int(ask(cuda.cuMemAlloc, length_bytes))
        ends.callback(ask, cuda.cuMemFree, there)
        here = int(ask(cuda.cuMemHostAlloc, length_bytes, 0))
        ends.callback(ask, cuda.cuMemFreeHost, here)
        yield there, here
