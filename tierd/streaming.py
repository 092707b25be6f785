"""Long copies that are quicker than memcpy, where a library has them.

Purpose: `copy_bytes`, which goes past the processor's caches: streaming stores do not read the target first, and glibc (2.36 on EPYC, say) begins them at 240 MiB. With AVX-512
StringZilla streams, which takes two thirds of the time of memcpy. With AVX2 alone libpmem does, where somebody has installed it: 0.66 to 0.74 of the time (64 KiB to 2 MiB, EPYC of the third generation);
without it StringZilla goes from both ends at once, in 0.85 to 0.95 of the time. Non-purpose: looking after addresses and lengths, which is the caller's. Invariant: what it has written is
visible to others before whatever the caller writes next: streaming stores are not ordered by themselves, and StringZilla, from 5.0 on, and libpmem end them with a fence.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CopyBytes = Callable[[int, int, int], object]
"""Target, source, length: addresses of memory that does not overlap. Without the interpreter's lock."""

PMEM_LIBRARY = "libpmem.so.1"
PMEM_F_MEM_NONTEMPORAL = 1 << 1
"""Of libpmem's flags: streaming stores whatever the length."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How long copies are made. name: whose they are; from_bytes: a shorter one is as fast by memcpy."""

    name: str
    copy_bytes: CopyBytes
    from_bytes: int = 1 << 20


PLAIN = Streaming("libc", ctypes.memmove)


def find_streaming() -> Streaming:
    """The quickest on this processor of those that are here."""
    instructions = _instructions()
    streamed = _stringzilla() if "skylake" in instructions else None
    if (found := streamed or _libpmem()) is None and "haswell" in instructions:
        found = _stringzilla()
    return found or PLAIN


def _instructions() -> frozenset[str]:
    """What StringZilla calls the instructions that this processor has; nothing where it is not installed."""
    try:
        import stringzilla  # noqa: PLC0415 - not on every platform

        return frozenset(stringzilla.__capabilities__)
    except (ImportError, AttributeError):
        return frozenset()


def _stringzilla() -> Streaming | None:
    import stringzilla  # noqa: PLC0415

    with suppress(OSError, AttributeError):
        copy = ctypes.CDLL(stringzilla.__file__).sz_copy
        copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
        return Streaming("StringZilla", copy)
    return None


def _libpmem() -> Streaming | None:
    """On other processors its stores do not stream."""
    if platform.machine() != "x86_64":
        return None
    with suppress(OSError, AttributeError):
        copy = ctypes.CDLL(PMEM_LIBRARY).pmem_memcpy
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        copy.restype = None
        return Streaming("libpmem", lambda to, at, length: copy(to, at, length, PMEM_F_MEM_NONTEMPORAL), 64 << 10)
    return None


STREAMING = find_streaming()
