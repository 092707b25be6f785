"""Device memory that several processes map: one makes and exports it, as the device tier does.

Invariants: the maker of a slab sets the others' rights; an open descriptor keeps the memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.gpu.device import Gpu


@dataclass(frozen=True, slots=True)
class Slab:
    """address: in this process."""

    handle: Any
    address: int
    length_bytes: int


def rounded(gpu: Gpu, length_bytes: int) -> int:
    """To whole pieces of the GPU's memory."""
    flag = gpu.cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    piece = int(gpu.ask("cuMemGetAllocationGranularity", _kind_of_memory(gpu), flag))
    return -(-length_bytes // piece) * piece


def made(gpu: Gpu, length_bytes: int) -> Slab:
    """A new slab, writable in this process."""
    length = rounded(gpu, length_bytes)
    return _mapped(gpu, gpu.ask("cuMemCreate", length, _kind_of_memory(gpu), 0), length)


def exported(gpu: Gpu, slab: Slab) -> int:
    """A descriptor of the slab."""
    return int(gpu.ask("cuMemExportToShareableHandle", slab.handle, _handle_type(gpu), 0))


def imported(gpu: Gpu, descriptor: int, length_bytes: int, *, rights: str = "READWRITE") -> Slab:
    """A slab of another process. rights: READ or READWRITE."""
    handle = gpu.ask("cuMemImportFromShareableHandle", descriptor, _handle_type(gpu))
    return _mapped(gpu, handle, length_bytes, rights=rights)


def dropped(gpu: Gpu, slab: Slab) -> None:
    """Unmaps and releases it in this process."""
    gpu.finish()
    gpu.ask("cuMemUnmap", slab.address, slab.length_bytes)
    gpu.ask("cuMemAddressFree", slab.address, slab.length_bytes)
    gpu.ask("cuMemRelease", slab.handle)


def _mapped(gpu: Gpu, handle: Any, length_bytes: int, *, rights: str = "READWRITE") -> Slab:
    access = gpu.cuda.CUmemAccessDesc()
    access.location.type = gpu.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(gpu.ordinal)
    access.flags = getattr(gpu.cuda.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{rights}")
    address = int(gpu.ask("cuMemAddressReserve", length_bytes, 0, 0, 0))
    gpu.ask("cuMemMap", address, length_bytes, 0, handle, 0)
    gpu.ask("cuMemSetAccess", address, length_bytes, [access], 1)
    return Slab(handle, address, length_bytes)


def _handle_type(gpu: Gpu) -> Any:
    return gpu.cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _kind_of_memory(gpu: Gpu) -> Any:
    kind = gpu.cuda.CUmemAllocationProp()
    kind.type = gpu.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = gpu.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = int(gpu.ordinal)
    kind.requestedHandleTypes = _handle_type(gpu)
    return kind
