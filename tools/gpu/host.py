"""Host memory as the daemon and its clients have it: a file in memory, registered for copies.

A process with its descriptor can map it. Invariants: numpy shows a mapping, and the driver gets the
same address.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.gpu.device import Gpu

Array = np.ndarray[Any, Any]
READ_ONLY = 0x08
"""CU_MEMHOSTREGISTER_READ_ONLY"""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """bytes: of the mapping, as u8."""

    bytes: Array

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.bytes.ctypes.data)


def made(length_bytes: int) -> int:
    """A descriptor of such a file with allocated pages."""
    descriptor = os.memfd_create("tierd-gpu-check")
    os.posix_fallocate(descriptor, 0, length_bytes)
    return descriptor


def mapped(descriptor: int, length_bytes: int, *, is_read_only: bool = False) -> HostMemory:
    """The file in this process. is_read_only: by a separate read-only descriptor, as clients get
    theirs."""
    if not is_read_only:
        return HostMemory(np.frombuffer(mmap.mmap(descriptor, length_bytes), np.uint8))
    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    try:
        return HostMemory(np.frombuffer(mmap.mmap(opened, length_bytes, prot=mmap.PROT_READ), np.uint8))
    finally:
        os.close(opened)


@contextmanager
def registered(gpu: Gpu, memory: HostMemory, flags: int = 0) -> Iterator[int]:
    """Its address for copies and kernels. Raises the driver's error."""
    gpu.ask("cuMemHostRegister", memory.address, memory.bytes.nbytes, flags)
    try:
        yield int(gpu.ask("cuMemHostGetDevicePointer", memory.address, 0))
    finally:
        gpu.finish()
        gpu.ask("cuMemHostUnregister", memory.address)


@contextmanager
def pinned(gpu: Gpu, length_bytes: int) -> Iterator[HostMemory]:
    """New host memory, registered."""
    descriptor = made(length_bytes)
    try:
        memory = mapped(descriptor, length_bytes)
        with registered(gpu, memory) as address:
            assert address == memory.address, "the GPU has an address of its own for it"
            yield memory
    finally:
        os.close(descriptor)
