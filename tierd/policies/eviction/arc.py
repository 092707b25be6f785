"""ARC: two LRU lists, for blocks used once and again; their shares follow names that return.

N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4, for
a cache of c pages:

    on a use of x:    in T1 or T2: to the front of T2
                      in B1:  p := min(c, p + max(|B2| / |B1|, 1)); to the front of T2
                      in B2:  p := max(0, p - max(|B1| / |B2|, 1)); to the front of T2
                      else:   to the front of T1;  |T1| + |B1| <= c and
                      |T1| + |T2| + |B1| + |B2| <= 2 c,  or else the last of B1, of B2 goes
    to make room:     |T1| > p: evict the last of T1, its name goes to the front of B1
                      else:      evict the last of T2, its name goes to the front of B2

Differences. (1) c is the most blocks that were ever tracked. (2) The core makes room before it
tells which blocks come. So p is as before, and the paper's preference for |T1| = p and x in B2 is
missing. (3) A touch that is no use by a request moves a block to the front of its own list. (4) If
T2 is empty, T1 is evicted further. (5) Names of all blocks that leave are remembered.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Uses
from tierd.policies.eviction.ghosts import Ghosts
from tierd.policies.eviction.queues import Queues, first_free, part

ONCE, AGAIN = 0, 1
"""T1 and T2; of ghosts B1 and B2."""


class Arc:
    """Adaptive replacement. Ignores `now`."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for names and uses."""
        self._blocks = blocks
        self._queues, self._left = Queues(), Ghosts()
        self._uses = Uses(blocks)
        self._most = 0  # c
        self._share = 0.0  # p

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come, some of them back."""
        self._most = max(self._most, len(self) + len(blocks))
        sizes = [self._left.size(ONCE), self._left.size(AGAIN)]
        was_in = self._left.recall(self._blocks.keys(blocks))
        for number in was_in[was_in >= 0].tolist():
            self._adapt(number, sizes)
        self._queues.put(blocks[was_in < 0], ONCE)
        self._queues.put(blocks[was_in >= 0], AGAIN)
        self._uses.begin(blocks)
        self._left.trim(self._most - self._queues.size(ONCE), ONCE)
        self._left.trim(2 * self._most - len(self) - self._left.size(ONCE), AGAIN)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede some that came."""
        again = self._uses.of(blocks) | (self._queues.queue[blocks] == AGAIN)
        self._queues.put(blocks[~again], ONCE)
        self._queues.put(blocks[again], AGAIN)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        queues = self._queues.queue[blocks]
        for number in (ONCE, AGAIN):
            self._left.remember(self._blocks.keys(blocks[queues == number]), number)
        self._queues.remove(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """Blocks of T1 above its share, oldest first; then T2; then the rest of T1."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        above = max(0, self._queues.size(ONCE) - int(self._share))
        yield from part(self._queues.walk(ONCE), 0, above)
        yield from self._queues.walk(AGAIN)
        yield from part(self._queues.walk(ONCE), above)

    def _adapt(self, number: int, sizes: list[int]) -> None:
        """A name came back from a list of ghosts. sizes: of both lists before that."""
        step = max(1.0, sizes[1 - number] / sizes[number])
        self._share = min(self._most, self._share + step) if number == ONCE else max(0.0, self._share - step)
        sizes[number] -= 1
