"""The few names of cupy that the example worker and the tests use, over the driver's bindings alone.

cupy itself needs a driver newer than the fake one. As in cupy, arrays are exported with the
thread's current stream, and rows share their array's memory.
"""

from __future__ import annotations

import math
import threading
import weakref
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from tests.unit.kernels.fake_driver import entered, ok

uint8 = np.uint8
_mine = threading.local()


def driver() -> Any:
    """The bindings, with the context current in this thread."""
    if not hasattr(_mine, "cuda"):
        _mine.cuda = entered()
    return _mine.cuda


class Stream:
    """A stream. As a context manager it is the thread's current one."""

    def __init__(self, *, non_blocking: bool = False) -> None:
        self.ptr = int(ok(driver().cuStreamCreate(int(non_blocking))))

    def synchronize(self) -> None:
        """Waits for its work."""
        ok(driver().cuStreamSynchronize(self.ptr))

    def __enter__(self) -> Self:
        self._before, _mine.stream = getattr(_mine, "stream", None), self.ptr
        return self

    def __exit__(self, *_: object) -> None:
        _mine.stream = self._before


cuda = SimpleNamespace(Stream=Stream)


def current() -> int:
    """The number of the thread's current stream."""
    return getattr(_mine, "stream", None) or 1


class Device:
    """cupy.cuda.Device"""

    id = 0


class Array:
    """An array of rows, contiguous."""

    device = Device()

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int, owner: object) -> None:
        self.shape, self.dtype, self.address, self.owner = shape, np.dtype(dtype), address, owner
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        where = {"data": (self.address, False), "strides": None, "stream": current()}
        return where | {"version": 3, "shape": self.shape, "typestr": self.dtype.str}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> Array:
        if not 0 <= row < len(self):
            raise IndexError(row)
        step = self.nbytes // len(self)
        return Array(self.shape[1:], self.dtype, self.address + row * step, self.owner)

    def set(self, array: Any) -> None:
        """Fills it from numpy, in the current stream."""
        data = np.ascontiguousarray(array, self.dtype)
        ok(driver().cuMemcpyHtoDAsync(self.address, data.ctypes.data, data.nbytes, current()))

    def fill(self, value: int) -> None:
        """Sets all bytes, in the current stream."""
        ok(driver().cuMemsetD8Async(self.address, value, self.nbytes, current()))

    def get(self) -> Any:
        """A copy for numpy, after the current stream's work."""
        out = np.empty(self.shape, self.dtype)
        ok(driver().cuMemcpyDtoHAsync(out.ctypes.data, self.address, out.nbytes, current()))
        ok(driver().cuStreamSynchronize(current()))
        return out


class _Memory:
    """An allocation."""

    def __init__(self, nbytes: int) -> None:
        self.address = int(ok(driver().cuMemAlloc(nbytes)))
        weakref.finalize(self, lambda at: driver().cuMemFree(at), self.address).atexit = False


def empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """New memory, not zeroed."""
    memory = _Memory(math.prod(shape) * np.dtype(dtype).itemsize)
    return Array(shape, dtype, memory.address, memory)
