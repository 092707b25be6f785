"""Test of GPUDirect Storage: one read from a file system into a slab, and cuFile's counts of it.

A path counts as direct only if cuFile itself counted it so, and every byte was right.

There is no other source. The mode of kvikio says whether it calls cuFile, not whether cuFile reads
through host memory. The status of cuFile's driver is about nvidia-fs, not this file, disk and
memory. Its flag for PCI P2PDMA is deprecated. So cuFile is told not to fall back, and its counts
show the path. Some options force a fallback even so.
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
"""The paths behind cuFile's counts."""


def direct_by(cufile: CuFile, device: Device, slabs: Slabs, descriptor: int) -> str:
    """The path of a read of a `probe_file`. Raises Unsupported if it was indirect or failed;
    TierFailed if it brought other bytes; Overloaded."""
    before = cufile.counts()
    region = slabs.scratch(LENGTH)
    with region.ending, ExitStack() as ends:
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
