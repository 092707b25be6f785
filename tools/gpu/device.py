"""A GPU for checks and benchmarks, by NVIDIA's bindings alone: arrays, copies and times.

Purpose: `Gpu`; `DeviceArray`, which the kernels' functions accept. Non-purpose: the checks.
Invariants: every driver call is checked; all work goes to one separate stream. Memory lives until
its `Room` ends. torch and cupy are not needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tierd.errors import TierFailed, Unsupported
from tierd.kernels.driver import bindings, call
from tierd.kernels.loaded import FATBINS, Loaded

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
NON_BLOCKING = 1
GUARD_BYTES = 512
"""Before and behind an array that came from numpy: nothing may write there."""
GUARD = 0xA5


class DeviceArray:
    """Memory of the GPU with the fields that `Buffer` needs. shape in elements, strides in bytes."""

    device = SimpleNamespace(id=0)

    def __init__(self, address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int] = ()) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), np.dtype(dtype)
        dense = self.dtype.itemsize * np.append(np.cumprod(self.shape[:0:-1])[::-1], 1)
        self.strides = tuple(strides) or tuple(int(step) for step in dense[: len(self.shape)])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False)}

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def part(self, first: int, count: int) -> DeviceArray:
        """Some indices of its first axis."""
        return DeviceArray(self.address + first * self.strides[0], (count, *self.shape[1:]), self.dtype, self.strides)

    def axes(self, *order: int) -> DeviceArray:
        """The same memory with its axes in another order."""
        shape, strides = [self.shape[i] for i in order], [self.strides[i] for i in order]
        return DeviceArray(self.address, shape, self.dtype, strides)

    def at(self, axis: int, index: int) -> DeviceArray:
        """The same memory at one index of an axis, without that axis."""
        rest = [i for i in range(len(self.shape)) if i != axis]
        place = self.address + index * self.strides[axis]
        return DeviceArray(place, [self.shape[i] for i in rest], self.dtype, [self.strides[i] for i in rest])


class Kernels(Loaded):
    """The fatbins, for cases that were written for numpy's arrays: `placed` moves these."""

    gpu: Gpu

    @contextmanager
    def placed(self) -> Iterator[Callable[[Any], Any]]:
        """As tests/unit/kernels/kernel_cases.py defines it."""
        mirror = _Mirror(self.gpu)
        try:
            yield mirror.put
            mirror.fetch()
        finally:
            mirror.end()


class Gpu:
    """The first GPU, its primary context, a stream, the kernels. Raises Unsupported if one of these
    is missing."""

    def __init__(self, fatbins: Path = FATBINS, *, with_kernels: bool = True) -> None:
        self.cuda = bindings()
        self.ordinal = self.ask("cuDeviceGet", 0)
        self.context = self.ask("cuDevicePrimaryCtxRetain", self.ordinal)
        self.ask("cuCtxSetCurrent", self.context)
        self.stream = self.ask("cuStreamCreate", NON_BLOCKING)
        self.kernels: Any = None
        if with_kernels:
            self.kernels = Kernels(fatbins, stream=lambda: int(self.stream))
            self.kernels.gpu = self

    def ask(self, name: str, *given: Any) -> Any:
        """A driver function's answer. Raises the errors of `call`; Unsupported if it is missing."""
        try:
            return call(getattr(self.cuda, name), *given, what="GPU")
        except RuntimeError as error:  # of the bindings
            raise Unsupported(f"GPU: the driver has no {name} ({error})") from error

    def find_attribute(self, name: str) -> int | None:
        """None if the driver does not know it."""
        code = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        result, value = (1, 0) if code is None else self.cuda.cuDeviceGetAttribute(code, self.ordinal)
        return None if result else int(value)

    @property
    def name(self) -> str:
        """The driver's name for it."""
        told: bytes = self.ask("cuDeviceGetName", 64, self.ordinal)
        return told.split(b"\0")[0].decode()

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors."""
        return self.find_attribute("MULTIPROCESSOR_COUNT") or 1

    def finish(self) -> None:
        """Waits for all work. Raises TierFailed if it failed."""
        self.ask("cuCtxSynchronize")

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Memory that is freed at the end of the context."""
        room = Room(self)
        try:
            yield room
        finally:
            room.end()

    def read_back(self, array: DeviceArray) -> Array:
        """A dense array's elements, after all work."""
        self.finish()
        host = np.empty(array.shape, array.dtype)
        if host.nbytes:
            self.ask("cuMemcpyDtoH", host.ctypes.data, array.address, host.nbytes)
        return host

    def write(self, array: DeviceArray, elements: Array) -> None:
        """Fills a dense array."""
        told = np.ascontiguousarray(elements, array.dtype)
        if told.nbytes:
            self.ask("cuMemcpyHtoD", array.address, told.ctypes.data, told.nbytes)
        self.finish()

    def repeat(self, array: DeviceArray, pattern: Array) -> None:
        """Fills a dense array with copies of a pattern, by doubling the filled part."""
        raw = np.ascontiguousarray(pattern).view(np.uint8).reshape(-1)[: array.nbytes]
        self.ask("cuMemcpyHtoD", array.address, raw.ctypes.data, raw.nbytes)
        self.finish()
        done = raw.nbytes
        while done < array.nbytes:
            count = min(done, array.nbytes - done)
            self.ask("cuMemcpyDtoDAsync", array.address + done, array.address, count, self.stream)
            done += count
        self.finish()

    # -- times

    @cached_property
    def has_graphs(self) -> bool:
        """Whether the driver captures work of a stream."""
        try:
            self.captured(lambda: None)
        except (Unsupported, TierFailed):
            return False
        return True

    def captured(self, work: Callable[[], Any]) -> Any:
        """A graph of the work's launches, for cuGraphLaunch. Raises Unsupported."""
        self.ask("cuStreamBeginCapture", self.stream, self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            work()
        finally:
            graph = self.ask("cuStreamEndCapture", self.stream)
        made = self.ask("cuGraphInstantiate", graph, 0)
        self.ask("cuGraphDestroy", graph)
        return made

    def times(self, works: Sequence[Callable[[], Any]], *, rounds: int, as_graphs: bool = True) -> list[float]:
        """Seconds of one of the works, a figure for each round.

        Each uses other memory, so none hits the cache. as_graphs: captures them if the driver can.
        Then a figure excludes the caller's launch time. Batched copies cannot be captured.
        """
        for work in works:
            work()
        self.finish()
        graphs = [self.captured(work) for work in works] if as_graphs and self.has_graphs else []
        launches = [lambda graph=graph: self.ask("cuGraphLaunch", graph, self.stream) for graph in graphs] or works
        seconds = [self._round(launches) for _ in range(rounds + 1)][1:]
        for graph in graphs:
            self.ask("cuGraphExecDestroy", graph)
        return seconds

    def _round(self, launches: Sequence[Callable[[], Any]]) -> float:
        events = [self.ask("cuEventCreate", 0) for _ in range(2)]
        self.ask("cuEventRecord", events[0], self.stream)
        for launch in launches:
            launch()
        self.ask("cuEventRecord", events[1], self.stream)
        self.ask("cuEventSynchronize", events[1])
        taken = float(self.ask("cuEventElapsedTime", *events)) / 1000 / len(launches)
        for event in events:
            self.ask("cuEventDestroy", event)
        return max(taken, 1e-9)


class Room:
    """Memory of the GPU that is freed together."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._places: list[Any] = []

    def array(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """An array with undefined contents."""
        made = DeviceArray(0, shape, dtype)
        made.address = self.bytes(max(16, made.nbytes))
        return made

    def of(self, elements: Array) -> DeviceArray:
        """A copy of a numpy array."""
        made = self.array(elements.shape, elements.dtype)
        self._gpu.write(made, elements)
        return made

    def bytes(self, length_bytes: int) -> int:
        """An address. Raises Overloaded."""
        self._places.append(self._gpu.ask("cuMemAlloc", length_bytes))
        return int(self._places[-1])

    def end(self) -> None:
        """Frees all of it."""
        while self._places:
            self._gpu.ask("cuMemFree", self._places.pop())


class _Mirror:
    """Copies of numpy arrays on the GPU, each with its owner's memory, which its views share."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._room = gpu, Room(gpu)
        self._held: dict[int, tuple[Array, int]] = {}

    def put(self, given: Any) -> Any:
        """The same with its arrays on the GPU."""
        if isinstance(given, np.ndarray):
            return self._view(given)
        if isinstance(given, list | tuple):
            return [self.put(each) for each in given]
        if is_dataclass(given) and not isinstance(given, type):
            return replace(given, **{field.name: self.put(getattr(given, field.name)) for field in fields(given)})
        return given

    def fetch(self) -> None:
        """Copies back the kernels' writes. Raises AssertionError if one is outside its arrays."""
        self._gpu.finish()
        for owner, place in self._held.values():
            raw = np.empty(owner.nbytes + 2 * GUARD_BYTES, np.uint8)
            self._gpu.ask("cuMemcpyDtoH", raw.ctypes.data, place, raw.nbytes)
            assert (raw[:GUARD_BYTES] == GUARD).all(), "something was written before an array"
            assert (raw[GUARD_BYTES + owner.nbytes :] == GUARD).all(), "something was written behind an array"
            ctypes.memmove(owner.ctypes.data, raw[GUARD_BYTES:].ctypes.data, owner.nbytes)

    def end(self) -> None:
        """Frees the memory."""
        self._room.end()

    def _view(self, array: Array) -> DeviceArray:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        place = self._held[id(owner)][1] if id(owner) in self._held else self._brought(owner)
        offset = array.ctypes.data - owner.ctypes.data
        return DeviceArray(place + GUARD_BYTES + offset, array.shape, array.dtype, array.strides)

    def _brought(self, owner: Array) -> int:
        assert owner.flags.c_contiguous, "an array's own memory is dense"
        raw = np.full(owner.nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        ctypes.memmove(raw[GUARD_BYTES:].ctypes.data, owner.ctypes.data, owner.nbytes)
        place = self._room.bytes(raw.nbytes)
        self._gpu.ask("cuMemcpyHtoD", place, raw.ctypes.data, raw.nbytes)
        self._gpu.finish()
        self._held[id(owner)] = (owner, place)
        return place
