"""Mapped files whose mapping lives exactly as long as something made from it.

Purpose: map a file without keeping a descriptor, without core dumps, and without a moment at which closing fails because a
view is alive: the last memoryview or array that is collected unmaps. (`mmap.mmap` keeps a descriptor for each mapping and
raises BufferError.) Huge pages where the kernel has them: a disk reads into memory that lies together at twice the pace, and new memory costs a
tenth. Non-purpose: what the bytes mean. Invariant: the caller has allocated the file's blocks (`allocate`, posix_fallocate), so
touching the mapping cannot raise SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from tierd.linux.huge_pages import HUGE_BYTES, map_shared

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the module mmap does not name it
_MADV_COLLAPSE = 25  # Linux 6.1; nor this


def map_file(fd: int, length: int) -> memoryview:
    """The first length bytes of the file, shared and writable, left out of core dumps. The caller may close fd at once.

    Raises OSError (ENOMEM: too many mappings or no huge pages left).
    """
    array = map_shared(fd, length, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memoryview(array), dtype=np.uint8).data


def allocate(fd: int, memory: memoryview, start: int, *, huge: bool = True) -> bool:
    """Sets up to HUGE_BYTES of a mapped file aside, from start on, a multiple of them: in one huge page where the kernel makes one. Raises OSError.

    It does on any tmpfs, whatever `shmem_enabled` says. huge: whether to try. False: it did not, and the bytes lie in small pages.
    """
    step = memory[start : start + HUGE_BYTES]
    huge = huge and len(step) == HUGE_BYTES
    if huge:
        os.posix_fallocate(fd, start, mmap.PAGESIZE)  # of what it collapses something must be there
        huge = _libc.madvise(address_of(step), HUGE_BYTES, _MADV_COLLAPSE) == 0
    os.posix_fallocate(fd, start, len(step))
    return huge


def populate(view: memoryview) -> bool:
    """Touch every page for writing without changing it, so that later writers need not; releases the interpreter lock.

    False if the kernel cannot (before Linux 5.14) or has no memory; nothing is lost but speed.
    """
    address = address_of(view)
    return bool(_libc.madvise(address, view.nbytes, _MADV_POPULATE_WRITE) == 0)


def address_of(view: memoryview) -> int:
    """Where the view begins in this process."""
    if view.readonly or not view.nbytes:
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))  # a quarter of the time: it is asked for every block
