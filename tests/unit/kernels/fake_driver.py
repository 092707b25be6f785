"""Tests on the fake driver of cuda/fake: each runs in a child process that loads it, not NVIDIA's.

`on_fake_driver` marks such a test. As a program, the module runs one function:
`python -m tests.unit.kernels.fake_driver MODULE FUNCTION ARGUMENTS`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.repo.source import ROOT
from tools.fake_cuda import build_driver
from tools.kernels import MissingTool

SLAB = 2 << 20
"""Bytes of the smallest piece of device memory."""
LIMIT_S = 100
COUNTED = [
    "handles",
    "mappings",
    "reservations",
    "allocations",
    "pinned",
    "streams",
    "events",
    "libraries",
    "pending",
    "charged_bytes",
]


def on_fake_driver(*, dies_of: signal.Signals | None = None, **environment: str) -> Callable[[Any], Callable[[], None]]:
    """Runs the test in a child. dies_of: the signal after it printed `now`; environment: more variables."""

    def marked(test: Any) -> Callable[[], None]:
        def run() -> None:
            done = subprocess.run(
                command(test),
                cwd=ROOT,
                env=fake_environment() | environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            print(done.stdout)
            assert done.returncode == -(dies_of or 0), f"ended with {done.returncode}\n{done.stdout}{done.stderr}"
            assert dies_of is None or done.stdout.endswith("now\n"), f"died before its time\n{done.stdout}{done.stderr}"

        run.inner = test  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return marked


def command(function: Any, *arguments: object) -> list[str]:
    """The command that runs the function in its own process, with its arguments as texts."""
    where = [sys.executable, "-m", "tests.unit.kernels.fake_driver"]
    return [*where, function.__module__, function.__name__, *map(str, arguments)]


def fake_environment() -> dict[str, str]:
    """An environment in which the bindings load the fake driver. Skips the test if it cannot be built."""
    try:
        return os.environ | {"LD_LIBRARY_PATH": str(build_driver()), "OPENBLAS_NUM_THREADS": "1"}
    except MissingTool as error:
        pytest.skip(f"the fake driver cannot be compiled here: {error}")


def entered() -> Any:
    """The bindings, with the device's context current."""
    cuda = importlib.import_module("cuda.bindings.driver")
    ok(cuda.cuInit(0))
    ok(cuda.cuCtxSetCurrent(ok(cuda.cuDevicePrimaryCtxRetain(0))))
    return cuda


def ok(answer: tuple[Any, ...]) -> Any:
    """The results of a successful call of the bindings."""
    assert not answer[0], answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]


def refused(answer: tuple[Any, ...]) -> str:
    """The error of a call, without its prefix."""
    return str(answer[0].name).removeprefix("CUDA_ERROR_")


def counts() -> dict[str, int]:
    """The resources that this process has not returned to the driver, by kind, without zeros."""
    room = (ctypes.c_uint64 * len(COUNTED))()
    ctypes.CDLL("libcuda.so.1").fake_cuda_counts(room)
    return {name: count for name, count in zip(COUNTED, room, strict=True) if count}


def peek(address: int, length_bytes: int) -> bytes:
    """The bytes in device memory now, past all streams. Ends the process if the mapping is unreadable."""
    room = ctypes.create_string_buffer(length_bytes)
    ctypes.CDLL("libcuda.so.1").fake_cuda_read(room, ctypes.c_uint64(address), ctypes.c_size_t(length_bytes))
    return room.raw


def poke(address: int, data: bytes) -> None:
    """Writes the bytes there, past all streams. Ends the process if the mapping is not writable."""
    ctypes.CDLL("libcuda.so.1").fake_cuda_write(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))


def shareable(cuda: Any) -> Any:
    """Properties of device memory that other processes may map."""
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def access(cuda: Any, *, rights: str) -> Any:
    """rights: NONE, READ or READWRITE."""
    description = cuda.CUmemAccessDesc()
    description.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    description.flags = getattr(cuda.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{rights}")
    return description


def mapped(cuda: Any, handle: Any, *, rights: str = "READWRITE", length_bytes: int = SLAB) -> int:
    """The address of new space that the memory of a handle is mapped to."""
    address = ok(cuda.cuMemAddressReserve(length_bytes, 0, 0, 0))
    ok(cuda.cuMemMap(address, length_bytes, 0, handle, 0))
    ok(cuda.cuMemSetAccess(address, length_bytes, [access(cuda, rights=rights)], 1))
    return int(address)


def unmapped(cuda: Any, address: int, *, length_bytes: int = SLAB) -> None:
    """Unmaps the address and frees its space."""
    ok(cuda.cuMemUnmap(address, length_bytes))
    ok(cuda.cuMemAddressFree(address, length_bytes))


class DeviceArray:
    """A numpy array's dense copy in device memory, with the attributes that `Buffer` needs."""

    class Device:
        """Named as in cupy."""

        id = 0

    device = Device()

    def __init__(self, cuda: Any, array: Any) -> None:
        array = np.ascontiguousarray(array)
        self._cuda, self.shape, self.strides, self.dtype = cuda, array.shape, array.strides, array.dtype
        self._bytes = max(1, array.nbytes)
        self.address = int(ok(cuda.cuMemAlloc(self._bytes)))
        ok(cuda.cuMemcpyHtoD(self.address, array.ctypes.data, array.nbytes))
        ok(cuda.cuCtxSynchronize())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False)}

    def numpy(self) -> Any:
        """Its content, after all work in streams that wait for the default one."""
        array = np.empty(self.shape, self.dtype)
        ok(self._cuda.cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes))
        return array

    def free(self) -> None:
        """Frees the memory."""
        ok(self._cuda.cuMemFree(self.address))


if __name__ == "__main__":
    function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    getattr(function, "inner", function)(*sys.argv[3:])
