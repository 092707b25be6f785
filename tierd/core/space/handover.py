"""Handover: a tier gets another eviction policy in pieces, while the old one decides.

The new policy tracks the tier's blocks from cold to hot, as the caller gives them. Uses that come
meanwhile are repeated to it afterwards, in their order. So it ends with every block, and with the
latest uses last. The uses take 8 bytes each until they are repeated.

    Handover(old, new) -- give, piece by piece --> repeat, until none is left --> new
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tierd.core.eviction import Eviction, Heeding, Ids, Mask


class Handover:
    """Keeps `tierd.core.eviction.Eviction`: `old` answers, `new` learns."""

    def __init__(self, old: Eviction, new: Eviction) -> None:
        self.old, self.new = old, new
        self.given = np.zeros(0, bool)
        """By block id: whether `new` tracks it."""
        self._uses: deque[Ids] = deque()

    def __len__(self) -> int:
        """How many blocks `old` tracks: all of the tier."""
        return len(self.old)

    @property
    def uses_left(self) -> int:
        """How many uses are still to be repeated."""
        return sum(map(len, self._uses))

    def give(self, blocks: Ids, now: float) -> None:
        """Blocks that `old` tracks, from cold to hot: a use of each in `new`."""
        if (lacking := int(blocks.max(initial=-1)) + 1 - len(self.given)) > 0:
            self.given = np.concatenate((self.given, np.zeros(max(lacking, len(self.given)), bool)))
        known = self.given[blocks]
        self.new.track(blocks[~known], now)
        self.new.touch(blocks[known], now)
        self.given[blocks] = True

    def take_uses(self) -> Ids:
        """The next uses to repeat, in their order. Some of the blocks may have left the tier."""
        return self._uses.popleft()

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored."""
        self.old.track(blocks, now)
        self._uses.append(blocks.copy())

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        self.old.touch(blocks, now)
        self._uses.append(blocks.copy())

    def forget(self, blocks: Ids) -> None:
        """The blocks left the tier."""
        self.old.forget(blocks)
        known = self._known(blocks)
        self.new.forget(known)
        self.given[known] = False

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """As `old` decides."""
        return self.old.victims(count, pinned)

    def said(self, blocks: Ids, now: float) -> None:
        """These blocks got another priority; a use."""
        if isinstance(self.old, Heeding):
            self.old.said(blocks, now)
        self._uses.append(blocks.copy())
        if isinstance(self.new, Heeding):
            self.new.said(self._known(blocks), now)

    def pass_time(self, now: float) -> None:
        """Sets the time of both."""
        for policy in (self.old, self.new):
            if isinstance(policy, Heeding):
                policy.pass_time(now)

    def _known(self, blocks: Ids) -> Ids:
        inside = blocks[blocks < len(self.given)]
        return inside[self.given[inside]]
