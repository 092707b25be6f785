"""Rounds: a queue walked from its oldest end; credit buys another round, no credit means eviction.

A block with credit pays one and moves to the newest end. This is the main queue of S3-FIFO and
every other second chance: F. J. Corbato, "A Paging Experiment with the Multics System", 1968, with
a counter instead of a bit (GCLOCK). The policy gives credit. Blocks without credit are evicted
first, oldest first; a round later those that had one; and so on. A query passes over credit and
changes nothing; `leave` pays the credits, so each credit saves a block once.

Unlike a clock that turns only for victims, a block may be evicted out of turn (colder ones are
pinned, or an operator dropped it). If it had more credit than the poorest, nothing turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids
from tierd.policies.eviction.chains import Levels
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues


class Rounds:
    """A queue of its policy. credit: by block id, also of blocks elsewhere, at most `most`."""

    def __init__(self, queues: Queues, number: int, *, most: int) -> None:
        self.credit = np.zeros(0, dtype=np.uint8)
        self._queues, self._number = queues, number
        self._counts = np.zeros(most + 1, dtype=np.int64)

    def __len__(self) -> int:
        """How many blocks are in it."""
        return self._queues.size(self._number)

    def put(self, blocks: Ids, credit: Levels | int) -> None:
        """The blocks become its newest, in this order; they come from elsewhere, or were taken."""
        if len(blocks):
            self.credit = grown(self.credit, int(blocks.max()) + 1)
        self.credit[blocks] = credit
        self._queues.put(blocks, self._number)
        self._count(blocks, 1)

    def set(self, blocks: Ids, credit: Levels) -> None:
        """Sets the blocks' credit; they stay in their places."""
        self._count(blocks, -1)
        self.credit[blocks] = credit
        self._count(blocks, 1)

    def take(self, blocks: Ids) -> None:
        """The blocks move, no block was passed over for them. The caller updates `Queues`."""
        self._count(blocks, -1)

    def leave(self, blocks: Ids) -> None:
        """The blocks leave their queue; those passed over for them pay credit."""
        rest = blocks
        while len(rest):
            poorest = int(np.flatnonzero(self._counts)[0])
            now = self.credit[rest] == poorest
            if not now.any():
                break
            self._pass(rest[now], poorest)
            rest = rest[~now]
            if self._counts[poorest] > 0:
                break
        self._count(rest, -1)
        self._queues.remove(rest)

    def walk(self) -> Iterator[tuple[int, Ids]]:
        """Its blocks, and their credit, in the order of eviction."""
        for credit in np.flatnonzero(self._counts).tolist():
            for blocks in self._queues.walk(self._number):
                yield credit, blocks[self.credit[blocks] == credit]

    def _pass(self, blocks: Ids, poorest: int) -> None:
        """Evicts the poorest: others pay whole rounds, those before the last of these once more."""
        if poorest:
            for piece in self._queues.walk(self._number):
                self.credit[piece] -= np.uint8(poorest)
            self._counts = np.concatenate((self._counts[poorest:], self._counts[:poorest]))
        last = int(self._queues.stamps[blocks].max())
        self._count(blocks, -1)
        self._queues.remove(blocks)
        passed = self._queues.until(self._number, last)
        passed = passed[self.credit[passed] > 0]
        self._count(passed, -1)
        self.put(passed, self.credit[passed] - np.uint8(1))

    def _count(self, blocks: Ids, step: int) -> None:
        self._counts += step * np.bincount(self.credit[blocks], minlength=len(self._counts))
