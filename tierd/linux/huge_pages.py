"""Chooses the start of a mapping so that huge pages are mapped as such.

The daemon, its hash process and clients share this hint; linux/mapping.py makes huge pages. It is
only a hint, since another thread may map there first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

HUGE_BYTES = 2 << 20
"""A huge page. If the kernel has another size, all mappings use small pages."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def free_boundary(length: int) -> int | None:
    """A free address on a huge page boundary; None if length is smaller or no address is free."""
    if length < HUGE_BYTES:
        return None
    room = _libc.mmap(None, length + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return None
    _libc.munmap(room, length + HUGE_BYTES)
    return int(-(-room // HUGE_BYTES) * HUGE_BYTES)


def map_shared(fd: int, length: int, protection: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Maps the first length bytes of the file, left out of core dumps; unmapped with the array. The
    caller may close fd at once. Raises OSError (ENOMEM: too many mappings, no huge pages left)."""
    address = _libc.mmap(free_boundary(length), length, protection, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
    array = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(array, _libc.munmap, address, length).atexit = False
    _libc.madvise(address, length, mmap.MADV_DONTDUMP)
    _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
    return array
