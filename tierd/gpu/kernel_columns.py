"""Parameters and results of kernels: columns of host memory that the GPU reads and writes in place.

The lane knows when a kernel has ended. Columns do not move. They are adjacent in the order of their
dtype, the widest numbers first, so that each is aligned.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.gpu.device import Device
from tierd.kernels.buffers import Buffer

KINDS = {8: "u64", 4: "u32"}
"""Names in kernels."""


class KernelColumns:
    """rows of a structured dtype of u8 and u4, by columns. Calls in flight do not share it."""

    def __init__(self, device: Device, dtype: np.dtype[Any], rows: int) -> None:
        """Raises Overloaded."""
        self._device = device
        size = rows * dtype.itemsize
        self._address = int(device.call(device.cuda.cuMemHostAlloc, size, 0))
        room = memoryview((ctypes.c_ubyte * size).from_address(self._address)).cast("B")
        self.columns: dict[str, NDArray[Any]] = {}
        start = 0
        for name in dtype.names or ():
            self.columns[name] = np.frombuffer(room, dtype[name], rows, start)
            start += rows * dtype[name].itemsize

    def buffer(self, name: str, count: int) -> Buffer:
        """The first count rows of a column, for a kernel."""
        column = self.columns[name]
        kind = KINDS[column.dtype.itemsize]
        return Buffer(name, column.ctypes.data, (count,), column.strides, kind, self._device.name)

    def close(self) -> None:
        """No launch with it may follow."""
        self.columns = {}
        self._device.call(self._device.cuda.cuMemFreeHost, self._address)
