"""Whether the driver registers a read-only shared mapping for GPU copies, and at which rate."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np

from tierd.errors import TierdError
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import Gpu
from tools.gpu.results import Check, Fact, Left, Result, row_of

GIB = 1 << 30
ROUNDS = 3


def results(bench: Bench) -> Iterator[Result]:
    """Of 1 GiB of shared memory."""
    gpu, length = bench.gpu(with_kernels=False), bench.pick(GIB, 1 << 20)
    told = gpu.find_attribute("READ_ONLY_HOST_REGISTER_SUPPORTED")
    yield Fact("read_only_attribute", {None: "the driver does not know the attribute", 0: "no"}.get(told, "yes"))
    descriptor = host.made(length)
    writable = host.mapped(descriptor, length)
    writable.bytes.view(np.uint64)[:] = np.arange(length // 8, dtype=np.uint64) * 0x9E3779B97F4A7C15
    readable = host.mapped(descriptor, length, is_read_only=True)
    yield Fact("read_only_register_unflagged", _answer(gpu, readable, 0))
    answer = _answer(gpu, readable, host.READ_ONLY)
    yield Fact("read_only_register", answer)
    plain = _rates(gpu, writable, 0)
    yield row_of("register_writable", [rate.registered for rate in plain], "GiB/s", note="unregistering not counted")
    if answer != "registered":
        yield Left("register_read_only", answer)
        yield Left("h2d_from_read_only", answer)
        yield Left("read_only_bytes", answer)
    else:
        flagged = _rates(gpu, readable, host.READ_ONLY)
        limits = [rate.registered for rate in plain]
        yield row_of("register_read_only", [rate.registered for rate in flagged], "GiB/s", limits)
        yield row_of("h2d_from_read_only", [rate.copied for rate in flagged], "GiB/s", [rate.copied for rate in plain])
        are_right = all(rate.is_right for rate in (*plain, *flagged))
        yield Check("read_only_bytes", are_right, "bytes arrived as they were" if are_right else "bytes differ")
    os.close(descriptor)


class _Rate:
    """One registration: GiB a second of registering and of copying, and whether the bytes were
    right."""

    def __init__(self, gpu: Gpu, memory: host.HostMemory, flags: int) -> None:
        length = memory.bytes.nbytes
        with gpu.room() as room:
            to = room.array((length,), np.uint8)
            begun = time.perf_counter()
            with host.registered(gpu, memory, flags):
                self.registered = length / GIB / (time.perf_counter() - begun)
                copies = [lambda: gpu.ask("cuMemcpyHtoDAsync", to.address, memory.address, length, gpu.stream)]
                self.copied = length / GIB / min(gpu.times(copies, rounds=3, as_graphs=False))
                self.is_right = bool((gpu.read_back(to) == memory.bytes).all())


def _rates(gpu: Gpu, memory: host.HostMemory, flags: int) -> list[_Rate]:
    return [_Rate(gpu, memory, flags) for _ in range(ROUNDS)]


def _answer(gpu: Gpu, memory: host.HostMemory, flags: int) -> str:
    try:
        with host.registered(gpu, memory, flags):
            return "registered"
    except TierdError as error:
        return f"refused: {error}"
