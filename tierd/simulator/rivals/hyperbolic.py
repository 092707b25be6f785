"""Hyperbolic caching: evicts the block with the fewest uses for its time in the cache.

A. Blankstein, S. Sen, M. Freedman, "Hyperbolic Caching: Flexible Caching for Web Applications",
USENIX ATC 2017, section 3.1:

    priority of i:    p_i = n_i / t_i     (n_i uses since i came, in the time t_i since then)
    to make room:     of 64 sampled blocks the one of least priority is evicted

Here levels replace the sample. A level has the blocks of one rounded n and one epoch of arrival,
and its priority changes as a whole. An epoch is 1/32 of c arrivals, so some hundred levels are
compared.

Differences:
- The rounding, instead of the sample. c is the most blocks tracked so far.
- A block is on the level of its follower in a request if that has the greater priority then; no use
  lowers it. Levels change places with time; the core keeps blocks that others need.
- `victims` has no time: that of the last call holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Lift, Uses, along
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free
from tierd.simulator.rivals.rounding import ROUNDED, level

EPOCHS = 32
"""Epochs in which as many blocks come as are tracked at most."""
EPOCHS_KNOWN = 1 << 16
"""A block that has seen more epochs counts as one of the epoch that has its number now."""
_LEAST_AGE_S = 1e-9


class Hyperbolic:
    """Hyperbolic caching by levels."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for chains and uses."""
        self._blocks = blocks
        self._queues = Queues()  # by level: rounded n and epoch in one number
        self._count = np.zeros(0, dtype=np.uint32)  # n
        self._epoch = np.zeros(0, dtype=np.uint16)
        self._lift, self._uses = Lift(blocks), Uses(blocks)
        self._began = np.zeros(EPOCHS_KNOWN, dtype=np.float64)
        self._newest, self._arrivals = 0, 0
        self._most = 0  # c
        self._now = 0.0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored; the first use of each."""
        size = int(blocks.max(initial=-1)) + 1
        self._now, self._most = now, max(self._most, len(self) + len(blocks))
        self._count, self._epoch = grown(self._count, size), grown(self._epoch, size)
        self._arrive(len(blocks))
        self._count[blocks], self._epoch[blocks] = 1, self._newest
        self._uses.begin(blocks)
        self._lift.begin(blocks)
        self._queues.put(blocks, self._first_level())

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        self._now = now
        self._count[blocks] += self._uses.of(blocks)
        own = level(self._count[blocks]).astype(np.int64) * EPOCHS_KNOWN + self._epoch[blocks]
        new = np.where(self._lift.of(blocks) > 0, self._first_level(), own)
        levels = self._lifted(np.stack((own, new, self._queues.queue[blocks])), blocks)
        moved = levels != self._queues.queue[blocks]
        for number in np.unique(levels[moved]).tolist():
            self._queues.put(blocks[moved & (levels == number)], number)

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed."""
        self._queues.remove(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` unpinned blocks of least priority, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        levels = np.asarray(sorted(self._queues.sizes), dtype=np.int64)
        for number in levels[np.argsort(self._priorities(levels), kind="stable")].tolist():
            yield from self._queues.walk(number)

    def _lifted(self, levels: Ids, blocks: Ids) -> Ids:
        """For each block the level of most priority: its own (the rows) or its followers'."""
        known, which = np.unique(levels, return_inverse=True)
        order = np.argsort(self._priorities(known), kind="stable")
        ranks = np.empty(len(known), dtype=np.int64)
        ranks[order] = np.arange(len(known))
        best = ranks[which.reshape(levels.shape)].max(axis=0, initial=0)
        lifted: Ids = known[order][along(best, blocks, self._blocks)] if len(blocks) else levels[0]
        return lifted

    def _priorities(self, levels: NDArray[np.integer]) -> NDArray[np.float64]:
        """n / t of each level, now."""
        age_s = np.maximum(self._now - self._began[levels % EPOCHS_KNOWN], _LEAST_AGE_S)
        priorities: NDArray[np.float64] = ROUNDED[levels // EPOCHS_KNOWN] / age_s
        return priorities

    def _first_level(self) -> int:
        """The level of a new block."""
        return EPOCHS_KNOWN + self._newest

    def _arrive(self, count: int) -> None:
        """Counts new blocks; an epoch ends with its share of them."""
        self._arrivals += count
        if not len(self) or self._arrivals > self._most // EPOCHS:
            self._newest = (self._newest + 1) % EPOCHS_KNOWN
            self._began[self._newest] = self._now
            self._arrivals = count
