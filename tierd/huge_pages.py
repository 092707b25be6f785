"""Where a mapping must begin so that what lies in huge pages is mapped as such.

Purpose: one hint for daemon and clients. Non-purpose: making huge pages (tiers/mapping.py), mapping. Invariant: it is a mere hint, since another thread may map there first.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_BYTES = 2 << 20
"""A huge page. Where it is another size nothing collapses, and all goes on in small ones."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
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
