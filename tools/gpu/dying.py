"""A client to be killed: `python -m tools.gpu.dying host|slab DESCRIPTOR LENGTH`.

It prints "ready", waits for a line, and then copies without end. Each round fills all of the memory
with a byte value of its own. Many rounds are always under way, so it dies with work in flight.
"""

from __future__ import annotations

import itertools
import sys

from tools.gpu import host, slabs
from tools.gpu.device import Gpu

DEPTH = 256
"""Rounds under way: at 64 MiB each a third of a second of copies to the host."""
VALUES = 251


def main() -> None:
    """Runs until it is killed."""
    kind, descriptor, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    gpu = Gpu(with_kernels=False)
    with gpu.room() as room:
        if kind == "slab":
            target = slabs.imported(gpu, descriptor, length).address
        else:
            memory = host.mapped(descriptor, length)
            target = memory.address
            gpu.ask("cuMemHostRegister", target, length, 0)
        source = room.bytes(length)
        print("ready", flush=True)
        if sys.stdin.readline():
            copy_without_end(gpu, target, source, length)


def copy_without_end(gpu: Gpu, target: int, source: int, length_bytes: int) -> None:
    """Never returns."""
    events = [gpu.ask("cuEventCreate", 2) for _ in range(DEPTH)]
    for number in itertools.count():
        if number >= DEPTH:
            gpu.ask("cuEventSynchronize", events[number % DEPTH])
        gpu.ask("cuMemsetD8Async", source, 1 + number % VALUES, length_bytes, gpu.stream)
        gpu.ask("cuMemcpyAsync", target, source, length_bytes, gpu.stream)
        gpu.ask("cuEventRecord", events[number % DEPTH], gpu.stream)


if __name__ == "__main__":
    main()
