"""One GPU: its context, its facts, and lanes of work.

Work in a lane has ended when its turn has, even if part of it was refused. A lane waits for no
other work of this or any other process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from tierd.errors import TierdError, Unsupported
from tierd.gpu.kernels import Kernels
from tierd.gpu.protocol import GpuFacts
from tierd.kernels.driver import bindings, call

BATCH_VERSION = 12080
"""The first CUDA version with cuMemcpyBatchAsync."""


class Device:
    """cuda: NVIDIA's bindings; granularity: unit of slab lengths, in bytes; notices: shortcomings.
    is_lost: work may be in flight that cannot be awaited; kernels: tierd's, if there are any."""

    def __init__(self, ordinal: int) -> None:
        """Take the GPU. Raises Unsupported if a part of it is missing, Overloaded, TierFailed."""
        self.cuda = cuda = bindings()
        self.name, self.notices, self.is_lost = f"cuda:{ordinal}", list[str](), False
        self.ordinal, self._gpu = ordinal, call(cuda.cuDeviceGet, ordinal, what=f"cuda:{ordinal}")
        self._context = self.call(cuda.cuDevicePrimaryCtxRetain, self._gpu)
        self.enter()
        self._check_exports()
        self._is_reachable = bool(self.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self.call(cuda.cuMemGetAllocationGranularity, self.properties(), minimum))
        self.has_batches = self._has_batches()
        self.kernels = Kernels(ordinal)

    def call(self, function: Callable[..., tuple[Any, ...]], *given: Any) -> Any:
        """Call the driver. Raises errors of `tierd.kernels.driver.fault`, with the GPU's name."""
        return call(function, *given, what=self.name)

    def enter(self) -> None:
        """Set the context of this thread."""
        self.call(self.cuda.cuCtxSetCurrent, self._context)

    def attribute(self, name: str) -> int:
        """An attribute of the GPU, by its name without the prefix."""
        attribute = getattr(self.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.cuda.cuDeviceGetAttribute, attribute, self._gpu))

    def facts(self, *, hashes: str, gather_bytes: Mapping[bool, int]) -> GpuFacts:
        """Present facts. hashes, gather_bytes: from `sums` and `copies`."""
        name = self.call(self.cuda.cuDeviceGetName, 256, self._gpu).split(b"\0")[0].decode()
        free, total = self.call(self.cuda.cuMemGetInfo)
        uuid = bytes(self.call(self.cuda.cuDeviceGetUuid, self._gpu).bytes).hex()
        facts = GpuFacts(name, int(total), int(free), self.granularity, "vmm", hashes, tuple(self.notices), uuid)
        return replace(facts, gather_load_bytes=gather_bytes[True], gather_store_bytes=gather_bytes[False])

    def properties(self) -> Any:
        """Properties of memory that other processes may map, and disks write to if possible."""
        prop = self.cuda.CUmemAllocationProp()
        prop.type = self.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = self.location()
        prop.requestedHandleTypes = self.handle_type
        prop.allocFlags.gpuDirectRDMACapable = self._is_reachable
        return prop

    def location(self) -> Any:
        """This GPU, in the driver's form."""
        location = self.cuda.CUmemLocation()
        location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal
        return location

    @property
    def handle_type(self) -> Any:
        """Descriptors."""
        return self.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def close(self) -> None:
        """Release the kernels and the context. No call may follow."""
        self.kernels.close()
        self.call(self.cuda.cuDevicePrimaryCtxRelease, self._gpu)

    def _check_exports(self) -> None:
        for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            if not self.attribute(name):
                raise Unsupported(
                    f"{self.name}: the driver cannot share memory by descriptors here ({name} is 0), and tierd has no other way; "
                    'run without a container that hides it, or set kind = "cpu"'
                )

    def _has_batches(self) -> bool:
        # The bindings raise an error for a missing function only when it is called.
        result, *_ = self.cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_VERSION, 0)
        if result:
            self.notices.append(
                f"{self.name}: the driver has no cuMemcpyBatchAsync: pages are copied one by one, which is slower for small ones"
            )
        return not result


class Lane:
    """A stream. Threads may share it: one fills it while others wait for their work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream = device.call(device.cuda.cuStreamCreate, device.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """The stream, to be filled in the block; at its end all work is done. Raises its errors."""
        cuda, ask = self._device.cuda, self._device.call
        flags = cuda.CUevent_flags
        event = ask(cuda.cuEventCreate, flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING)
        with ExitStack() as ends:
            ends.callback(ask, cuda.cuEventDestroy, event)
            ends.callback(self._surely, cuda.cuEventSynchronize, event)
            with self._lock, ExitStack() as filled:
                filled.callback(self._surely, cuda.cuEventRecord, event, self._stream)
                yield self._stream

    def is_alive(self) -> bool:
        """Whether the context still works: the driver repeats an error of the GPU to each call."""
        (result,) = self._device.cuda.cuStreamQuery(self._stream)
        return result.name in ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY")

    def _surely(self, function: Callable[..., tuple[Any, ...]], *given: Any) -> None:
        """Call the driver about an event. If that fails, wait for the stream, or mark it all lost."""
        try:
            self._device.call(function, *given)
        except TierdError:
            (result,) = self._device.cuda.cuStreamSynchronize(self._stream)
            self._device.is_lost |= bool(result)
            raise

    def close(self) -> None:
        """No work may follow."""
        self._device.call(self._device.cuda.cuStreamDestroy, self._stream)
