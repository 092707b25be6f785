"""The file that a probe reads: known bytes on the tested file system.

One process has the folder, another the GPU. The file is gone when its descriptor is closed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LENGTH = 1 << 20


def content() -> NDArray[np.uint8]:
    """Of every such file."""
    return np.random.default_rng(0).integers(0, 256, LENGTH, np.uint8)


@contextmanager
def probe_file(folder: Path) -> Iterator[int]:
    """A descriptor of a file without a name, for reads past the page cache. Raises OSError."""
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        with mmap.mmap(-1, LENGTH) as aligned:
            aligned[:] = content().tobytes()
            os.pwrite(descriptor, aligned, 0)
        os.fsync(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)
