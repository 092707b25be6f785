"""Chains for policies: which touches are uses, and which blocks must not be colder than later ones.

Papers know single objects. Here a request uses a chain of blocks, passed last block first, and the
core evicts no block before its children. A policy with another order would make the core wait for
children all the time. So it lifts a block above those that follow it.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.order import grown

Number = TypeVar("Number", np.uint8, np.int64, np.float64)
Levels = NDArray[np.uint8]


class Uses:
    """Which touches are uses by a request. The core also touches blocks that precede new ones, to
    keep the order. `Blocks.hits` counts only requests, and does so before policies are called."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._seen = np.zeros(0, dtype=np.uint8)

    def begin(self, ids: Ids) -> None:
        """The blocks have come."""
        self._seen = grown(self._seen, int(ids.max(initial=-1)) + 1)
        self._seen[ids] = self._blocks.hits[ids]

    def of(self, ids: Ids) -> Mask:
        """Which of the blocks were used since they came or since the last call."""
        hits = self._blocks.hits[ids].astype(np.uint8)
        used: Mask = hits != self._seen[ids]
        self._seen[ids] = hits
        return used


class Lift:
    """How far new blocks lift those that precede them, read once: a level above 0 by block id."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._levels = np.zeros(0, dtype=np.uint8)

    def begin(self, ids: Ids, levels: Levels | None = None) -> None:
        """The blocks have come, deepest first; those before are touched next. levels: default 1."""
        parents = self._blocks.parent[ids]
        levels = np.ones(len(ids), dtype=np.uint8) if levels is None else levels
        self._levels = grown(self._levels, 1 + max(int(ids.max(initial=-1)), int(parents.max(initial=-1))))
        known = parents >= 0
        np.maximum.at(self._levels, parents[known], levels[known])
        self._levels[ids] = 0

    def of(self, ids: Ids) -> Levels:
        """For each block, deepest first, the greatest level of new blocks after it, or 0."""
        levels = self._levels[ids]
        if not levels.any():
            return levels
        self._levels[ids] = 0
        return along(levels.astype(np.int64), ids, self._blocks).astype(np.uint8)


def along(values: NDArray[Number], ids: Ids, blocks: Blocks) -> NDArray[Number]:
    """For each block, deepest first, the greatest value of it and those after it in `ids`. Chains
    of several namespaces may alternate."""
    spaces = blocks.namespace[ids]
    if (spaces == spaces[:1]).all():
        return _along(values, ids, blocks)
    order = np.argsort(spaces, kind="stable")
    out = np.empty_like(values)
    out[order] = _along(values[order], ids[order], blocks)
    return out


def _along(values: NDArray[Number], ids: Ids, blocks: Blocks) -> NDArray[Number]:
    starts = np.flatnonzero(blocks.parent[ids[:-1]] != ids[1:]) + 1
    if not len(starts):
        return np.maximum.accumulate(values)
    # Each chain gets its own range of ranks, so one running maximum serves all.
    ranks = np.unique(values, return_inverse=True)[1].astype(np.int64)
    base = np.zeros(len(values), dtype=np.int64)
    base[starts] = len(values)
    base = np.cumsum(base)
    tops = np.maximum.accumulate(ranks + base) - base
    return np.unique(values)[tops]
