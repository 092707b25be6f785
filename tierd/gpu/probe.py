"""Whether a read from a file system comes to a slab without a detour over host memory (GPUDirect Storage): one read, and what cuFile counted of it.

Purpose: `direct_by`. Non-purpose: the file (`probe_file`), what follows from it. Invariants: it is direct only where cuFile itself counted it so, and every byte was right.

Nobody else can be asked. kvikio's mode says whether it calls cuFile, not whether cuFile then reads through host memory; what cuFile says of its driver is of nvidia-fs and not of
this file, disk and memory, and its flag for PCI P2PDMA is not to be used any more. So cuFile is told not to fall back, and its counts say by
which way the read came: some options make it fall back even so.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from tierd.errors import TierFailed, Unsupported
from tierd.gpu.cufile import CuFile
from tierd.gpu.device import Device
from tierd.gpu.probe_file import LENGTH, content
from tierd.gpu.slabs import Slabs

WAYS = {"n_nvfs_reads": "nvidia-fs", "n_p2p_reads": "PCI P2PDMA"}
"""What a count of cuFile's stands for."""


def direct_by(cufile: CuFile, device: Device, slabs: Slabs, descriptor: int) -> str:
    """By which way a read of a `probe_file` came. Raises Unsupported if it was a detour, or none; TierFailed if it brought other bytes; Overloaded."""
    before = cufile.counts()
    with slabs.scratch(LENGTH) as region, ExitStack() as ends:
        handle = cufile.register_file(descriptor)
        ends.callback(cufile.deregister_file, handle)
        cufile.register_memory(region.address, region.length_bytes)
        ends.callback(cufile.deregister_memory, region.address)
        if fault := cufile.read(handle, LENGTH, at=0, memory=region.address, offset=0):
            raise Unsupported(fault)
        came = np.zeros(LENGTH, np.uint8)
        device.call(device.cuda.cuMemcpyDtoH, came.ctypes.data, region.address, LENGTH)
    if not np.array_equal(came, content()):
        raise TierFailed(f"cuFile: a read of {LENGTH} bytes gave other bytes than the file has")
    return _way({name: count - before[name] for name, count in cufile.counts().items()})


def _way(counted: dict[str, int]) -> str:
    if counted["n_posix_reads"]:
        raise Unsupported("cuFile read it through host memory")
    for name, way in WAYS.items():
        if counted[name]:
            return way
    raise Unsupported("cuFile counted no read")
