"""Where a mapping must begin so that what lies in huge pages is mapped as such.

Purpose: one hint for daemon, its hash process and clients, and a mapping made at it. Non-purpose: making huge pages (linux/mapping.py). Invariant: it is a mere hint, since another thread
may map there first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

HUGE_BYTES = 2 << 20
"""A huge page. Where it is another size nothing collapses, and all goes on in small ones."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def free_boundary(length: int) -> int | None:
    """An address on a boundary of huge pages at which so much is free; None: it is less than one, or nothing is free."""
    if length < HUGE_BYTES:
        return None
    room = _libc.mmap(None, length + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return None
    _libc.munmap(room, length + HUGE_BYTES)
    return int(-(-room // HUGE_BYTES) * HUGE_BYTES)


def map_shared(fd: int, length: int, protection: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The first length bytes of the file, left out of core dumps; unmapped with the array. The caller may close fd at once.

    Raises OSError (ENOMEM: too many mappings or no huge pages left).
    """
    address = _libc.mmap(free_boundary(length), length, protection, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
    array = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(array, _libc.munmap, address, length).atexit = False
    _libc.madvise(address, length, mmap.MADV_DONTDUMP)
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
    return array
