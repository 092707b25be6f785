"""Duel: evicts by worth if that finds more than LRU in current traffic, else by LRU.

A learnt order (reuse_index.py) thus costs very little when it is wrong. shadows.py measures which
order finds more. Some blocks wait before they enter the order by worth:
- in a window, the tier's last uses, WINDOW_SHARE of its blocks, as in W-TinyLFU (G. Einziger, R.
  Friedman, B. Manes, ACM TOS 13(4), 2017, section 4);
- in a store, blocks that a client asked to be durable, for as long as LRU would keep them. So no
  search for victims passes over waiting blocks. The method `_go_on` moves the window's end and
  reports uses to the shadows in batches: one by one costs ten times as much. Each tracked block is
  in `_kept`, has a stamp in `_lru` of at least `_ripe`, or is ordered by worth.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tierd.core.eviction import Ids, Mask, SequenceRequest
from tierd.core.formats.model import TierKind
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.queues import Queues, some_free
from tierd.policies.eviction.reuse_index import ReuseIndex
from tierd.policies.eviction.shadows import Shadows, named
from tierd.policies.reuse import Traffic

WINDOW_SHARE = 1 / 256
"""A window of 1/100 costs 0.01 to 0.08 points more on the developers' chat trace."""
BATCH_LIMIT, BATCH_SHARE = 256, 1 / 512
"""The shadows get uses in batches of 256, or of 1/512 of the tier's blocks if that is less."""


class Duel:
    """See the module."""

    def __init__(self, blocks: Blocks, traffic: Traffic, kind: TierKind = TierKind.HOST) -> None:
        """traffic: as of `ReuseIndex`. kind: of the tier."""
        self._blocks, self._kind, self._traffic = blocks, kind, traffic
        self._lru, self._worth = Lru(blocks), ReuseIndex(blocks, traffic, is_above=kind is TierKind.HOST)
        self._kept, self._shadows = Queues(), Shadows(traffic)
        self._recent = np.zeros(0, np.int32)  # blocks by the stamp of their use, from `_base` on
        self._base = self._ripe = self._reported = self._lru.next_stamp
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
        self._leave(blocks)
        self._lru.touch(blocks, now)
        self._use(blocks, now)

    def forget(self, blocks: Ids) -> None:
        """The blocks were evicted."""
        self._leave(blocks)
        self._lru.forget(blocks)

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """The `count` coldest unpinned blocks, by worth or, while it leads, by LRU; or None."""
        if count > len(self) or not self._shadows.leads:
            return self._lru.victims(count, pinned)
        found = self._worth.some(count, pinned)
        if len(found) < count:
            missing = count - len(found)
            waiting = itertools.chain(self._kept.walk(0), [self._used(self._ripe, self._lru.next_stamp)[0]])
            found = np.concatenate((found, some_free(waiting, missing, pinned)))
        return found if len(found) == count else None

    def end(self) -> None:
        """Observes no more requests."""
        self._traffic.rivals.remove(self._asked)
        self._worth.end()

    def _leave(self, blocks: Ids) -> None:
        """Removes the blocks from the order by worth, or from those that wait."""
        old = blocks[self._lru.stamps[blocks] < self._ripe]
        if len(self._kept):
            kept = self._kept.has(old)
            self._kept.remove(old[kept])
            old = old[~kept]
        self._worth.forget(old)

    def _use(self, blocks: Ids, now: float) -> None:
        """The blocks were used just now."""
        stop = self._lru.next_stamp
        start = stop - len(blocks)
        if stop - self._base > len(self._recent):
            waiting = self._recent[self._ripe - self._base : start - self._base]
            self._recent, self._base = np.zeros(2 * (stop - self._ripe) + BATCH_LIMIT, np.int32), self._ripe
            self._recent[: len(waiting)] = waiting
        self._recent[start - self._base : stop - self._base] = blocks
        if stop - self._reported > min(BATCH_LIMIT, int(BATCH_SHARE * len(self))):
            self._go_on(now)

    def _used(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Blocks whose last use has a stamp in [start, stop), and these; start >= `_ripe`."""
        blocks, stamps = self._recent[start - self._base : stop - self._base].astype(np.int64), np.arange(start, stop)
        alive = self._lru.stamps[blocks] == stamps
        return blocks[alive], stamps[alive]

    def _go_on(self, now: float) -> None:
        """Reports new uses to the shadows; blocks that waited enter the order by worth."""
        known, stop = self._blocks, self._lru.next_stamp
        used, stamps = self._used(self._reported, stop)
        self._reported, spread = stop, known.hash[used, 0]
        if len(at := self._shadows.sampled(spread, len(self))):
            used, own = used[at], {"spread": spread[at], "stamp": stamps[at]}
            names = named(known.keys(used), group=known.group[used], used_s=known.last_used[used], **own)
            self._shadows.use(names, now)
        ripe = max(self._ripe, stop - int(WINDOW_SHARE * len(self)))
        blocks, _ = self._used(self._ripe, ripe)
        self._ripe = ripe
        if self._kind is TierKind.NVME:
            durable = known.durable[blocks]
            self._kept.put(blocks[durable], 0)
            blocks = blocks[~durable]
        self._worth.track(blocks, now)
        if len(self._kept):
            gone = self._kept.until(0, self._shadows.horizon, self._lru.stamps)
            self._kept.remove(gone)
            self._worth.track(gone, now)

    def _asked(self, request: SequenceRequest, groups: NDArray[np.uint16], now: float) -> None:
        """A request has come; its blocks are touched after this."""
        if len(at := self._shadows.sampled(request.spread, len(self))[::-1]):
            ids, nearest, spread = request.ids[0][0][at], request.nearest[at], request.spread[at]
            names = named(request.keys[at], spread=spread, group=groups[at], stamp=self._lru.next_stamp, used_s=now)
            names["counts"] = (nearest < 0) | (nearest >= self._kind)
            names["here"] = (ids >= 0) & self._lru.has(np.maximum(ids, 0))
            self._shadows.ask(names, now)
