"""Maps the daemon's GPU memory into this process with CUDA's virtual memory management.

A slab's descriptor becomes a page with `__cuda_array_interface__`. The caller launches kernels and
orders streams (`gpu_work.py`). A segment is mapped for writing only if this session is its writer;
on another, a write faults in the kernel. A mapping is removed only when no GPU work of this process
can use it. Finalisers only queue the end of memory. The driver is loaded when the first segment
is mapped. A hanging kernel costs a call at most its deadline, or COPY_TIMEOUT_S. Do not map a
segment while this process captures a CUDA graph: it would end the capture.

Without the extra, the driver or the daemon's GPU, calls raise `Unsupported`; use tier="host" then.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierd.client.blocks import buffers
from tierd.client.blocks.gpu_work import pauses
from tierd.client.connect.forks import Bound
from tierd.client.session import mapping
from tierd.core.formats.words import Words
from tierd.errors import DeadlineExceeded, InvalidArgument, Unsupported
from tierd.kernels.driver import bindings, call, fault

WHAT = "device tier"
COPY_TIMEOUT_S = 30.0
"""Time limit for all work before a copy to or from the host."""


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Names a GPU of the daemon by its uuid, hexadecimal digits that are the same in every process.
    Without one, by the daemon's number for it, the ordinal."""

    uuid: str
    ordinal: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> GpuPlace:
        """From the fields of a hello."""
        return cls(str(fields.get("uuid", "")), int(fields.get("ordinal", 0)))


class Gpu:
    """One GPU in this process, in its primary context, which torch and cupy use too."""

    def __init__(self, place: GpuPlace) -> None:
        """Raises Unsupported."""
        self.cuda = driver(WHAT, 'use tier="host"')
        self.id = self._find(place)
        self._ended: deque[Callable[[], object]] = deque()
        self._event, self._passed = None, 0  # the event comes after the ends of this many of them
        self._unmapping = threading.Lock()
        self._context = call(self.cuda.cuDevicePrimaryCtxRetain, self.id, what=WHAT)

    def ask(self, name: str, *given: Any) -> Any:
        """Calls a function of the driver. Raises what `tierd.kernels.driver.fault` makes."""
        return call(getattr(self.cuda, name), *given, what=WHAT)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the GPU's context current in this thread."""
        self.ask("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.ask("cuCtxPopCurrent")

    def map(self, fd: int, length_bytes: int, *, is_writable: bool) -> Memory:
        """Maps a slab into this process. Raises TierFailed, Unsupported, Overloaded."""
        cuda = self.cuda
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self.entered():
            self._unmap_ended()
            handle = self.ask("cuMemImportFromShareableHandle", fd, kind)
            try:
                address = int(self.ask("cuMemAddressReserve", length_bytes, 0, 0, 0))
                try:
                    self.ask("cuMemMap", address, length_bytes, 0, handle, 0)
                except BaseException:
                    self.ask("cuMemAddressFree", address, length_bytes)
                    raise
            finally:
                self.ask("cuMemRelease", handle)  # the mapping keeps the memory
            memory = Memory(self, address, length_bytes)
            self.ask("cuMemSetAccess", address, length_bytes, [self.access(is_writable=is_writable)], 1)
        return memory

    def note_ended(self, end: Callable[[], object]) -> None:
        """Queues the end of memory, for a later call when the GPU's work is done. Safe in finalisers."""
        self._ended.append(end)

    def unmap_ended(self) -> None:
        """Ends queued memory whose GPU work is done; a later call ends the rest. Never waits."""
        if self._ended:
            with self.entered():
                self._unmap_ended()

    @property
    def granularity(self) -> int:
        """Slab lengths are multiples of this many bytes."""
        prop = self.cuda.CUmemAllocationProp()
        prop.type = self.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = self.access(is_writable=False).location
        least = self.cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.ask("cuMemGetAllocationGranularity", prop, least))

    def is_past(self, event: Any) -> bool:
        """Whether all work before an event is done. Raises TierFailed if it never will be."""
        with self.entered():
            (result,) = self.cuda.cuEventQuery(event)
        if result.name in ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"):
            return not result
        raise fault(result, f"cuda:{self.id}: work of this process")

    def await_stream(self, stream: int) -> None:
        """Waits until the stream's work is done. Raises DeadlineExceeded after COPY_TIMEOUT_S, and
        TierFailed if this process has lost the GPU."""
        with self.entered():
            event = self.ask("cuEventCreate", 2)  # without timing
            try:
                self.ask("cuEventRecord", event, stream)
                for pause_s in pauses([Mark(self, event)], time.monotonic() + COPY_TIMEOUT_S):
                    time.sleep(pause_s)
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"cuda:{self.id}: work that was launched before a copy is not done after {COPY_TIMEOUT_S:g} s; end the kernel that hangs, and copy again"
                ) from None
            finally:
                self.ask("cuEventDestroy", event)

    def _unmap_ended(self) -> None:
        with self._unmapping:
            # Counted before the event: mappings that end later may be used by work that was
            # launched later.
            count = len(self._ended)
            if count and not self._passed:
                self._event = self._event or self.ask("cuEventCreate", 2)
                self.ask("cuCtxRecordEvent", self._context, self._event)
                self._passed = count
            if not self._passed or not self.is_past(self._event):
                return
            self.ask("cuEventDestroy", self._event)
            self._event = None
            for _ in range(self._passed):
                self._ended.popleft()()
            self._passed = 0

    def unmap(self, address: int, length_bytes: int) -> None:
        """Unmaps memory and frees its addresses."""
        self.ask("cuMemUnmap", address, length_bytes)
        self.ask("cuMemAddressFree", address, length_bytes)

    def access(self, *, is_writable: bool) -> Any:
        """Access rights for this GPU, in the driver's form."""
        access = self.cuda.CUmemAccessDesc()
        access.location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.id
        rights = "READWRITE" if is_writable else "READ"
        access.flags = getattr(self.cuda.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{rights}")
        return access

    def _find(self, place: GpuPlace) -> int:
        for device in range(self.ask("cuDeviceGetCount")):
            uuid = bytes(self.ask("cuDeviceGetUuid", device).bytes).hex()
            if uuid == place.uuid or (not place.uuid and device == place.ordinal):
                return device
        raise Unsupported(
            f"{WHAT}: this process does not see the daemon's GPU (number {place.ordinal} there, uuid {place.uuid}); let "
            'CUDA_VISIBLE_DEVICES name it, or use tier="host"'
        )


def driver(what: str, otherwise: str) -> Any:
    """NVIDIA's driver. Raises Unsupported with what fails, and what else to do."""
    try:
        return bindings()
    except Unsupported as error:
        raise Unsupported(f"{what}: {error}; or {otherwise}") from error


class Mark:
    """A place in a stream, for `after` of reservations and leases."""

    def __init__(self, gpu: Gpu, event: Any) -> None:
        self._gpu, self._event = gpu, event

    def query(self) -> bool:
        """Whether all work before it is done. Raises TierFailed if it never will be."""
        return self._gpu.is_past(self._event)


class Memory:
    """A mapped slab. It stays mapped while this object lives."""

    __slots__ = ("__weakref__", "address", "gpu", "length_bytes")

    def __init__(self, gpu: Gpu, address: int, length_bytes: int) -> None:
        self.gpu, self.address, self.length_bytes = gpu, address, length_bytes
        weakref.finalize(self, gpu.note_ended, partial(gpu.unmap, address, length_bytes)).atexit = False


@dataclass(frozen=True, eq=False)
class DeviceSegment:
    """One mapped segment. words, metas: generation word and META of each page, always in host
    memory."""

    id: int
    memory: Memory
    words: Words
    metas: memoryview
    is_writable: bool

    @property
    def address(self) -> int:
        """Address of the memory, for the driver."""
        return self.memory.address

    @property
    def is_empty(self) -> bool:
        """Whether no page of it is in use now; it may have ended."""
        return mapping.is_unused(self.words)

    def exposed(self, pin: object, *, writable: bool) -> DevicePage:
        """The whole segment as a page, under a pin."""
        memory = self.memory
        return DevicePage(memory, memory.address, memory.length_bytes, pin=pin, writable=writable and self.is_writable)


class DevicePage(Bound):
    """Bytes on the GPU, uint8 [n], by `__cuda_array_interface__` (version 3) or `address`.

    The page, its slices and cupy arrays made from them keep the memory pinned. A launched kernel
    does not. Hold the page until the kernel is done, or pass its event to `after` of the lease or
    reservation. Torch accepts no read-only array: give it `unmarked()`.
    """

    __slots__ = ("__weakref__", "_pin", "address", "is_writable", "memory", "nbytes")

    dtype = np.dtype(np.uint8)
    strides = (1,)

    def __init__(self, memory: Memory, address: int, nbytes: int, *, pin: object, writable: bool) -> None:
        self.memory, self._pin = memory, pin
        self.address, self.nbytes, self.is_writable = address, nbytes, writable

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, not self.is_writable),
            "strides": None,
            "stream": None,
        }

    @property
    def shape(self) -> tuple[int]:
        """(n,)"""
        return (self.nbytes,)

    @property
    def device(self) -> Gpu:
        """The GPU that holds it; `device.id` is its number in this process."""
        return self.memory.gpu

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DevicePage:
        """A slice without steps, under the same pin."""
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise InvalidArgument(f"page: a slice in steps of {step}; a page is contiguous, take steps of 1")
        return self._part(start, max(0, stop - start), writable=self.is_writable)

    def unmarked(self) -> DevicePage:
        """The same page, marked as writable. If a kernel writes to a read-only page through it,
        nothing changes, but this process loses its GPU."""
        return self._part(0, self.nbytes, writable=True)

    def seal(self) -> None:
        """Makes the page read-only for the caller; arrays already made from it do not notice."""
        self.is_writable = False

    def copy_to(self, out: Any) -> None:
        """Copies into host memory of at least its length (buffer protocol, numpy, CPU tensor),
        and waits. Raises InvalidArgument, DeadlineExceeded."""
        target = self._host(out, writable=True)
        self.device.await_stream(0)
        with self.device.entered():
            self.device.ask("cuMemcpyDtoH", target.ctypes.data, self.address, self.nbytes)

    def copy_from(self, source: Any) -> None:
        """Fills the page from host memory, and waits. Raises InvalidArgument, DeadlineExceeded."""
        if not self.is_writable:
            raise InvalidArgument("page: it is read-only; write to reserved pages, before their commit")
        given = self._host(source, writable=False)
        self.device.await_stream(0)
        with self.device.entered():
            self.device.ask("cuMemcpyHtoD", self.address, given.ctypes.data, self.nbytes)
        self.device.await_stream(0)  # pageable memory may still be in transfer when the copy returns

    def _host(self, buffer: Any, *, writable: bool) -> buffers.Bytes:
        (found,) = buffers.pieces([buffer], [self.nbytes], writable=writable)
        return found

    def _part(self, start: int, nbytes: int, *, writable: bool) -> DevicePage:
        return DevicePage(self.memory, self.address + start, nbytes, pin=self._pin, writable=writable)


_gpus: dict[GpuPlace, Gpu] = {}
_turn = threading.Lock()


def gpu_at(place: GpuPlace) -> Gpu:
    """The daemon's GPU in this process. Raises Unsupported."""
    with _turn:
        if place not in _gpus:
            _gpus[place] = Gpu(place)
        return _gpus[place]


def map_segment(
    place: GpuPlace, segment: int, *, data: tuple[int, int], catalogue: tuple[int, int], is_writable: bool
) -> DeviceSegment:
    """Maps a segment. data, catalogue: (descriptor, bytes); the caller closes the descriptors.
    Raises Unsupported, TierFailed, Overloaded, VersionMismatch."""
    its = mapping.map_catalogue(segment, catalogue)
    memory = gpu_at(place).map(*data, is_writable=is_writable)
    return DeviceSegment(segment, memory, its.words, its.metas, is_writable)


def unmap_ended() -> None:
    """Ends queued memory on every GPU."""
    for gpu in list(_gpus.values()):
        gpu.unmap_ended()


def _forget() -> None:
    """In a forked child the parent's driver does not work."""
    global _turn  # noqa: PLW0603  # another thread of the parent may have held it
    _gpus.clear()
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget)
