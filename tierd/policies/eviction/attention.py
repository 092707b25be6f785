"""Attention: blocks with much attention, and first blocks, stay for more rounds of an LRU queue.

Z. Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023, section 4.2, algorithm 1. It keeps the recent, and those with the greatest
accumulated attention. G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
ICLR 2024, section 3.2: keep the first tokens. Both speak of tokens of one sequence. Here blocks of
all sequences compete by the decayed attention mass that kernels report (`Blocks.attention`):

    on a use of i:    A_i := A_i / 2^(t / half-life) + mass reported since;  to the front of the
                      queue, with a credit of  0 if A_i is below the mean of those used lately,
                      1 up to twice the mean,  2 up to four times,  else 3;
                      3 also for  the first of a sequence
    to make room:     from the back: credit > 0: to the front, with credit - 1; else evict it

The queue is recency; a credit stands for a doubling of attention, and each round takes one. If no
kernel reports attention, this is LRU that evicts first blocks late. A block has at least the credit
of the blocks after it in the request, which cannot be used without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Levels, along
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free
from tierd.policies.eviction.rounds import Rounds

HALF_LIFE_S = 600.0
MOST_CREDIT = 3
MEAN_OVER = 4096
"""Blocks with attention over which the mean is taken; those used lately count most."""


class Attention:
    """Heavy hitters and first blocks stay."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for attention and chains."""
        self._blocks = blocks
        self._queues = Queues()
        self._rounds = Rounds(self._queues, 0, most=MOST_CREDIT)
        self._mass = np.zeros(0, dtype=np.float32)  # A
        self._reported = np.zeros(0, dtype=np.float32)  # the part of it that was reported by the last use
        self._time_s = np.zeros(0, dtype=np.float32)  # of the last use, since the first of all
        self._begin: float | None = None
        self._mean = 0.0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; attention that was reported for them elsewhere counts."""
        size = int(blocks.max(initial=-1)) + 1
        columns = (self._mass, self._reported, self._time_s)
        self._mass, self._reported, self._time_s = (grown(column, size) for column in columns)
        self._mass[blocks] = self._reported[blocks] = 0
        self._rounds.put(blocks, self._credit(blocks, now))

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede some that came, or attention was reported."""
        self._rounds.take(blocks)
        self._rounds.put(blocks, self._credit(blocks, now))

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted; those passed over for them lose credit."""
        self._rounds.leave(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The next `count` in the order of the rounds, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        return (blocks for _, blocks in self._rounds.walk())

    def _credit(self, blocks: Ids, now: float) -> Levels:
        """The credit of the blocks, deepest first, at `now`."""
        mass = self._updated_mass(blocks, now)
        if self._mean > 0:
            credit = np.clip(1 + np.floor(np.log2(np.maximum(mass, 1e-30) / self._mean)), 0, MOST_CREDIT)
        else:
            credit = np.zeros(len(blocks))
        credit[self._blocks.position[blocks] == 0] = MOST_CREDIT
        return along(credit, blocks, self._blocks).astype(np.uint8)

    def _updated_mass(self, blocks: Ids, now: float) -> NDArray[np.float32]:
        """A of each, with the mass reported since the last use."""
        self._begin = now if self._begin is None else self._begin
        time_s = np.float32(now - self._begin)
        reported = self._blocks.attention[blocks]
        decay = np.exp2((self._time_s[blocks] - time_s) / HALF_LIFE_S)
        mass: NDArray[np.float32] = self._mass[blocks] * decay + np.maximum(reported - self._reported[blocks], 0)
        self._mass[blocks], self._reported[blocks], self._time_s[blocks] = mass, reported, time_s
        heavy = mass[mass > 0]
        if len(heavy):
            weight = 1.0 if not self._mean else min(1.0, len(heavy) / MEAN_OVER)
            self._mean += weight * (float(heavy.mean()) - self._mean)
        return mass
