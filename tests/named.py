"""Named blocks, for policies that use names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import StructArray
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids

TOKENS = 64
"""Of a full block."""

Path = tuple[int, ...]
"""A block's name: one number for it and each ancestor. The parent's name lacks the last number."""


def hashed(path: Path) -> np.ndarray:
    """A hash for a path, uint8 [32]; zeros for the empty one."""
    digest = hashlib.sha256(repr(path).encode()).digest() if path else bytes(32)
    return np.frombuffer(digest, np.uint8)


def add(blocks: Blocks, paths: Sequence[Path], *, tokens: int = TOKENS, now: float = 0.0) -> Ids:
    """Adds blocks, linked to their parents, as after a commit. Returns their ids; a known name
    keeps its id."""
    metas = described(tuple(paths), tokens)
    ids = blocks.add(metas, now)
    blocks.link(ids, metas["parent"], now)
    return ids


@cache
def described(paths: tuple[Path, ...], tokens: int) -> StructArray:
    """META [n]."""
    metas = new_meta(len(paths))
    for row, path in enumerate(paths):
        metas["hash"][row], metas["parent"][row] = hashed(path), hashed(path[:-1])
        metas["position"][row] = len(path) - 1
    metas["namespace"], metas["tokens"] = 1, tokens
    return metas


def numbered(count: int) -> Blocks:
    """Blocks 0 to count - 1, each of a separate sequence."""
    blocks = Blocks()
    ids = add(blocks, [(number,) for number in range(count)])
    assert ids.tolist() == list(range(count))
    return blocks
