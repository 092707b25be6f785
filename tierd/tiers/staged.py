"""Staging pages, by way of their file.

Purpose: the bytes of memory that a writer who is not to be trusted has mapped too. Non-purpose: memory of everybody else (`MappedTier.view`). Invariant: the daemon never
touches its own mapping of such a page, since who can write to a file can also cut it short, and touching what is no longer there would end the daemon.
"""

from __future__ import annotations

import os

import numpy as np

from tierd.errors import TierFailed
from tierd.tiers.tier import MappedTier


def read(tier: MappedTier, extent: np.void, target: memoryview, *, at: int) -> None:
    """Fills the target with what is in the page from `at` on. May block; releases the interpreter lock. Raises TierFailed where the file has no so many bytes."""
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
    """Puts bytes into the page from `at` on. Raises TierFailed."""
    fd = tier.descriptor(int(extent["segment"]), writable=True).fd
    try:
        done, start = 0, int(extent["offset"]) + at
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], start + done)
    except OSError as error:  # a file that was cut short grows again, if there is memory
        raise TierFailed(f"{tier.spec.name}: segment {int(extent['segment'])} cannot be written: {error}") from error
    finally:
        os.close(fd)
