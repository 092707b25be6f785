"""Clairvoyant: the policy that knows when each block is used next.

Purpose: the bound that no policy passes. Non-purpose: a daemon's policy; it needs the trace's future. L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966: what is used farthest in the future leaves first. In one tier that is
exact for chained blocks too, because blocks have one size and a parent is never needed later than its child: then what is held is always
a set of whole prefixes, and a hit of Belady's is a hit of a prefix. It is exact only if a block that is worth less than all that is held is not
taken in at all, so the driver here leaves the end of a request away (which is worth least).
In several tiers each tier is ordered by the next use, which is good, and no proven bound.
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
"""A request that does not come."""
DEPTH_BITS = 20
"""Of two blocks with one next use the deeper leaves first; blocks beyond this depth count as equally deep."""


def next_uses(trace: Trace) -> NDArray[np.int64]:
    """For each block access the number of the next request that has the block, or NEVER. int64 [accesses]."""
    requests = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    order = np.lexsort((requests, trace.blocks))
    again = trace.blocks[order][1:] == trace.blocks[order][:-1]
    out = np.full(len(order), NEVER, np.int64)
    out[order[:-1][again]] = requests[order[1:][again]]
    return out


class Foresight:
    """When each block of a trace is used next, as seen from the request that is being served."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._uses = next_uses(trace)
        self._now = np.full(trace.distinct, NEVER, np.int64)
        self._depth = np.zeros(trace.distinct, np.int64)

    def see(self, request: int) -> None:
        """The request is served now."""
        numbers = self._trace.of(request)
        start = int(self._trace.starts[request])
        self._now[numbers] = self._uses[start : start + len(numbers)]
        self._depth[numbers] = np.minimum(np.arange(len(numbers)), (1 << DEPTH_BITS) - 1)

    def next_use(self, numbers: Numbers) -> NDArray[np.int64]:
        """Of blocks by number: the next request that has them, or NEVER."""
        return self._now[numbers]

    def coldness(self, numbers: Numbers) -> NDArray[np.int64]:
        """Of blocks by number: what has more of it leaves first."""
        return (self._now[numbers] << DEPTH_BITS) + self._depth[numbers]


class Clairvoyant:
    """An eviction policy over what a Foresight sees. The order of calls and `now` are not looked at."""

    def __init__(self, blocks: Blocks, sight: Foresight) -> None:
        self._blocks, self._sight = blocks, sight
        self._here = np.zeros(0, np.bool_)
        self._numbers = np.zeros(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return self._count

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come."""
        if len(blocks) == 0:
            return
        self._lengthen(int(blocks.max()) + 1)
        self._here[blocks] = True
        self._numbers[blocks] = numbers_of(self._blocks.hash[blocks])
        self._count += len(blocks)

    def touch(self, blocks: Ids, now: float) -> None:
        """What was used says nothing here."""

    def forget(self, blocks: Ids) -> None:
        """The blocks have left."""
        self._here[blocks] = False
        self._count -= len(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` that are used farthest in the future and not pinned, the farthest first, or None."""
        rows = min(len(pinned), len(self._here))  # nothing is tracked beyond either
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
    """The admission that knows the future: what is used again is written, the soonest first, as far as the wear budget reaches."""

    def __init__(self, spec: TierSpec, blocks: Blocks, sight: Foresight) -> None:
        super().__init__(spec, blocks)
        self._names, self._sight = blocks, sight

    def worth(self, blocks: Ids, now: float) -> Worth:
        """More for what is used sooner, 0 for what never is."""
        uses = self._sight.next_use(numbers_of(self._names.hash[blocks]))
        return np.where(uses < NEVER, 1.0 / (1.0 + uses), 0.0)


class ForesightDriver(InstantDriver):
    """Puts of a request only what is used again and sooner than what would leave for it."""

    def __init__(self, core: Core, *, kind: TierKind, tiers: list[Clairvoyant], pages: int) -> None:
        """tiers: the policies of the core's tiers. pages: full blocks that they hold in all."""
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
        """How many of the missing blocks, from the first on, are among the best that can be held."""
        uses = self.sight.next_use(missing)
        held = np.unique(np.concatenate([tier.held() for tier in self._tiers]))
        room = max(0, self._pages - len(held))
        worst = np.sort(self.sight.next_use(held))[::-1]
        against = np.full(len(uses), NEVER, np.int64)
        beyond = np.arange(len(uses)) - room
        contested = beyond >= 0
        against[contested] = np.append(worst, -1)[np.minimum(beyond[contested], len(worst))]
        return int(np.argmin(np.append(uses < against, False)))
