"""Makes the daemon keep some of the memory that it frees.

Put and Get use buffers of one MiB, which live for less than a millisecond. If they went back to the
kernel, it would clear and fault in each page again. That takes as long as copying the bytes. Large
tables go back whole. The daemon keeps at most KEPT_BYTES in each of ARENAS. Without glibc nothing
changes.
"""

from __future__ import annotations

import ctypes

ARENAS = 4
KEPT_BYTES = 16 << 20
"""Free memory at an arena's end."""
WHOLE_BYTES = 4 << 20
"""From this size on, an allocation is a mapping of its own."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed() -> bool:
    """Sets this for the process. True on success. Call it early, since each thread takes an arena."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_ARENA_MAX: ARENAS, _TRIM_THRESHOLD: KEPT_BYTES, _MMAP_THRESHOLD: WHOLE_BYTES}
    taken = [mallopt(name, value) for name, value in wanted.items()]
    return all(taken)
