"""Clairvoyant: the policy that knows when each block is used next, a bound for all others.

It needs the trace's future, so no daemon offers it. L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966: evict the block whose
next use is farthest. In one tier that is exact for chained blocks too: blocks have one size, and a
parent is never needed later than its child. So the tier always holds whole prefixes, and each of
Belady's hits is a hit of a prefix. It is exact only if a block worth less than all held ones is not
stored. So the driver here omits the end of a request, which is worth least. In several tiers each
tier is ordered by the next use, which is good, but no proven bound.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tierd.core.core import Core
from tierd.core.eviction import Ids, Mask
from tierd.core.formats.model import TierKind, TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.policies.admission.gate import Gate, Worth
from tierd.simulator.sequences import Numbers, Trace, numbers_of

NEVER = 1 << 40
"""Number of a request that never comes."""
DEPTH_BITS = 20
"""Of two blocks with one next use the deeper goes first; deeper than this counts as equal."""


def next_uses(trace: Trace) -> NDArray[np.int64]:
    """For each block access, the next request that has the block, or NEVER. int64 [accesses]."""
    requests = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    order = np.lexsort((requests, trace.blocks))
    again = trace.blocks[order][1:] == trace.blocks[order][:-1]
    out = np.full(len(order), NEVER, np.int64)
    out[order[:-1][again]] = requests[order[1:][again]]
    return out


class Foresight:
    """The next use of each block of a trace, seen from the current request."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._uses = next_uses(trace)
        self._now = np.full(trace.distinct, NEVER, np.int64)
        self._depth = np.zeros(trace.distinct, np.int64)

    def see(self, request: int) -> None:
        """Advances to this request."""
        numbers = self._trace.of(request)
        start = int(self._trace.starts[request])
        self._now[numbers] = self._uses[start : start + len(numbers)]
        self._depth[numbers] = np.minimum(np.arange(len(numbers)), (1 << DEPTH_BITS) - 1)

    def next_use(self, numbers: Numbers) -> NDArray[np.int64]:
        """The next request that has each block, or NEVER. numbers: of blocks."""
        return self._now[numbers]

    def coldness(self, numbers: Numbers) -> NDArray[np.int64]:
        """Blocks with a greater value are evicted first. numbers: of blocks."""
        return (self._now[numbers] << DEPTH_BITS) + self._depth[numbers]


class Clairvoyant:
    """An eviction policy by a Foresight. It ignores `now` and the order of calls."""

    def __init__(self, blocks: Blocks, sight: Foresight) -> None:
        self._blocks, self._sight = blocks, sight
        self._here = np.zeros(0, np.bool_)
        self._numbers = np.zeros(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored."""
        if len(blocks) == 0:
            return
        self._lengthen(int(blocks.max()) + 1)
        self._here[blocks] = True
        self._numbers[blocks] = numbers_of(self._blocks.hash[blocks])
        self._count += len(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """Past uses do not matter here."""

    def forget(self, blocks: Ids) -> None:
        """The blocks were removed."""
        self._here[blocks] = False
        self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` unpinned blocks with the farthest next use, farthest first, or None."""
        rows = min(len(pinned), len(self._here))  # no block is tracked beyond either
        free = np.flatnonzero(self._here[:rows] & ~pinned[:rows])
        if len(free) < count:
            return None
        cold = self._sight.coldness(self._numbers[free])
        if count < len(free):
            most = np.argpartition(-cold, count)[:count]
            free, cold = free[most], cold[most]
        return free[np.argsort(-cold, kind="stable")]

    def held(self) -> Numbers:
        """The numbers of the tracked blocks."""
        return self._numbers[self._here]

    def _lengthen(self, size: int) -> None:
        if size > len(self._here):
            more = max(size, 2 * len(self._here)) - len(self._here)
            self._here = np.concatenate((self._here, np.zeros(more, np.bool_)))
            self._numbers = np.concatenate((self._numbers, np.zeros(more, np.int64)))


class UsedAgain(Gate):
    """The admission that knows the future: writes blocks that are used again, soonest first, within
    the wear budget."""

    def __init__(self, spec: TierSpec, blocks: Blocks, sight: Foresight) -> None:
        super().__init__(spec, blocks)
        self._names, self._sight = blocks, sight

    def worth(self, blocks: Ids, now: float) -> Worth:
        """Greater for an earlier next use, 0 for none."""
        uses = self._sight.next_use(numbers_of(self._names.hash[blocks]))
        return np.where(uses < NEVER, 1.0 / (1.0 + uses), 0.0)


class ForesightDriver(InstantDriver):
    """Puts only blocks of a request whose next use is sooner than that of the blocks evicted for
    them."""

    def __init__(self, core: Core, *, kind: TierKind, tiers: list[Clairvoyant], pages: int) -> None:
        """tiers: the policies of the core's tiers. pages: full blocks that all hold."""
        super().__init__(core, kind=kind, tier_count=len(tiers))
        self._tiers, self._pages = tiers, pages
        self.sight = tiers[0]._sight

    def _store(self, sequence: Sequence, *, first: int, now: float) -> int:
        stop = first + self._worth(numbers_of(sequence.hashes[first:].view("<u8")))
        tokens = min(sequence.tokens, stop * sequence.tokens_per_block)
        return super()._store(
            dataclasses.replace(sequence, hashes=sequence.hashes[:stop], tokens=tokens), first=first, now=now
        )

    def _worth(self, missing: Numbers) -> int:
        """How many of the missing blocks, from the first on, are among the best that fit."""
        uses = self.sight.next_use(missing)
        held = np.unique(np.concatenate([tier.held() for tier in self._tiers]))
        room = max(0, self._pages - len(held))
        worst = np.sort(self.sight.next_use(held))[::-1]
        against = np.full(len(uses), NEVER, np.int64)
        beyond = np.arange(len(uses)) - room
        contested = beyond >= 0
        against[contested] = np.append(worst, -1)[np.minimum(beyond[contested], len(worst))]
        return int(np.argmin(np.append(uses < against, False)))
