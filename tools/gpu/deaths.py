"""Checks whether a killed client's pidfd fires only after the last byte of its copies.

The daemon reuses memory after the pidfd. A client (`dying`) copies without end into host memory, or
into a slab, that this process has mapped too. It is killed in mid-copy. From the kill on, samples
record the last change of bytes. After the pidfd all of the memory must stay the same for some time.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tools.gpu import host, slabs
from tools.gpu.bench import Bench, end, started
from tools.gpu.device import DeviceArray, Gpu, Room
from tools.gpu.results import Result, Row, row_of

Array = np.ndarray[Any, Any]
KILLS = 20
READY = 3
"""Clients that are started ahead: making a context takes time."""
WATCHED_S, LOOK_S = 0.3, 0.02
"""The watch for late bytes after a pidfd, and the pause between two looks."""
SAMPLE_STEP = 4096
LIMIT_S = 10
SHARE = 0.45
"""Of the part's time, for each of the two kinds of memory."""


class Memory(Protocol):
    """Memory that a client writes and this process reads."""

    kind: str
    descriptor: int
    length_bytes: int

    def sample(self) -> Array:
        """Some of its bytes, quickly."""
        ...

    def whole(self) -> Array:
        """All of its bytes at one time."""
        ...


@dataclass(frozen=True, slots=True)
class Death:
    """Seconds from the kill, and from the last change, to the pidfd; whether bytes changed later."""

    to_pidfd: float
    margin: float
    is_late: bool


def results(bench: Bench) -> Iterator[Result]:
    """As many kills as fit in the time."""
    gpu, begun, deaths = bench.gpu(with_kernels=False), time.monotonic(), list[Death]()
    with gpu.room() as room:
        whole = bench.until - begun
        kinds = ((HostSide(bench.pick(64 << 20, 1 << 20)), SHARE), (SlabSide(gpu, room, bench), 2 * SHARE))
        for memory, share in kinds:
            found = list(_deaths(bench, memory, until=begun + share * whole))
            late = sum(death.is_late for death in found)
            yield Row(f"{memory.kind}_kills", len(found), "kills")
            yield Row(f"late_{memory.kind}_writes", late, "kills", note=f"of {len(found)}")
            deaths += found
    yield row_of("kill_to_pidfd", [1000 * max(death.to_pidfd for death in deaths)], "ms")
    yield row_of("last_change_to_pidfd", [1000 * min(death.margin for death in deaths)], "ms")


class HostSide:
    """A file in memory that the client registers."""

    kind = "host"

    def __init__(self, length_bytes: int) -> None:
        self.descriptor, self.length_bytes = host.made(length_bytes), length_bytes
        self._bytes = host.mapped(self.descriptor, length_bytes).bytes

    def sample(self) -> Array:
        """One byte of each page."""
        return self._bytes[::SAMPLE_STEP].copy()

    def whole(self) -> Array:
        """All of it."""
        return self._bytes.copy()


class SlabSide:
    """A slab of this process, which the client imports."""

    kind = "slab"

    def __init__(self, gpu: Gpu, room: Room, bench: Bench) -> None:
        self._gpu = gpu
        self._slab = slabs.made(gpu, bench.pick(256 << 20, 2 << 20))
        self.descriptor, self.length_bytes = slabs.exported(gpu, self._slab), self._slab.length_bytes
        self._taken = room.array((self.length_bytes,), np.uint8)
        gpu.ask("cuMemsetD8Async", self._slab.address, 0, self.length_bytes, gpu.stream)
        gpu.finish()

    def sample(self) -> Array:
        """Its last bytes, which each round writes last."""
        return self._gpu.read_back(
            DeviceArray(self._slab.address + self.length_bytes - SAMPLE_STEP, (SAMPLE_STEP,), np.uint8)
        )

    def whole(self) -> Array:
        """All of it, by a copy within the GPU, which takes well under a millisecond."""
        gpu, to = self._gpu, self._taken
        gpu.ask("cuMemcpyDtoDAsync", to.address, self._slab.address, self.length_bytes, gpu.stream)
        return gpu.read_back(to)


def _deaths(bench: Bench, memory: Memory, *, until: float) -> Iterator[Death]:
    """One death after another."""
    ahead = deque[subprocess.Popen[str]]()
    rng = np.random.default_rng(len(memory.kind))
    try:
        for _ in range(bench.pick(KILLS, 2)):
            while len(ahead) < bench.pick(READY, 1):
                ahead.append(_client(memory))
            client = ahead.popleft()
            try:
                if time.monotonic() > until:
                    return
                _let_it_copy(client, memory)
                time.sleep(float(rng.uniform(0, 0.02)))
                yield _killed(client, memory, watched_s=bench.pick(WATCHED_S, 0.02))
            finally:
                end(client)
    finally:
        for client in ahead:
            end(client)


def _client(memory: Memory) -> subprocess.Popen[str]:
    return started("dying", memory.kind, memory.descriptor, memory.length_bytes, pass_fds=[memory.descriptor])


def _let_it_copy(client: subprocess.Popen[str], memory: Memory) -> None:
    """Waits until bytes changed twice: copies are under way. Raises RuntimeError if they are not."""
    assert client.stdin and client.stdout
    if client.stdout.readline() != "ready\n":
        raise RuntimeError(f"a client that was to be killed ended by itself, with {client.wait(LIMIT_S)}")
    client.stdin.write("go\n")
    for _ in range(2):
        before, limit = memory.sample(), time.monotonic() + LIMIT_S
        while (memory.sample() == before).all():
            if time.monotonic() > limit:
                raise RuntimeError(f"{memory.kind}: a client's copies changed nothing in {LIMIT_S} s")


def _killed(client: subprocess.Popen[str], memory: Memory, *, watched_s: float) -> Death:
    descriptor = os.pidfd_open(client.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        before = memory.sample()
        begun = changed = time.perf_counter()
        client.kill()
        while not poll.poll(0):
            seen, now = memory.sample(), time.perf_counter()
            if (seen != before).any():
                before, changed = seen, now
            if now > begun + LIMIT_S:
                raise RuntimeError(f"a killed client had not ended after {LIMIT_S} s")
        fired = time.perf_counter()
        first, is_late = memory.whole(), False
        while not is_late and time.perf_counter() < fired + watched_s:
            time.sleep(LOOK_S)
            is_late = bool((memory.whole() != first).any())
        return Death(fired - begun, fired - changed, is_late)
    finally:
        os.close(descriptor)
