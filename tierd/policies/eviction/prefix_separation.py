"""Prefix separation: LRU with a reserve for shared prefixes, sized by the names that come back.

Serving engines with pinned or static prefixes also keep shared prefixes (system prompts, tool
definitions) apart from conversation tails. SGLang reuses them by its tree (L. Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, section 3). A
fixed reserve loses, because recency keeps them anyway. So the reserve is learnt as ARC learns its p
(N. Megiddo, D. Modha, FAST 2003, section III.B):

    a block is shared    once a second full block follows it or one that follows it in its chain
    to make room:        evict the least recently used; but pass over the newest r shared blocks
    a name comes back    of evicted shared blocks: r := min(c / 4, r + max(|Bt| / |Bs|, 1))
                         of tails: r := max(0, r - max(|Bs| / |Bt|, 1))

c is the most blocks that were ever tracked; Bs and Bt are the evicted names, c / 2 at most of each.
A block stays shared until it is evicted. With r = 0 this is LRU. The next turn replaces a short
block at a conversation's end by a full one, so short ones count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Levels, Lift
from tierd.policies.eviction.ghosts import Ghosts
from tierd.policies.eviction.order import grown
from tierd.policies.eviction.queues import Queues, first_free, part

TAILS, SHARED = 0, 1
"""Also of ghosts: Bt and Bs."""
RESERVE_PART = 4
"""The reserve is at most a quarter of c."""


class PrefixSeparation:
    """Shared prefixes apart from tails. Ignores `now`."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for names and chains."""
        self._blocks = blocks
        self._queues, self._left = Queues(), Ghosts()
        self._child = np.zeros(0, dtype=np.uint32)  # of a block's first full child, half of its key
        self._branch = Lift(blocks)
        self._most = 0  # c
        self._reserve = 0.0  # r

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come, some of them back."""
        self._most = max(self._most, len(self) + len(blocks))
        sizes = [self._left.size(TAILS), self._left.size(SHARED)]
        was_in = self._left.recall(self._blocks.keys(blocks))
        for number in was_in[was_in >= 0].tolist():
            self._adapt(number, sizes)
        for number in (TAILS, SHARED):
            self._left.trim(self._most // 2, number)
        self._branch.begin(blocks, self._branches(blocks))
        self._queues.put(blocks[was_in != SHARED], TAILS)
        self._queues.put(blocks[was_in == SHARED], SHARED)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede some that came."""
        shared = (self._branch.of(blocks) > 0) | (self._queues.queue[blocks] == SHARED)
        self._queues.put(blocks[~shared], TAILS)
        self._queues.put(blocks[shared], SHARED)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        queues = self._queues.queue[blocks]
        for number in (TAILS, SHARED):
            self._left.remember(self._blocks.keys(blocks[queues == number]), number)
        self._queues.remove(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The least recently used, those in the reserve last; or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        above = max(0, self._queues.size(SHARED) - int(self._reserve))
        rest = np.zeros(0, dtype=np.int64)
        shared = part(self._queues.walk(SHARED), 0, above)
        for tails in self._queues.walk(TAILS):
            last = self._queues.stamps[tails[-1:]].max(initial=0)
            while (not len(rest) or self._queues.stamps[rest[-1]] < last) and (more := next(shared, None)) is not None:
                rest = np.concatenate((rest, more))
            before, rest = np.split(rest, [int(np.searchsorted(self._queues.stamps[rest], last))])
            ready = np.concatenate((tails, before))
            yield ready[np.argsort(self._queues.stamps[ready])]
        yield rest
        yield from shared
        yield from part(self._queues.walk(SHARED), above)

    def _branches(self, blocks: Ids) -> Levels:
        """1 for each full block whose parent has another full child, else 0. Remembers the first
        that follows each."""
        parents, tokens = self._blocks.parent[blocks], self._blocks.tokens
        out = np.zeros(len(blocks), dtype=np.uint8)
        full = np.flatnonzero((parents >= 0) & (tokens[blocks] >= tokens[parents]))
        above, names = parents[full], self._blocks.keys(blocks[full]).astype(np.uint32) | np.uint32(1)
        self._child = grown(self._child, 1 + max(int(blocks.max(initial=-1)), int(above.max(initial=-1))))
        self._child[blocks] = 0
        known = self._child[above]
        out[full] = (known != 0) & (known != names)
        self._child[above[known == 0]] = names[known == 0]
        return out

    def _adapt(self, number: int, sizes: list[int]) -> None:
        """A name came back from a list of ghosts. sizes: of both lists before that."""
        step = max(1.0, sizes[1 - number] / sizes[number])
        most = self._most / RESERVE_PART
        self._reserve = min(most, self._reserve + step) if number == SHARED else max(0.0, self._reserve - step)
        sizes[number] -= 1
