"""Whether a read from a disk comes to a slab without a detour over host memory (GPUDirect Storage): one read, and what cuFile counted of it.

Nobody else can be asked. kvikio's mode says whether it calls cuFile, not whether cuFile then reads through host memory; what cuFile says of its driver is of nvidia-fs and not of
this file, disk and memory, and its flag for PCI P2PDMA is not to be used any more. So cuFile is told not to fall back, and its counts say by
which way the read came: some options make it fall back even so.

TIERD_DIRECT_FOLDER: where the file is made, for a disk that is not this checkout's.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tierd.errors import TierFailed
from tools.gpu import slabs
from tools.gpu.bench import ROOT, Bench
from tools.gpu.device import Gpu
from tools.gpu.results import Fact, Result

LENGTH = 1 << 20
ALL_COUNTS = 3
"""The level of counts that tells ways apart."""
WAYS = {"n_posix_reads": "a detour: cuFile read it through host memory", "n_nvfs_reads": "direct, by nvidia-fs", "n_p2p_reads": "direct, by PCI P2PDMA"}  # fmt: skip
"""What a count of cuFile's says, the worst first."""


def results(bench: Bench) -> Iterator[Result]:
    """One fact."""
    folder = Path(os.environ.get("TIERD_DIRECT_FOLDER", ROOT / "build"))
    yield Fact("direct_read", f"{_way(bench.gpu(with_kernels=False), folder)}; a file in {folder.name}")


def _way(gpu: Gpu, folder: Path) -> str:
    """By which the read came. Raises TierFailed if it brought other bytes."""
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        return f"a detour: {error}"
    try:
        return _read(cufile, gpu, folder)
    except (cufile.cuFileError, RuntimeError, OSError) as error:  # RuntimeError: there is no libcufile
        return f"a detour: {error}"


def _read(cufile: Any, gpu: Gpu, folder: Path) -> str:
    """Raises what cuFile and the file system do, TierFailed."""
    cufile.set_parameter_bool(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE, False)
    slab = slabs.made(gpu, LENGTH)
    with ExitStack() as ends:
        ends.callback(slabs.dropped, gpu, slab)
        descriptor = ends.enter_context(_file(folder))
        cufile.driver_open()
        ends.callback(cufile.driver_close)
        cufile.set_stats_level(ALL_COUNTS)
        cufile.stats_start()
        told = cufile.Descr()
        told.type, told.handle.fd = cufile.FileHandleType.OPAQUE_FD, descriptor
        handle = cufile.handle_register(told.ptr)
        ends.callback(cufile.handle_deregister, handle)
        cufile.buf_register(slab.address, slab.length_bytes, 0)
        ends.callback(cufile.buf_deregister, slab.address)
        count = cufile.read(handle, slab.address, LENGTH, 0, 0)
        _check(gpu, slab, count)
        return _counted(cufile)


def _counted(cufile: Any) -> str:
    counts = cufile.StatsLevel3()
    cufile.get_stats_l3(counts.ptr)
    for name, way in WAYS.items():
        if any(getattr(counts.per_gpu_stats[gpu], name) for gpu in range(counts.num_gpus)):
            return way
    return "not told: cuFile counted no read"


def _check(gpu: Gpu, slab: slabs.Slab, count: int) -> None:
    came = np.zeros(LENGTH, np.uint8)
    gpu.ask("cuMemcpyDtoH", came.ctypes.data, slab.address, LENGTH)
    if count != LENGTH or not np.array_equal(came, _content()):
        raise TierFailed(f"cuFile: a read of {LENGTH} bytes gave {count}, and other bytes than the file has")


def _content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, LENGTH, np.uint8)


@contextmanager
def _file(folder: Path) -> Iterator[int]:
    """A descriptor of a file without a name, for reads past the page cache. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, LENGTH) as aligned:
            aligned[:] = _content().tobytes()
            os.pwrite(descriptor, aligned, 0)
        os.fsync(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)
