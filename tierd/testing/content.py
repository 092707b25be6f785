"""Blocks whose bytes follow from their hash, so any wrong byte is found without a copy.

Content is a Philox stream (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Its key is the first 16 bytes of the hash. 4 KiB of it make a row. Each further row is the first one
xor a word of its own, which is quicker than the stream. Every byte is compared. A piece of another
block, or of another place in this one, differs.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.random import Philox  # here, and not when it is first used: threads that load it at one time find no end
from numpy.typing import NDArray

from tierd.core.formats.model import HASH_BYTES

ROW_WORDS = 512


def content_of(block_hash: bytes | NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """The bytes of a block: uint8 [length]."""
    count = -(-length // 8)
    stream = Philox(key=np.frombuffer(bytes(block_hash)[:16], dtype="<u8"))
    words = stream.random_raw(min(count, ROW_WORDS)).astype("<u8", copy=False)
    if count > ROW_WORDS:
        changes = stream.random_raw(-(-count // ROW_WORDS))
        changes[0] = 0  # so a short block is the beginning of a long one
        words = np.bitwise_xor.outer(changes, words).reshape(-1)
    return words.view(np.uint8)[:length]


def is_content(view: NDArray[np.uint8] | memoryview, block_hash: bytes | NDArray[np.uint8]) -> bool:
    """Whether every byte is as `content_of` gives it."""
    found = np.frombuffer(view, dtype=np.uint8)
    return bool(np.array_equal(found, content_of(block_hash, len(found))))


def chain(seed: int, count: int) -> NDArray[np.uint8]:
    """Hashes of an invented sequence: uint8 [count, 32]. Different seeds share no hash."""
    hashes = b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count))
    return np.frombuffer(hashes, dtype=np.uint8).reshape(count, HASH_BYTES)
