"""Host memory for copies: the daemon's files, mapped whole and registered with the driver for DMA.

A shorter file is refused, since touching its missing part would raise SIGBUS. If the driver refuses
to register memory, a notice says so. Copies then go through the driver's own buffers.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from tierd.errors import InvalidArgument, Overloaded, TierdError
from tierd.gpu.device import Device
from tierd.gpu.regions import Region, Regions
from tierd.linux.mapping import address_of, map_file

REGISTERED_BYTES = 64 << 30
"""Per call. Drivers refuse half a tebibyte, and repeat the refusal to the next caller."""


class Hosts:
    """Host memory for one GPU. regions: its mappings, by number."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.regions = Regions("host")

    def attach(self, host: int, descriptor: int, length_bytes: int) -> list[str]:
        """Map the caller's fd, read-write; returns notices. Raises InvalidArgument, Overloaded."""
        with ExitStack() as failed:
            view = self._mapped(host, descriptor, length_bytes)
            failed.callback(view.release)
            region = Region(address_of(view), length_bytes)
            refusal = self._register(region, failed)
            region.is_direct = not refusal
            self.regions.add(host, region)
            region.ending = failed.pop_all()
        return [refusal] if refusal else []

    def detach(self, host: int) -> None:
        """Unmap after the copies that use it have ended. Raises InvalidArgument."""
        self.regions.end(host)

    def _mapped(self, host: int, descriptor: int, length_bytes: int) -> memoryview:
        size = os.fstat(descriptor).st_size
        if not 0 < length_bytes <= size:
            raise InvalidArgument(f"host {host}: {length_bytes} bytes of a file that has {size}; allocate it first")
        try:
            return map_file(descriptor, length_bytes)
        except OSError as error:
            raise Overloaded(f"host {host}: {error}; raise vm.max_map_count or free memory") from error

    def _register(self, region: Region, failed: ExitStack) -> str:
        """Register a region; returns the fault, or ""."""
        cuda, ask = self._device.cuda, self._device.call
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            if region.length_bytes > REGISTERED_BYTES:
                raise InvalidArgument(f"more than {REGISTERED_BYTES} bytes in one piece; make segments smaller")
            ask(cuda.cuMemHostRegister, region.address, region.length_bytes, flags)
        except TierdError as error:
            return f"{self._device.name}: host memory is not registered for DMA, copies of it are staged and slow ({error}; LimitMEMLOCK=infinity lets the driver pin it)"
        failed.callback(ask, cuda.cuMemHostUnregister, region.address)
        return ""
