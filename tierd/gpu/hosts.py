"""Host memory for copies: files of the daemon's, mapped whole and registered with the driver, so that the GPU's engines reach them.

Purpose: attach and detach. Non-purpose: what lies there. Invariants: what is mapped is there (a file that is shorter is refused: touching it would be SIGBUS); a refusal
to register is said, and copies then take the driver's detour by buffers of its own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from tierd.errors import InvalidArgument, Overloaded, TierdError
from tierd.gpu.device import Device
from tierd.gpu.regions import Region, Regions
from tierd.linux.mapping import address_of, map_file

REGISTERED_BYTES = 64 << 30
"""At most, in one call: drivers refuse half a tebibyte, and what they have refused they tell once more to the next caller."""


class Hosts:
    """For one GPU. regions: where they are mapped, by number."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.regions = Regions("host")

    def attach(self, host: int, descriptor: int, length_bytes: int) -> list[str]:
        """Maps a file, read-write; what is less than the best, as sentences. The descriptor stays the caller's. Raises InvalidArgument, Overloaded."""
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
        """Unmapped when the copies that use it have ended. Raises InvalidArgument."""
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
        """Why not, or nothing."""
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
