"""Slabs: device memory that outlives this process, by CUDA's virtual memory management.

A slab is zero when its descriptor leaves. A failure leaves no trace of it here. The memory lives as
long as a descriptor or a mapping of it in any process. A known slab is mapped here whole, for
copies. The handle is released at once, since the mapping holds the memory.

If a driver has no such management, the tier does not start. Legacy CUDA IPC is no replacement: its
memory belongs to the process that made it. After that process ends, the bytes in remaining mappings
are undefined (NVIDIA's reference of cuIpcOpenMemHandle). No mapping of it is read-only. A GPU
process may be killed at any moment while readers keep their views, so they could see bytes that are
not the block's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tierd.errors import InvalidArgument, TierFailed
from tierd.gpu.device import Device, Lane
from tierd.gpu.regions import Region, Regions


class Slabs:
    """Slabs of one GPU. regions: their mappings, by number; lane: zeroes them."""

    def __init__(self, device: Device, lane: Lane) -> None:
        self._device, self._lane = device, lane
        self.regions = Regions("slab")

    def make(self, slab: int, length_bytes: int) -> int:
        """Make a slab; returns its descriptor, close-on-exec. Raises Overloaded, InvalidArgument."""
        cuda, ask = self._device.cuda, self._device.call
        self._check(slab, length_bytes)
        handle = ask(cuda.cuMemCreate, length_bytes, self._device.properties(), 0)
        with self._mapped(handle, length_bytes) as region, ExitStack() as failed:
            with self._lane.turn() as stream:
                ask(cuda.cuMemsetD8Async, region.address, 0, length_bytes, stream)
            descriptor = int(ask(cuda.cuMemExportToShareableHandle, handle, self._device.handle_type, 0))
            failed.callback(os.close, descriptor)
            os.set_inheritable(descriptor, False)
            self.regions.add(slab, region)
            failed.pop_all()
        return descriptor

    def adopt(self, slab: int, descriptor: int, length_bytes: int) -> None:
        """Map another process's slab; fd stays the caller's. Raises InvalidArgument, TierFailed."""
        self._check(slab, length_bytes)
        try:
            handle = self._device.call(
                self._device.cuda.cuMemImportFromShareableHandle, descriptor, self._device.handle_type
            )
        except InvalidArgument as error:
            raise TierFailed(f"slab {slab}: cannot be taken over ({error}); drop it") from error
        with self._mapped(handle, length_bytes) as region:
            self.regions.add(slab, region)

    def scratch(self, length_bytes: int) -> Region:
        """Memory like that of slabs, of at least this length, until its `ending`. Raises Overloaded."""
        granularity = self._device.granularity
        rounded = -(-length_bytes // granularity) * granularity
        with self._mapped(
            self._device.call(self._device.cuda.cuMemCreate, rounded, self._device.properties(), 0), rounded
        ) as region:
            pass
        return region

    def drop(self, slab: int) -> None:
        """Unmap after the copies that use it have ended. Raises InvalidArgument."""
        self.regions.end(slab)

    def _check(self, slab: int, length_bytes: int) -> None:
        granularity = self._device.granularity
        if length_bytes <= 0 or length_bytes % granularity:
            raise InvalidArgument(
                f"slab {slab}: {length_bytes} bytes; give a multiple of the GPU's granularity, {granularity}"
            )

    @contextmanager
    def _mapped(self, handle: Any, length_bytes: int) -> Iterator[Region]:
        """A mapping that stays unless the block raises. The handle is always released."""
        cuda, ask = self._device.cuda, self._device.call
        with ExitStack() as always, ExitStack() as failed:
            always.callback(ask, cuda.cuMemRelease, handle)
            address = int(ask(cuda.cuMemAddressReserve, length_bytes, 0, 0, 0))
            failed.callback(ask, cuda.cuMemAddressFree, address, length_bytes)
            ask(cuda.cuMemMap, address, length_bytes, 0, handle, 0)
            failed.callback(ask, cuda.cuMemUnmap, address, length_bytes)
            ask(cuda.cuMemSetAccess, address, length_bytes, [self._access()], 1)
            region = Region(address, length_bytes)
            yield region
            region.ending = failed.pop_all()

    def _access(self) -> Any:
        access = self._device.cuda.CUmemAccessDesc()
        access.location = self._device.location()
        access.flags = self._device.cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access
