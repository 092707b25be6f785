"""W-TinyLFU: an LRU window, and a main cache for blocks seen more often than their victims.

G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM TOS
13(4), 2017, section 4 (W-TinyLFU). Sizes are those of section 4.1: a window of 1 % of c blocks, and
a main cache that is a segmented LRU with 80 % protected:

    on a use of x:    counted in the sketch.   in the window, or absent: to the front of the window.
                      in probation: to the front of protected,  its last to the front of probation.
                      in the protected: to its front
    to make room:     the last of the window is the candidate,  the last of probation the victim.
                      if the candidate was seen more often:  it takes the victim's place at the
                      front of probation,  the victim is evicted;   else the candidate is evicted

Differences:
- `victims` changes nothing. So a candidate that won is placed when the core forgets its victim.
  Several blocks come at once, so candidates wait at the front of a list of their own.
- c is the most blocks tracked so far; while it grows, candidates pass without a contest.
- A touch that is no use by a request is not counted and changes no segment.
- The sketch replaces the ghosts: it has the names of evicted blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tierd.core.eviction import Ids, Mask
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.chains import Uses
from tierd.policies.eviction.queues import Queues, first_free, part
from tierd.policies.eviction.sketch import Sketch

WINDOW, CANDIDATES, PROBATION, PROTECTED = range(4)
WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
"""Share of the main cache."""


class Contest(NamedTuple):
    """losers: in order of eviction. winners: the candidates that take their places; -1 beside a
    loser that was no victim."""

    losers: Ids
    winners: Ids


class WTinyLfu:
    """W-TinyLFU. Ignores `now`."""

    def __init__(self, blocks: Blocks) -> None:
        """blocks: for names and uses."""
        self._blocks = blocks
        self._queues, self._sketch, self._uses = Queues(), Sketch(), Uses(blocks)
        self._most = 0  # c

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._queues)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored in the window; its last ones become candidates."""
        unasked = max(0, len(self) + len(blocks) - self._most)
        self._most += unasked
        self._sketch.widen(self._most)
        self._sketch.add(self._blocks.keys(blocks))
        self._uses.begin(blocks)
        self._queues.put(blocks, WINDOW)
        self._shorten_window()
        self._shift(CANDIDATES, PROBATION, unasked)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or precede stored ones."""
        used, queues = self._uses.of(blocks), self._queues.queue[blocks]
        self._sketch.add(self._blocks.keys(blocks[used]))
        for queue, stay in ((CANDIDATES, ~used), (PROBATION, ~used), (PROTECTED, True)):
            self._queues.put(blocks[(queues == queue) & stay], queue)
        self._queues.put(blocks[(queues == WINDOW) | ((queues == CANDIDATES) & used)], WINDOW)
        self._queues.put(blocks[(queues == PROBATION) & used], PROTECTED)
        self._shorten_window()
        above = PROTECTED_SHARE * (self._most - self._window())
        self._shift(PROTECTED, PROBATION, self._queues.size(PROTECTED) - int(above))

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed; candidates that beat them take their places."""
        placed = []
        for contest in self._contests():
            left = np.isin(contest.losers, blocks)
            if not left.any():
                break
            placed.append(contest.winners[left & (contest.winners >= 0)])
        self._queues.remove(blocks)
        for winners in placed:
            self._queues.put(winners[self._queues.stamps[winners] > 0], PROBATION)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The next `count` losers, or None."""
        return first_free(self._order(), count, pinned) if count <= len(self) else None

    def _order(self) -> Iterator[Ids]:
        placed = [np.zeros(0, dtype=np.int64)]
        for contest in self._contests():
            placed.append(contest.winners[contest.winners >= 0])
            yield contest.losers
        yield from part(self._queues.walk(PROBATION), sum(len(winners) for winners in placed))
        yield from placed
        yield from self._queues.walk(PROTECTED)
        yield from self._queues.walk(WINDOW)

    def _contests(self) -> Iterator[Contest]:
        """Each candidate, oldest first, against the oldest unbeaten block of probation."""
        supply, rest = self._queues.walk(PROBATION), np.zeros(0, dtype=np.int64)
        for candidates in self._queues.walk(CANDIDATES):
            while len(rest) < len(candidates) and (more := next(supply, None)) is not None:
                rest = np.concatenate((rest, more))
            won = self._won(candidates, rest)
            losers = candidates.copy()
            losers[won], rest = np.split(rest, [np.count_nonzero(won)])
            yield Contest(losers, np.where(won, candidates, -1))

    def _won(self, candidates: Ids, victims: Ids) -> Mask:
        """Which candidates beat the first victim that no earlier one has beaten."""
        won = np.zeros(len(candidates), dtype=np.bool_)
        seen = self._sketch.counts(self._blocks.keys(victims[: len(candidates)]))
        counts = self._sketch.counts(self._blocks.keys(candidates))
        if not len(seen) or not (counts > seen[0]).any():
            return won
        first = int((counts > seen[0]).argmax())
        beaten, rivals = 0, seen.tolist()
        for row, count in enumerate(counts[first:].tolist(), first):
            if beaten < len(rivals) and count > rivals[beaten]:
                won[row] = True
                beaten += 1
        return won

    def _window(self) -> int:
        return max(1, int(WINDOW_SHARE * self._most))

    def _shorten_window(self) -> None:
        self._shift(WINDOW, CANDIDATES, self._queues.size(WINDOW) - self._window())

    def _shift(self, queue: int, to: int, count: int) -> None:
        """Moves the oldest of one queue to the front of another."""
        for blocks in list(part(self._queues.walk(queue), 0, count)) if count > 0 else ():
            self._queues.put(blocks, to)
