"""Finds short blocks: the last of a sequence, which the next turn fills up under another name.

No store should be worn with them. A block does not say how many tokens a full one of its namespace
has. So it is short if it has fewer than its parent, which is full because a block follows it. It is
also short if it has fewer than the most seen in its namespace. Only a lone short block, in a
namespace of which no other block was seen, counts as full.
"""

from __future__ import annotations

import numpy as np

from tierd.core.eviction import Mask
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids

NAMESPACE_LIMIT = 65536
"""Namespaces that are remembered: those of past epochs never come again."""


class Tails:
    """blocks: the core's."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._most_tokens: dict[int, int] = {}

    def are_short(self, ids: Ids) -> Mask:
        """Of blocks [n]: bool [n]."""
        blocks = self._blocks
        tokens, parents = blocks.tokens[ids].astype(np.int64), blocks.parent[ids].astype(np.int64)
        whole = np.where(parents >= 0, blocks.tokens[parents], 0).astype(np.int64)
        names, rows = np.unique(blocks.namespace[ids], return_inverse=True)
        most = np.zeros(len(names), np.int64)
        np.maximum.at(most, rows, np.maximum(tokens, whole))
        return np.asarray(tokens < self._learn(names, most)[rows], bool)

    def _learn(self, names: Ids, most: Ids) -> Ids:
        """The most tokens of each namespace, including the ones just seen."""
        known = self._most_tokens
        for name, tokens in zip(names.tolist(), most.tolist(), strict=True):
            known[name] = max(tokens, known.pop(name, 0))
        while len(known) > NAMESPACE_LIMIT:
            del known[next(iter(known))]
        return np.asarray([known[name] for name in names.tolist()], np.int64)
