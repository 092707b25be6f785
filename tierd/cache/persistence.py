"""Brings blocks onto NVMe for durable commits, durable reserves of existing blocks, and flush.

A block counts as durable only if this call synced data and journal, and its page was on the store
before the sync. The store must still hold the page after the sync, since a failed sync for another
call may lose it. A page of an earlier run counts only after it was read. Its slot may have been
overwritten before the removal of its block was durable. Demotion is in background.py.
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
from tierd.core.formats.model import UNVERIFIED, BlockStatus, Fault, StructArray
from tierd.core.plan import Bools, Committed, Ids, PagesHeld, PutQuery, Reserved
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.tier import Tier, is_stored

log = structlog.get_logger(__name__)

CONFIRM_BLOCKS = 64
"""Pages of an earlier run that are read at a time."""


class Persistence:
    """The steps of durable calls.

    examiner: this object's own, since it reads one batch at a time.
    loaded: cleared while a store's blocks are being loaded.
    """

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self.loaded = asyncio.Event()
        self.loaded.set()
        self._examiner, self._examining = Examiner(parts), asyncio.Lock()
        self._core, self._clock, self._flights = parts.core, parts.clock, flights
        self._stored = [t for t in parts.tiers if is_stored(t) and t.spec.is_durable]

    async def keep_committed(self, committed: Committed, metas: StructArray, *, timeout_s: float) -> None:
        """Makes a commit's blocks, META [n], durable. Others are FAILED in `statuses`."""
        held = committed.statuses != BlockStatus.FAILED
        failed = ~await self.persist(committed.blocks[held], metas[held], timeout_s=timeout_s)
        committed.statuses[np.flatnonzero(held)[failed]] = BlockStatus.FAILED
        self._say(failed)

    async def keep_existing(self, reserved: Reserved, groups: Sequence[PutQuery], *, timeout_s: float) -> None:
        """Makes a reserve's existing blocks durable: they get no commit. Others become FAILED."""
        for group, statuses in zip(groups, reserved.statuses, strict=True):
            rows = np.flatnonzero(statuses == BlockStatus.EXISTS)
            ids = self._core.find_blocks(group.namespace, group.blocks["hash"][rows])
            durable = ids >= 0  # a missing one was freed since the core found it
            durable[durable] = await self.persist(ids[durable], timeout_s=timeout_s)
            statuses[rows[~durable]] = BlockStatus.FAILED
            self._say(~durable, gone=int((ids < 0).sum()))

    def _say(self, failed: Bools, *, gone: int = 0) -> None:
        """Logs blocks that could not be made durable. gone: those that were freed before."""
        if failed.any():
            writable = [tier.spec.name for tier in self._stored if self._core.is_writable(tier.position)]
            log.warning("blocks not made durable", count=int(failed.sum()), gone=gone, writable_stores=writable)

    async def persist(self, blocks: Ids, metas: StructArray | None = None, *, timeout_s: float) -> Bools:
        """Brings blocks onto NVMe, and syncs data and journal. True per durable block.

        metas: NAME or META [n] of the wanted blocks; None: the ids' present ones. During an await,
        an id may pass to another block.
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
        await self._write(blocks, deadline)
        if (plain := self._core.are_plain(blocks)).any():  # their encodings turned out too long
            await self._write(blocks[plain], deadline)
        is_same = _same(self._core.names(blocks), metas)
        # Taken now: a page that a block gets while a sync runs is not part of it.
        written = [(tier, self._core.extents(blocks, tier=tier.position)) for tier in self._stored]
        for tier, pages in written:
            here = is_same & (pages["page"] >= 0) & ~_unread(pages)
            if here.any() and await self._sync(tier, deadline):
                durable |= here & tier.holds(pages)
        return durable

    async def _write(self, blocks: Ids, deadline: float) -> None:
        plan = self._core.persist(blocks, now=self._clock.now())
        self._flights.start(plan)
        await self._flights.landed(plan, timeout_s=deadline - asyncio.get_running_loop().time())

    def losses(self) -> list[int]:
        """Blocks that each store has lost so far, as counted by `Flights`."""
        return [self._flights.lost[tier.position] for tier in self._stored]

    async def sync(self, *, timeout_s: float, losses: Sequence[int]) -> int:
        """Syncs the stores, as far as they and the timeout allow. Returns the bits of the tiers
        whose sync succeeded and which lost nothing since `losses` was taken."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        went_well = await asyncio.gather(*(self._sync(tier, deadline) for tier in self._stored))
        is_kept = [went and now == then for went, now, then in zip(went_well, self.losses(), losses, strict=True)]
        return sum(1 << tier.position for tier, is_whole in zip(self._stored, is_kept, strict=True) if is_whole)

    async def _confirm(self, blocks: Ids, deadline: float) -> None:
        """Reads the pages of these blocks that an earlier run left, and evicts wrong ones. Pages
        not read by the deadline stay unread."""
        for tier in self._stored:
            pages = self._core.extents(blocks, tier=tier.position)
            unread = np.flatnonzero(_unread(pages))
            for rows in np.array_split(unread, -(-len(unread) // CONFIRM_BLOCKS) or 1):
                if len(rows):
                    work = asyncio.ensure_future(self._examine(tier.position, blocks[rows]))
                    await asyncio.wait([work], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _examine(self, tier: int, blocks: Ids) -> None:
        """Examines unread pages. A hanging read keeps the lock and its memory until it returns."""
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
            sync.add_done_callback(lambda done: done.cancelled() or done.exception())  # the waiter may be gone by then
            await asyncio.wait_for(asyncio.shield(sync), max(0.0, deadline - asyncio.get_running_loop().time()))
        except (TierFailed, TimeoutError):
            return False
        return True


def _unread(pages: StructArray) -> Bools:
    """Which of a store's pages were recovered and not read since."""
    return np.asarray((pages["page"] >= 0) & ((pages["flags"] & UNVERIFIED) != 0))


def _same(found: StructArray, meant: StructArray) -> Bools:
    """Which rows name the same block."""
    return np.asarray((found["hash"] == meant["hash"]).all(axis=1) & (found["namespace"] == meant["namespace"]))
