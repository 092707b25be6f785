"""Measurement of the longest runs that the kernel copies faster than the copy engines.

It times whole calls, as in normal use, between its own buffers, for some milliseconds per length.

The engines take microseconds for each run. On an H100, pieces of 4 to 24 KiB are copied at 4 to 7
GB/s, those of 64 KiB at 52 (vLLM issue 42212). The length at which a kernel becomes faster differs
between machines (vLLM issues 57555 and 57569).
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
"""Measured lengths: 4 to 64 KiB."""
ROUNDS, ROUND_S = 5, 0.005
"""Two calls at least, since the first may load code; more while all took less than ROUND_S."""


def measured(device: Device, seconds: Callable[..., float]) -> dict[bool, int]:
    """The longest runs that the kernel copies faster, 0: none; to the device under True, from it
    under False.

    seconds: `Copies.seconds`. It times the fewest runs that are gathered, since more of them only
    widen the kernel's lead. Raises Overloaded if there is no room for the buffers, TierFailed.
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
    """The last of SIZES before the first at which the kernel is not faster."""
    found = 0
    for size in SIZES:
        places = np.arange(RUNS_MIN, dtype=np.uint64) * np.uint64(2 * size)  # with gaps, as between scattered pages
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
    """Addresses of buffers on the device and on the host."""
    cuda, ask, length_bytes = device.cuda, device.call, 2 * RUNS_MIN * SIZES[-1]
    with ExitStack() as ends:
        there = int(ask(cuda.cuMemAlloc, length_bytes))
        ends.callback(ask, cuda.cuMemFree, there)
        here = int(ask(cuda.cuMemHostAlloc, length_bytes, 0))
        ends.callback(ask, cuda.cuMemFreeHost, here)
        yield there, here
