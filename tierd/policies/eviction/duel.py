"""Duel: by worth where that finds more than LRU on what is happening now, else LRU; and what is new stays for a while either way.

Purpose: a learnt order (reuse_index.py) that costs no more than a hair where it is wrong. Non-purpose: who finds more (shadows.py). Blocks come into the order by worth when they have waited:
- in a window, the newest WINDOW_SHARE of the blocks, as in W-TinyLFU (G. Einziger, R. Friedman, B. Manes, ACM TOS 13(4), 2017, section 4);
- in a store, what somebody asked to be durable, for as long as LRU would keep it.
So nothing that looks for victims passes over those that wait. Invariant: a tracked block waits or is in the order by worth; `_lru` tracks all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.blocks import Blocks
from tierd.core.eviction import Asked, Ids, Mask
from tierd.core.model import TierKind
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.queues import Queues, part, some_free
from tierd.policies.eviction.reuse_index import ReuseIndex
from tierd.policies.eviction.shadows import Shadows, Uses
from tierd.policies.reuse import Traffic

WINDOW_SHARE = 1 / 256
"""A window of a hundredth costs 0.01 to 0.08 points more on the developers' chat trace."""
NEW, DURABLE = 0, 1
"""Queues of those that wait; their stamps are those of `_lru`, give or take a call's blocks."""


class Duel:
    """See the module."""

    def __init__(self, blocks: Blocks, traffic: Traffic, kind: TierKind = TierKind.HOST) -> None:
        """traffic: as of `ReuseIndex`. kind: of the tier."""
        self._blocks, self._kind = blocks, kind
        self._lru, self._worth = Lru(blocks), ReuseIndex(blocks, traffic, is_above=kind is TierKind.HOST)
        self._waiting, self._shadows = Queues(), Shadows(traffic)
        traffic.rivals.append(self._asked)

    def __len__(self) -> int:
        """How many blocks are tracked."""
        return len(self._lru)

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come; a use."""
        self._lru.track(blocks, now)
        self._use(blocks, now)

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        self._worth.forget(blocks[self._worth.has(blocks)])
        self._lru.touch(blocks, now)
        self._use(blocks, now)

    def forget(self, blocks: Ids) -> None:
        """The blocks have left."""
        waits = self._waiting.has(blocks)
        self._waiting.remove(blocks[waits])
        self._worth.forget(blocks[~waits])
        self._lru.forget(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` that are worth least or, while LRU decides, were used longest ago, and are not pinned; or None."""
        if count > len(self) or not self._shadows.leads:
            return self._lru.victims(count, pinned)
        found = self._worth.some(count, pinned)
        if len(found) < count:
            missing = count - len(found)
            rest = np.concatenate([some_free(self._waiting.walk(q), missing, pinned) for q in (NEW, DURABLE)])
            found = np.concatenate((found, rest[np.argsort(self._lru.stamps[rest])[:missing]]))
        return found if len(found) == count else None

    def _use(self, blocks: Ids, now: float) -> None:
        """The blocks were used just now."""
        if len(blocks) == 0:
            return
        known, stop = self._blocks, self._lru.next_stamp
        spread = known.hash[blocks, 0]
        if len(at := self._shadows.sampled(spread, len(self))):
            used, stamps = blocks[at], stop - len(blocks) + at
            self._shadows.use(Uses(known.keys(used), spread[at], known.group[used], stamps), now)
        durable = known.durable[blocks] & (self._kind is TierKind.NVME)
        self._waiting.put(blocks[~durable], NEW)
        self._waiting.put(blocks[durable], DURABLE)
        over = self._waiting.size(NEW) - int(WINDOW_SHARE * len(self))
        ripe = [*part(self._waiting.walk(NEW), 0, over)] if over > 0 else []
        if self._waiting.size(DURABLE):
            ripe.append(self._waiting.until(DURABLE, self._shadows.horizon))
        for those in ripe:
            self._waiting.remove(those)
            self._worth.track(those, now)

    def _asked(self, request: Asked, groups: NDArray[np.uint16], now: float) -> None:
        """A request has come; its blocks are touched after this."""
        if len(at := self._shadows.sampled(request.spread, len(self))[::-1]):
            ids, nearest = request.ids[0][0][at], request.nearest[at]
            here = (ids >= 0) & self._lru.has(np.maximum(ids, 0))
            uses = Uses(request.keys[at], request.spread[at], groups[at], np.full(len(at), self._lru.next_stamp))
            self._shadows.ask(uses, counts=(nearest < 0) | (nearest >= self._kind), here=here, now=now)
