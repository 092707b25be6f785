"""Several processes attend to one slab's pages, as workers do. One dies, then the slab's owner."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from tierd.client.session import device
from tierd.client.session.ranges import contiguous
from tierd.errors import TierdError
from tierd.kernels.pages import copy_runs
from tools.gpu import attending, slabs
from tools.gpu.bench import Bench
from tools.gpu.device import DeviceArray
from tools.gpu.results import Check, Result, Row

READERS = 3
WATCHED_S = 1.5
LIMIT_S = 25
SEAM_BYTES = 64 << 10
"""On either side of the seam between two mappings."""


class Reader:
    """A process that attends, and its reports so far."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child, self.count, self.digests, self.right = child, 0, set[str](), ""

    def hear(self) -> None:
        """Reads one more line. Raises RuntimeError if the process has ended."""
        assert self.child.stdout
        told = self.child.stdout.readline().split()
        if not told:
            raise RuntimeError(f"a process that attends ended with {self.child.wait(LIMIT_S)}")
        self.count, self.right = int(told[0]), told[2]
        self.digests |= set(told[1].split("+"))


def results(bench: Bench) -> Iterator[Result]:
    """In the order of the deaths."""
    length = bench.pick(256 << 20, 2 << 20)
    with ExitStack() as stack:
        owner, descriptor, length = _owned(bench, stack, length)
        asked = ("read", descriptor, length, bench.fatbins)
        readers = [
            Reader(stack.enter_context(bench.process("attending", *asked, pass_fds=[descriptor])))
            for _ in range(READERS)
        ]
        for reader in readers:
            reader.hear()
        yield Check("shared_read_only", passed=True, said="mapped for reading by every process")
        before = _pace(readers, bench.pick(WATCHED_S, 0.2))
        yield _same("shared_same_bits", readers)
        readers.pop(0).child.kill()
        after = _pace(readers, bench.pick(WATCHED_S, 0.2))
        yield _same("shared_survivor", readers)
        yield Row("shared_pace", after, "decodes/s", before, after / before)
        yield _in_a_row(bench, descriptor, length)
        yield _write_fault(bench, readers, descriptor, length)
        owner.kill()
        owner.wait(LIMIT_S)
        _pace(readers, bench.pick(WATCHED_S, 0.1))
        yield _owner_death(bench, readers, descriptor, length)


def _owned(bench: Bench, stack: ExitStack, length_bytes: int) -> tuple[subprocess.Popen[str], int, int]:
    """The owner, the descriptor that it sent, and the slab's length."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(ours)
    with theirs:
        owner = stack.enter_context(
            bench.process("attending", "own", theirs.fileno(), length_bytes, pass_fds=[theirs.fileno()])
        )
    ours.settimeout(LIMIT_S)
    told, (descriptor,), _, _ = socket.recv_fds(ours, 64, 1)
    stack.callback(os.close, descriptor)
    return owner, descriptor, int(told)


def _pace(readers: list[Reader], seconds: float) -> float:
    """Decodes a second of all of them. Raises RuntimeError if one ends."""
    for reader in readers:
        reader.hear()
    begun, counts, until = time.monotonic(), [reader.count for reader in readers], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([reader.child.stdout for reader in readers], [], [], left)
        for reader in readers:
            if reader.child.stdout in ready:
                reader.hear()
    for reader in readers:
        reader.hear()
    done = sum(reader.count - count for reader, count in zip(readers, counts, strict=True))
    return done / (time.monotonic() - begun)


def _same(name: str, readers: list[Reader]) -> Check:
    digests = set.union(*(reader.digests for reader in readers))
    wrong = [reader.right for reader in readers if reader.right != "right"]
    said = f"{sum(reader.count for reader in readers)} decodes by {len(readers)} processes, {len(digests)} outputs"
    return Check(name, passed=len(digests) == 1 and not wrong, said="; ".join([said, *wrong]))


def _in_a_row(bench: Bench, descriptor: int, length_bytes: int) -> Check:
    """Maps the slab twice in a row, as a worker does; a kernel copies bytes across the seam."""
    gpu, worker = bench.gpu(), device.Gpu(device.GpuPlace("", 0))
    memory = worker.map(descriptor, length_bytes, is_writable=False)
    page = device.DevicePage(memory, memory.address, length_bytes, pin=None, writable=False)
    row = contiguous([page, page])
    with gpu.room() as room:
        got = room.array((2 * SEAM_BYTES,), np.uint8)
        to, source = (
            room.of(np.array([at], np.uint64)) for at in (got.address, row.address + length_bytes - SEAM_BYTES)
        )
        copy_runs(gpu.kernels, to, source, lengths=room.of(np.array([got.nbytes], np.uint32)))
        ends = [DeviceArray(memory.address + at, (SEAM_BYTES,), np.uint8) for at in (length_bytes - SEAM_BYTES, 0)]
        want = np.concatenate([gpu.read_back(end) for end in ends])
        is_right = bool((gpu.read_back(got) == want).all()) and bool(want.any())
    return Check("shared_in_a_row", is_right, "right across the seam" if is_right else "other bytes about the seam")


def _write_fault(bench: Bench, readers: list[Reader], descriptor: int, length_bytes: int) -> Check:
    """One more process writes to memory that it may only read."""
    with bench.process("attending", "write", descriptor, length_bytes, pass_fds=[descriptor]) as writer:
        assert writer.stdout
        said = writer.stdout.readline().strip()
    _pace(readers, bench.pick(WATCHED_S, 0.1))
    same = _same("shared_write_fault", readers)
    return Check(same.name, passed=same.passed and said.startswith("refused"), said=f"{said}; then {same.said}")


def _owner_death(bench: Bench, readers: list[Reader], descriptor: int, length_bytes: int) -> Check:
    """The readers continue; a process with the descriptor can map the memory again, unchanged."""
    same = _same("shared_owner_death", readers)
    try:
        gpu = bench.gpu(with_kernels=False)
        slab = slabs.imported(gpu, descriptor, length_bytes, rights="READ")
        pool = attending.pool_in(gpu, slab, is_filled=True)
        first = DeviceArray(slab.address, pool.pattern.shape, pool.pattern.dtype)
        is_there = bool((gpu.read_back(first).view(np.uint16) == pool.pattern.view(np.uint16)).all())
    except TierdError as error:
        return Check(same.name, passed=False, said=f"{same.said}; {error}")
    return Check(
        same.name, passed=same.passed and is_there, said=f"{same.said}; pages {'kept' if is_there else 'lost'}"
    )
