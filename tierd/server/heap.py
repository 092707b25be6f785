"""The daemon's own memory: what it has freed, and how what it has is mapped.

Purpose: a little of what was freed is kept. Chunks of Put and Get are a MiB each, in buffers that live for less than a millisecond; given back to the kernel and asked
for again, each of their pages would be cleared and faulted in anew, which takes as long as carrying its bytes. Non-purpose: large tables, which go
back whole. And what a start has filled lies in huge pages from then on: a daemon that is called once in a while finds little of itself in the processor's caches, and less of its page
tables. Invariant: what is kept has a bound, KEPT_BYTES of each of ARENAS, and so has what is gathered. Where there is no glibc, or an older kernel, all is as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from tierd.huge_pages import HUGE_BYTES

ARENAS = 4
KEPT_BYTES = 16 << 20
"""Free memory at an arena's end."""
WHOLE_BYTES = 4 << 20
"""From this size on an allocation is a mapping of its own."""
GATHERED_BYTES = 256 << 20
"""Of the heap, at most."""
_MADV_COLLAPSE = 25  # Linux 6.1; the module mmap has no name for it
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed() -> bool:
    """For this process, from now on. Whether it could be said to the library: best before threads begin, which each take an arena."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_ARENA_MAX: ARENAS, _TRIM_THRESHOLD: KEPT_BYTES, _MMAP_THRESHOLD: WHOLE_BYTES}
    taken = [mallopt(name, value) for name, value in wanted.items()]
    return all(taken)


def gather(is_over: Callable[[], bool] = lambda: False) -> int:
    """Puts what the process has allocated by now into huge pages, as far as it fills any; how many bytes. It may take a while, until it is over for another reason."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    try:
        parts = _heap()
    except OSError:  # no descriptor is left: small pages do
        return 0
    gathered = 0
    for start, end in parts:
        for at in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            if gathered == GATHERED_BYTES or is_over():
                return gathered
            if madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE_BYTES), _MADV_COLLAPSE) == 0:
                gathered += HUGE_BYTES
    return gathered


def _heap() -> list[tuple[int, int]]:
    """From where to where this process has private memory of no file and no name but the heap's. Raises OSError."""
    found = []
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):  # paths are bytes, with whatever in them
        place, rights, _, _, inode, *name = line.split(None, 5) or [b""] * 5
        if rights == b"rw-p" and inode == b"0" and (not name or name == [b"[heap]"]):
            start, end = place.split(b"-")
            found.append((int(start, 16), int(end, 16)))
    return found
