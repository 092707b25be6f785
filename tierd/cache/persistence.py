"""Bringing blocks onto NVMe for those who were promised that they are there.

Purpose: what "durable" means, for commits, for reserves of blocks that exist already, and for flush. Non-purpose: demotion
(background.py). Invariant: a block counts as durable only after data and journal were synced in this very call, with its page on the
store before the sync began, and held there still after it: a sync that fails for another may lose it. A page of a former life counts only once
it was read: its slot may have been written over before the removal of its block was durable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import structlog

from tierd.cache.examine import Examiner
from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.core.formats.model import UNVERIFIED, BlockStatus, Fault, StructArray, TierKind
from tierd.core.plan import Bools, Committed, Ids, PagesHeld, PutQuery, Reserved
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.tier import Tier, is_stored

log = structlog.get_logger(__name__)

CONFIRM_BLOCKS = 64
"""Read at one time, of what a former life left."""


class Persistence:
    """See the module. examiner: its own, since it reads one batch at a time. loaded: set but while the blocks of a store are on their way into the books."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self.loaded = asyncio.Event()
        self.loaded.set()
        self._examiner, self._examining = Examiner(parts), asyncio.Lock()
        self._core, self._clock, self._flights = parts.core, parts.clock, flights
        self._stored = [t for t in parts.tiers if is_stored(t) and t.spec.kind is TierKind.NVME]

    async def keep_committed(self, committed: Committed, metas: StructArray, *, timeout_s: float) -> None:
        """Makes a commit's blocks, META [n], durable; those that could not be are FAILED in `statuses`."""
        held = committed.statuses != BlockStatus.FAILED
        failed = ~await self.persist(committed.blocks[held], metas[held], timeout_s=timeout_s)
        committed.statuses[np.flatnonzero(held)[failed]] = BlockStatus.FAILED
        self._say(failed)

    async def keep_existing(self, reserved: Reserved, groups: Sequence[PutQuery], *, timeout_s: float) -> None:
        """Makes those blocks of a reserve durable that exist already and so get no commit; else they are FAILED in `statuses`."""
        for group, statuses in zip(groups, reserved.statuses, strict=True):
            rows = np.flatnonzero(statuses == BlockStatus.EXISTS)
            ids = self._core.find_blocks(group.namespace, group.blocks["hash"][rows])
            durable = ids >= 0  # else it has gone since the core said that it exists
            durable[durable] = await self.persist(ids[durable], timeout_s=timeout_s)
            statuses[rows[~durable]] = BlockStatus.FAILED
            self._say(~durable, gone=int((ids < 0).sum()))

    def _say(self, failed: Bools, *, gone: int = 0) -> None:
        """Of blocks that a caller wanted durable; gone: how many were no longer held when that was to be made so."""
        if failed.any():
            writable = [tier.spec.name for tier in self._stored if self._core.is_writable(tier.position)]
            log.warning("blocks not made durable", count=int(failed.sum()), gone=gone, writable_stores=writable)

    async def persist(self, blocks: Ids, metas: StructArray | None = None, *, timeout_s: float) -> Bools:
        """Brings blocks onto NVMe, data and journal synced; bool per block whether it is there.

        metas: NAME or META [n] of what is meant, None for what the ids stand for now: an id whose block goes during an await gets another one.
        """
        durable = np.zeros(len(blocks), dtype=np.bool_)
        if not len(blocks):
            return durable
        metas = self._core.names(blocks) if metas is None else metas
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not self.loaded.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.loaded.wait(), timeout_s)
        await self._confirm(blocks, deadline)
        failpoint("cache.persist.before_write")
        plan = self._core.persist(blocks, now=self._clock.now())
        self._flights.start(plan)
        await self._flights.landed(plan, timeout_s=deadline - asyncio.get_running_loop().time())
        is_same = _same(self._core.names(blocks), metas)
        # Of this moment: a page that a block gets while a sync is under way is not in it.
        written = [(tier, self._core.extents(blocks, tier=tier.position)) for tier in self._stored]
        for tier, pages in written:
            here = is_same & (pages["page"] >= 0) & ~_unread(pages)
            if here.any() and await self._sync(tier, deadline):
                durable |= here & tier.holds(pages)
        return durable

    def losses(self) -> list[int]:
        """How many blocks each store has lost so far, as the books know."""
        return [self._flights.lost[tier.position] for tier in self._stored]

    async def sync(self, *, timeout_s: float, losses: Sequence[int]) -> int:
        """Makes durable what lies on the stores by now, as far as they and the time allow; the bits of the tiers where that went well, and where nothing was lost since
        `losses` said this."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        went_well = await asyncio.gather(*(self._sync(tier, deadline) for tier in self._stored))
        is_kept = [went and now == then for went, now, then in zip(went_well, self.losses(), losses, strict=True)]
        return sum(1 << tier.position for tier, is_whole in zip(self._stored, is_kept, strict=True) if is_whole)

    async def _confirm(self, blocks: Ids, deadline: float) -> None:
        """Reads what a former life left of these blocks; what is not theirs any more is no copy. What time does not suffice for stays unread."""
        for tier in self._stored:
            pages = self._core.extents(blocks, tier=tier.position)
            unread = np.flatnonzero(_unread(pages))
            for rows in np.array_split(unread, -(-len(unread) // CONFIRM_BLOCKS) or 1):
                if len(rows):
                    work = asyncio.ensure_future(self._examine(tier.position, blocks[rows]))
                    await asyncio.wait([work], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _examine(self, tier: int, blocks: Ids) -> None:
        """A read that hangs keeps its turn, and the memory that it reads into, until it comes back."""
        async with self._examining:
            pages = self._core.extents(blocks, tier=tier)
            rows = np.flatnonzero(_unread(pages))
            if not len(rows):
                return
            pages, blocks = pages[rows], blocks[rows]
            faults = await self._examiner.examine(tier, PagesHeld(pages, blocks, np.ones(len(rows), dtype=np.bool_)))
            self._core.verified(pages[faults == Fault.NONE])
            wrong = ((faults == Fault.HEADER) | (faults == Fault.DIGEST)) & self._core.are_held(pages)
            if wrong.any():
                self._flights.start(self._core.evict(blocks[wrong], tier=tier, now=self._clock.now()))

    async def _sync(self, tier: Tier, deadline: float) -> bool:
        if not self._core.is_writable(tier.position):
            return False
        try:
            failpoint("cache.persist.before_sync")
            sync = asyncio.ensure_future(tier.sync())
            sync.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waited may be gone by then
            await asyncio.wait_for(asyncio.shield(sync), max(0.0, deadline - asyncio.get_running_loop().time()))
        except (TierFailed, TimeoutError):
            return False
        return True


def _unread(pages: StructArray) -> Bools:
    """Which of a store's pages were found again and not read since."""
    return np.asarray((pages["page"] >= 0) & ((pages["flags"] & UNVERIFIED) != 0))


def _same(found: StructArray, meant: StructArray) -> Bools:
    """Which rows name the same block."""
    return np.asarray((found["hash"] == meant["hash"]).all(axis=1) & (found["namespace"] == meant["namespace"]))
