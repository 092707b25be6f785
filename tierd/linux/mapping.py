"""Mapped files whose mapping lives exactly as long as the objects made from it.

A mapping keeps no descriptor and is left out of core dumps. Closing cannot fail because a view is
alive: collecting the last memoryview or array unmaps. (`mmap.mmap` keeps a descriptor for each
mapping and raises BufferError.) If the kernel has huge pages, a disk reads into contiguous memory
at twice the rate, and new memory costs a tenth. The caller has allocated the file's blocks
(`allocate`, posix_fallocate), so touching the mapping cannot raise SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from tierd.linux.huge_pages import HUGE_BYTES, map_shared

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the module mmap
_MADV_COLLAPSE = 25  # Linux 6.1; nor this


def map_file(fd: int, length: int) -> memoryview:
    """The first length bytes of the file, shared and writable, left out of core dumps. The caller
    may close fd at once. Raises OSError (ENOMEM: too many mappings, no huge pages left)."""
    array = map_shared(fd, length, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memoryview(array), dtype=np.uint8).data


def allocate(fd: int, memory: memoryview, start: int, *, huge: bool = True) -> bool:
    """Allocates up to HUGE_BYTES of a mapped file at `start`, a multiple of them. Raises OSError.

    huge: whether to try one huge page, on any tmpfs, despite `shmem_enabled`. Returns the success.
    """
    step = memory[start : start + HUGE_BYTES]
    huge = huge and len(step) == HUGE_BYTES
    if huge:
        os.posix_fallocate(fd, start, mmap.PAGESIZE)  # to collapse, something must be there
        huge = _libc.madvise(address_of(step), HUGE_BYTES, _MADV_COLLAPSE) == 0
    os.posix_fallocate(fd, start, len(step))
    return huge


def populate(view: memoryview) -> bool:
    """Touches every page for writing without changing it; releases the interpreter lock. False if
    the kernel cannot (before Linux 5.14) or has no memory; only speed is lost."""
    address = address_of(view)
    return bool(_libc.madvise(address, view.nbytes, _MADV_POPULATE_WRITE) == 0)


def address_of(view: memoryview) -> int:
    """The view's address in this process."""
    if view.readonly or not view.nbytes:
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))  # a quarter of the time: called for every block
