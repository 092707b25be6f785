"""Staging pages of sealed puts, read and written through their file.

An untrusted writer maps such a page too, and can cut its file short. The daemon would then die if
it touched its own mapping, so it never does. All other memory uses `MappedTier.view`.
"""

from __future__ import annotations

import os

import numpy as np

from tierd.errors import TierFailed
from tierd.tiers.tier import MappedTier


def read(tier: MappedTier, extent: np.void, target: memoryview, *, at: int) -> None:
    """Fill the target from the page, starting at `at`. May block; releases the interpreter lock.
    Raises TierFailed if the file is too short."""
    fd, start = tier.descriptor(int(extent["segment"]), writable=False).fd, int(extent["offset"]) + at
    try:
        done = 0
        while done < len(target):
            count = os.preadv(fd, [target[done:]], start + done)
            if not count:
                raise TierFailed(
                    f"{tier.spec.name}: segment {int(extent['segment'])} ends at {start + done}, within a page; its writer has cut the file short"
                )
            done += count
    finally:
        os.close(fd)


def write(tier: MappedTier, extent: np.void, data: bytes | memoryview, *, at: int) -> None:
    """Write bytes into the page from `at` on. Raises TierFailed."""
    fd = tier.descriptor(int(extent["segment"]), writable=True).fd
    try:
        done, start = 0, int(extent["offset"]) + at
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], start + done)
    except OSError as error:  # a file that was cut short grows again, if there is memory
        raise TierFailed(f"{tier.spec.name}: segment {int(extent['segment'])} cannot be written: {error}") from error
    finally:
        os.close(fd)
