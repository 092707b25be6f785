"""Blocks whose bytes are a function of their hash, so that any wrong byte shows without a stored copy.

Content is a Philox stream (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the first 16
bytes of the hash.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import HASH_BYTES


def content_of(block_hash: bytes | NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """The bytes of a block: uint8 [length]."""
    key = np.frombuffer(bytes(block_hash)[:16], dtype="<u8")
    words = np.random.Philox(key=key).random_raw(-(-length // 8))
    return words.astype("<u8").view(np.uint8)[:length]


def is_content(view: NDArray[np.uint8] | memoryview, block_hash: bytes | NDArray[np.uint8]) -> bool:
    """Whether every byte is what `content_of` gives."""
    found = np.frombuffer(view, dtype=np.uint8)
    return bool(np.array_equal(found, content_of(block_hash, len(found))))


def chain(seed: int, count: int) -> NDArray[np.uint8]:
    """Hashes of a made-up sequence: uint8 [count, 32]; equal seeds share nothing with others."""
    hashes = b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count))
    return np.frombuffer(hashes, dtype=np.uint8).reshape(count, HASH_BYTES)
