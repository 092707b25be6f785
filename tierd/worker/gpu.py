"""A GPU in a worker: arrays for host computation, memory for own pages, marks of running work.

`GpuArray` has the parts of the array API that `tierd.kernels.attention` needs; there are no
mathematics or launches. Everything uses the current stream, torch's if torch is loaded, as launches
do. So released memory is reused only behind the work before its release. A copy to the host has
ended when it returns; `moved` counts copied bytes.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks.gpu_work import pauses
from tierd.client.session.device import Gpu, GpuPlace, Mark, gpu_at
from tierd.errors import InvalidArgument, TierFailed
from tierd.kernels.buffers import BYTES, DTYPES
from tierd.kernels.loaded import current_stream

FINISH_TIMEOUT_S = 30.0
"""Seconds for all launched work to end, before a worker releases pages."""
ALIGNMENT_BYTES = 512


class GpuMemory:
    """Memory of one GPU; one caller thread. id: its number in this process. moved: bytes copied
    `in` from the host, `out` to it, and `within`."""

    def __init__(self, gpu: Gpu) -> None:
        self.id = gpu.id
        self.moved: Counter[str] = Counter()
        self._gpu = gpu
        self._spare: dict[int, deque[int]] = defaultdict(deque)
        self._events: deque[Any] = deque()

    def empty(self, shape: tuple[int, ...], dtype: str) -> GpuArray:
        """An array of undefined contents. dtype: as numpy and torch name it. Raises Overloaded."""
        length_bytes = max(1, int(np.prod(shape)) * _bytes(dtype))
        # Enough sizes to waste at most an eighth, few enough that released memory fits the next
        # array.
        step = max(ALIGNMENT_BYTES, 1 << max(0, length_bytes.bit_length() - 4))
        piece = _Piece(self._room(-(-length_bytes // step) * step))
        weakref.finalize(piece, self._spare[-(-length_bytes // step) * step].append, piece.address).atexit = False
        return GpuArray(self, piece.address, tuple(shape), dtype, piece)

    def over(self, memory: Any, shape: tuple[int, ...], dtype: str) -> GpuArray:
        """The start of memory with the CUDA array interface, without a copy; the array keeps it
        alive. Raises InvalidArgument if it is too short."""
        interface = memory.__cuda_array_interface__
        wanted = int(np.prod(shape)) * _bytes(dtype)
        if int(np.prod(interface["shape"])) < wanted:
            raise InvalidArgument(
                f"page: {interface['shape'][0]} bytes on the GPU for an array of {wanted}; give a longer one"
            )
        return GpuArray(self, interface["data"][0], shape, dtype, memory)

    def filled(self, array: NDArray[Any]) -> GpuArray:
        """A copy of a host array, which may change after this returns. Raises Overloaded."""
        given = np.ascontiguousarray(array)
        made = self.empty(given.shape, str(given.dtype))
        self._copy("in", "cuMemcpyHtoDAsync", (made.address, given.ctypes.data), given.nbytes)
        return made

    def read(self, array: GpuArray) -> NDArray[Any]:
        """A copy on the host, after all work of the current stream. Raises TypeError for types that
        numpy lacks, DeadlineExceeded."""
        made = np.empty(array.shape, array.dtype)
        self._gpu.await_stream(current_stream(self.id))
        self._copy("out", "cuMemcpyDtoHAsync", (made.ctypes.data, array.address), made.nbytes)
        with self._gpu.entered():
            self._gpu.ask("cuStreamSynchronize", current_stream(self.id))
        return made

    def copy(self, source: GpuArray, target: GpuArray, *, tokens: int) -> None:
        """Copies the first tokens of a page [layers, 2, tokens, kv_heads, head_dim] into another."""
        row = int(np.prod(source.shape[3:])) * _bytes(source.dtype)
        for part in range(source.shape[0] * source.shape[1]):
            ends = (target.address + part * target.shape[2] * row, source.address + part * source.shape[2] * row)
            self._copy("within", "cuMemcpyDtoDAsync", ends, tokens * row)

    def mark(self) -> Mark:
        """A mark behind all work of the current stream."""
        with self._gpu.entered():
            # without times
            event = self._events.popleft() if self._events else self._gpu.ask("cuEventCreate", 2)
            self._gpu.ask("cuEventRecord", event, current_stream(self.id))
        mark = Mark(self._gpu, event)
        weakref.finalize(mark, self._events.append, event).atexit = False
        return mark

    def finish(self) -> None:
        """Waits for all work of the current stream. Raises DeadlineExceeded while a GPU hangs. A
        GPU lost to this process has no running work."""
        try:
            for pause_s in pauses([self.mark()], time.monotonic() + FINISH_TIMEOUT_S):
                time.sleep(pause_s)
        except TierFailed:
            pass

    def trim(self) -> None:
        """Returns unused memory to the driver. Raises DeadlineExceeded while a GPU hangs."""
        if any(self._spare.values()):
            self._gpu.await_stream(current_stream(self.id))
        with self._gpu.entered():
            for addresses in self._spare.values():
                while addresses:
                    self._gpu.ask("cuMemFree", addresses.popleft())

    def _room(self, length_bytes: int) -> int:
        if self._spare[length_bytes]:
            return self._spare[length_bytes].popleft()
        with self._gpu.entered():
            return int(self._gpu.ask("cuMemAlloc", length_bytes))

    def _copy(self, way: str, function: str, ends: tuple[int, int], length_bytes: int) -> None:
        if length_bytes:
            with self._gpu.entered():
                self._gpu.ask(function, *ends, length_bytes, current_stream(self.id))
            self.moved[way] += length_bytes


@dataclass(frozen=True, eq=False)
class _Piece:
    """Allocated memory, which is released when it is collected."""

    address: int


@dataclass(frozen=True, eq=False)
class GpuArray:
    """A GPU array without gaps. owner: keeps its memory."""

    device: GpuMemory
    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes."""
        return tuple(accumulate(self.shape[:0:-1], int.__mul__, initial=_bytes(self.dtype)))[::-1]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": f"|V{_bytes(self.dtype)}",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """This module."""
        return sys.modules[__name__]

    def __getitem__(self, rows: slice) -> GpuArray:
        """Consecutive rows of the first axis, in the same memory."""
        first, stop, _ = rows.indices(self.shape[0])
        shape = (max(0, stop - first), *self.shape[1:])
        return GpuArray(self.device, self.address + first * self.strides[0], shape, self.dtype, self.owner)

    def to_device(self, device: str, *, stream: object = None) -> NDArray[Any]:
        """A numpy array, for "cpu"."""
        if device != "cpu":
            raise InvalidArgument(f"array: it is on cuda:{self.device.id}, and goes to 'cpu' only, not to {device!r}")
        return self.device.read(self)


@cache
def gpu_memory(ordinal: int) -> GpuMemory:
    """The memory of a GPU by its number in this process. Raises Unsupported."""
    return GpuMemory(gpu_at(GpuPlace("", ordinal)))


os.register_at_fork(after_in_child=gpu_memory.cache_clear)

# -- functions that the array API expects in a namespace

bfloat16, float16, float32, int32, int64 = "bfloat16", "float16", "float32", "int32", "int64"


def asarray(array: Any, *, device: GpuMemory | None = None, order: str = "C") -> GpuArray:
    """A numpy array copied to that GPU; an array already there is returned unchanged."""
    if isinstance(array, GpuArray):
        return array
    assert device is not None and order == "C"
    return device.filled(array)


def empty(shape: tuple[int, ...], *, dtype: str, device: GpuMemory) -> GpuArray:
    """As GpuMemory.empty."""
    return device.empty(shape, dtype)


def empty_like(array: GpuArray) -> GpuArray:
    """Another one of this shape and type."""
    return array.device.empty(array.shape, array.dtype)


def astype(array: GpuArray, dtype: str, *, copy: bool = True) -> GpuArray:
    """The array itself. Raises InvalidArgument for another type, or a copy."""
    if copy or array.dtype != dtype:
        raise InvalidArgument(f"array: has type {array.dtype}, wanted {dtype}; convert it on the host")
    return array


def _bytes(dtype: str) -> int:
    return BYTES[DTYPES[dtype]]
