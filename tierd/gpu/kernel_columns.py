"""What kernels are told and answer: columns of host memory that the GPU reads and writes where it lies.

Purpose: `KernelColumns`. Non-purpose: when a kernel has ended, which is the lane's to say. Invariants: a column stays where it is; columns lie one behind the other in the order of their
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
"""As kernels name them."""


class KernelColumns:
    """rows of a structured dtype of u8 and u4, by columns. Not shared by calls that are under way at one time."""

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
        """The first so many of a column, for a kernel."""
        column = self.columns[name]
        kind = KINDS[column.dtype.itemsize]
        return Buffer(name, column.ctypes.data, (count,), column.strides, kind, self._device.name)

    def close(self) -> None:
        """Nothing may be launched with it any more."""
        self.columns = {}
        self._device.call(self._device.cuda.cuMemFreeHost, self._address)
