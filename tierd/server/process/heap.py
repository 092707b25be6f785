"""The daemon keeps a little of the memory that it has freed.

Chunks of Put and Get are a MiB each, in buffers that live for less than a millisecond. If they went back to the kernel,
each of their pages would be cleared and faulted in anew, which takes as long as carrying its bytes. Large tables go
back whole. What is kept has a bound: KEPT_BYTES of each of ARENAS. Without glibc nothing changes.
"""

from __future__ import annotations

import ctypes

ARENAS = 4
KEPT_BYTES = 16 << 20
"""Free memory at an arena's end."""
WHOLE_BYTES = 4 << 20
"""From this size on an allocation is a mapping of its own."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed() -> bool:
    """For this process, from now on. Whether it could be said to the library: best before threads begin, which each take an arena."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_ARENA_MAX: ARENAS, _TRIM_THRESHOLD: KEPT_BYTES, _MMAP_THRESHOLD: WHOLE_BYTES}
    taken = [mallopt(name, value) for name, value in wanted.items()]
    return all(taken)
