"""Late: blocks that enter an order of uses after others that were used later.

`Queues` cannot take them, because a queue only grows at its newest end. Blocks are sorted by their
last use. Removed ones stay as dead entries. Those at the front are dropped, and all of them when
they are the majority. A block that enters has no entry, not even a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.policies.eviction.order import grown

_STEP_BLOCKS = 64


class Late:
    """See the module."""

    def __init__(self) -> None:
        self._is_in = np.zeros(0, np.bool_)
        self._blocks, self._uses = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._head = self._count = 0

    def __len__(self) -> int:
        """How many blocks are in it."""
        return self._count

    def has(self, blocks: Ids) -> Mask:
        """Which are in it."""
        out = np.zeros(len(blocks), bool)
        if self._count:
            known = blocks < len(self._is_in)
            out[known] = self._is_in[blocks[known]]
        return out

    def add(self, blocks: Ids, uses: Ids) -> None:
        """Distinct blocks that are not in it, with the numbers of their last uses."""
        if not len(blocks):
            return
        self._drop_dead()
        self._is_in = grown(self._is_in, int(blocks.max()) + 1)
        self._is_in[blocks] = True
        self._blocks, self._uses = np.concatenate((self._blocks, blocks)), np.concatenate((self._uses, uses))
        order = np.argsort(self._uses, kind="stable")
        self._blocks, self._uses, self._count = self._blocks[order], self._uses[order], len(order)

    def remove(self, blocks: Ids) -> None:
        """Blocks that are in it leave."""
        if not len(blocks):
            return
        self._is_in[blocks] = False
        self._count -= len(blocks)
        alive = np.flatnonzero(self._is_in[self._blocks[self._head : self._head + 2 * len(blocks)]])
        self._head += int(alive[0]) if len(alive) else 2 * len(blocks)
        if len(self._blocks) - self._head > 2 * self._count:
            self._drop_dead()

    def walk(self) -> Iterator[Ids]:
        """All its blocks, oldest first, in pieces. It must not change meanwhile."""
        at, step = self._head, _STEP_BLOCKS
        while at < len(self._blocks):
            blocks = self._blocks[at : at + step]
            yield blocks[self._is_in[blocks]]
            at, step = at + step, 2 * step

    def _drop_dead(self) -> None:
        rows = self._head + np.flatnonzero(self._is_in[self._blocks[self._head :]])
        self._blocks, self._uses, self._head = self._blocks[rows], self._uses[rows], 0


def merged(one: Iterator[Ids], other: Iterator[Ids], key: Callable[[Ids], Ids]) -> Iterator[Ids]:
    """Merges two orders that come in pieces and ascend by a key."""
    left, right = next(one, None), next(other, None)
    while left is not None and right is not None:
        keys, others = key(left), key(right)
        last = (
            min(keys[-1], others[-1]) if len(left) and len(right) else 0
        )  # nothing is sure before both sides have some
        mine, theirs = (int(np.searchsorted(k, last, side="right")) for k in (keys, others))
        ready = np.concatenate((left[:mine], right[:theirs]))
        yield ready[np.argsort(key(ready), kind="stable")]
        left, right = left[mine:], right[theirs:]
        left = next(one, None) if not len(left) else left
        right = next(other, None) if not len(right) else right
    for rest, pieces in ((left, one), (right, other)):
        if rest is not None:
            yield rest
            yield from pieces
