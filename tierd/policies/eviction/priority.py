"""Priority with retention time: evicts the lowest priority first, within it by LRU.

As in TensorRT-LLM (KvCacheRetentionConfig and its eviction policy, with the same default of 35).
Puts give the priorities (`tierd.core.index.priorities`):

    level of a block     its priority while it is retained; else, or if none was given, the default
    to make room:        evict from the lowest level on, the least recently used

Two differences. (1) In TensorRT-LLM, a block whose time runs out counts as just used. Here its
place is that of its last use, so the order is a plain sort by (level, last use). (2) There, each
use that names a priority restarts the time, and one that names none makes it last forever. Here a
get changes nothing: the time is that of the put. A block that is used often is recent, so it needs
no priority then.

Each level is a queue. A block whose time runs out moves from its queue to `Late`, which is sorted
and merged with the default's. That costs in proportion to the blocks that ran out and were not used
since, at most once a second.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.formats.model import PRIORITY_DEFAULT
from tierd.core.index.blocks import Blocks
from tierd.core.index.priorities import Priorities
from tierd.policies.eviction.late import Late, merged
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free
from tierd.policies.eviction.retention import Ends


class Priority:
    """Keeps `tierd.core.eviction.Heeding` too."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for their priorities."""
        self._blocks = blocks
        self._queues, self._late, self._ends = Queues(), Late(), Ends()
        self._uses = np.zeros(0, dtype=np.int64)  # by block id, the number of its last use
        self._next_use = 1
        self._time_s = 0.0  # Unix time of the last call that gave one

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues) + len(self._late)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        self.pass_time(now)
        self._put(blocks)
        self._note(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        self.pass_time(now)
        self._late.remove(blocks[self._late.has(blocks)])
        self._put(blocks)

    def said(self, blocks: Ids, now: float) -> None:
        """The blocks' priorities changed; a use."""
        self.touch(blocks, now)
        self._note(blocks)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        late = self._late.has(blocks)
        self._late.remove(blocks[late])
        self._queues.remove(blocks[~late])

    def pass_time(self, now: float) -> None:
        """Moves blocks whose time has run out to the default, each to the place of its last use."""
        self._time_s = self._blocks.unix_s + now
        due = self._ends.due(self._time_s)
        if not len(due):
            return
        queues = self._queues
        due = due[(queues.stamps[due] > 0) & (queues.queue[due] != PRIORITY_DEFAULT)]
        due = due[self._levels(due) == PRIORITY_DEFAULT]
        queues.remove(due)
        self._late.add(due, self._uses[due])

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """From the lowest level on, the least recently used; or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        for level in sorted({*self._queues.sizes, PRIORITY_DEFAULT}):
            queue = self._queues.walk(level)
            is_default = level == PRIORITY_DEFAULT and len(self._late)
            yield from merged(queue, self._late.walk(), lambda ids: self._uses[ids]) if is_default else queue

    def _levels(self, blocks: Ids) -> Ids:
        return Priorities.of_blocks(self._blocks, blocks).priorities(self._time_s).astype(np.int64)

    def _put(self, blocks: Ids) -> None:
        self._uses = grown(self._uses, int(blocks.max(initial=-1)) + 1)
        self._uses[blocks] = np.arange(self._next_use, self._next_use + len(blocks))
        self._next_use += len(blocks)
        levels = self._levels(blocks)
        for level in np.unique(levels).tolist():
            self._queues.put(blocks[levels == level], level)

    def _note(self, blocks: Ids) -> None:
        """Notes when the time of retained blocks runs out."""
        until_s = self._blocks.until_s[blocks]
        rows = until_s > self._time_s
        self._ends.note(blocks[rows], until_s[rows])
        self._ends.trim(len(self), self._ends_in)

    def _ends_in(self, blocks: Ids, second: int) -> Mask:
        return np.asarray((self._queues.stamps[blocks] > 0) & (self._blocks.until_s[blocks] == second), bool)
