"""Aligned 8-byte words of shared memory: all communication of processes through a mapping.

A word is aligned, little-endian, and stored and loaded by one instruction. So a reader sees the old
or the new value, never a mixture. `barrier()` orders words against other bytes. A process that sees
a store after the barrier sees all stores before it. Loads on its two sides do not change places.
"""

from __future__ import annotations

import sys
import threading
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.layout import WORD_BYTES

_fence = threading.Lock()

Words = NDArray[np.uint64]
"""Words over a buffer. Plain indexing loads and stores whole words, one or many at once."""


def words_of(buffer: memoryview | mmap | NDArray[np.uint8], *, offset: int = 0, count: int) -> Words:
    """The words at [offset, offset + 8 * count) of a buffer, in place; writable if the buffer is."""
    assert sys.byteorder == "little", "words are little-endian and read in place"
    words = np.frombuffer(buffer, dtype="<u8", count=count, offset=offset)
    assert words.ctypes.data % WORD_BYTES == 0, "a word must be aligned to be stored at once"
    return words


def barrier() -> None:
    """Orders memory accesses before it against those after it. Python has no fence. Releasing a
    lock (a store-release) and then taking it (a load-acquire) is one on x86-64 and aarch64. There
    the two do not pass each other."""
    with _fence:
        pass
    with _fence:
        pass
