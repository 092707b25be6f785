"""Lookup: which blocks of a question can be read, and the nearest tier of each.

It changes and pins nothing (gets.py, pins.py). Blocks of another domain than the caller's miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import among, in_order, some
from tierd.core.index.blocks import Names, words
from tierd.core.index.index import Index
from tierd.core.plan import Bools, GroupQuery, Ids
from tierd.core.requests.groups import Span, check_groups, ends, needed, tier_tokens
from tierd.core.space.planner import Where


@dataclass(slots=True)
class Sight:
    """A question and its blocks. tiers: their number. used: blocks whose use it counted.

    keys, ids, tier: uint64, int64 and int8 [ranks, n] per group; -1 if no tier can read it.
    near: pages of the blocks wanted last, if nothing has changed since.
    """

    groups: Sequence[GroupQuery]
    tiers: int
    keys: list[NDArray[np.uint64]]
    ids: list[Ids]
    tier: list[NDArray[np.int8]]
    used: tuple[Ids, ...] = ()
    near: Where | None = None

    def there(self, but: Ids | None = None) -> list[Bools]:
        """Per group, which blocks every rank can read; not those in `but`."""
        out = []
        for ids in self.ids:
            have = ids >= 0
            if but is not None and len(but):
                have &= ~among(ids, but)
            out.append(have[0] if len(have) == 1 else np.asarray(have.all(axis=0), bool))
        return out

    def spans(self, tokens: int) -> list[Span]:
        """The blocks that each group needs for so many tokens."""
        return [needed(group, tokens) for group in self.groups]

    def wanted(self, tokens: int) -> Ids:
        """Ids of their needed blocks, distinct, by their end in the sequence."""
        spans = self.spans(tokens)
        if len(self.ids) == 1 and len(self.ids[0]) == 1:
            return in_order(self.ids[0][0, slice(*spans[0])])
        parts, keys = [], []
        for group, ids, (first, stop) in zip(self.groups, self.ids, spans, strict=True):
            part = ids[:, first:stop]
            parts.append(part.ravel())
            keys.append(np.broadcast_to(ends(group)[first:stop], part.shape).ravel())
        order = np.argsort(np.concatenate(keys), kind="stable")
        return in_order(np.concatenate(parts)[order])

    def tier_tokens(self, tokens: int) -> list[int]:
        """Per tier, tokens of the first group's needed blocks (its first rank) that it is nearest for."""
        return tier_tokens(self.groups[0], self.tier[0][0], tokens, tiers=self.tiers)


def look(index: Index, groups: Sequence[GroupQuery], domain: int | None) -> Sight:
    """Finds every block. domain: the caller's; blocks of another miss."""
    check_groups(groups)
    serving = index.serving()
    sight = Sight(groups, len(index.tiers), [], [], [])
    for group in groups:
        shape = (len(group.namespaces), len(group.hashes))
        namespaces = np.array(group.namespaces, np.uint32).repeat(shape[1])
        hashes = words(group.hashes)
        names = index.blocks.keyed(Names(namespaces, hashes if shape[0] == 1 else np.tile(hashes, (shape[0], 1))))
        ids = index.blocks.find(names)
        if domain is not None and some(strange := index.blocks.domain.take(ids) != domain):
            ids[strange] = -1
        tier = index.nearest(ids, serving, error_limit=group.error_limit)
        if some(nowhere := tier < 0):
            ids[nowhere] = -1
        sight.keys.append(index.blocks.keys_of(names).reshape(shape))
        sight.ids.append(ids.reshape(shape))
        sight.tier.append(tier.reshape(shape))
    return sight
