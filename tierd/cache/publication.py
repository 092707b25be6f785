"""What a commit does to bytes and catalogues: sums of what was written, entries of what is new.

Purpose: what of a commit touches tiers. Non-purpose: its order, its lease (cache.py), hashing itself (sealing.py, ahead.py, mover.py). Invariants: whatever fails,
the commit goes on to its end, so that no page stays busy; entries are made in the step in which the core publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from tierd.cache.ahead import Ahead
from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.cache.sealing import Sealing
from tierd.core.meta import picked
from tierd.core.model import BlockStatus, Durability, Reason, StructArray
from tierd.core.plan import Committed, Committing
from tierd.core.sets import true_rows
from tierd.errors import TierFailed
from tierd.tiers.tier import SliceTable, is_shared

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CommitQuery:
    """What is to be committed. blocks: COMMIT_BLOCK [n], or None for all as they were named in Reserve. lease: whether to pin it. keep_open: other blocks of the reservation
    stay reserved. unwritten: not before the session has said that all of it is written. word: of the session's board, from 1, on which it says how far it is; 0: none."""

    reservation: int
    blocks: StructArray | None = None
    durability: Durability = Durability.MEMORY
    lease: bool = False
    keep_open: bool = False
    unwritten: bool = False
    word: int = 0


class Publication:
    """See the module."""

    def __init__(self, parts: Parts, ahead: Ahead, flights: Flights) -> None:
        self._parts, self._ahead, self._flights = parts, ahead, flights
        self._sealing = Sealing(parts.mover, ahead)

    async def written(self, committing: Committing, query: CommitQuery) -> None:
        """When this returns what is committed is written; if the session does not say so, the commit is as if it had not begun."""
        if not query.unwritten:
            return
        try:
            await self._ahead.written(committing, word=query.word)
        except BaseException:
            self._flights.start(self._parts.core.withdraw_commit(committing, now=self._parts.clock.now()))
            raise

    async def hash(self, committing: Committing) -> list[SliceTable] | None:
        """Fills in what metas lack; the blocks' slice tables, or None if their bytes cannot be had."""
        metas, registry = committing.metas, self._parts.registry
        try:
            metas["layers"] = registry.layers_of(metas["namespace"])
            metas["epoch"] = registry.epochs_of(metas["namespace"])
            metas["time_ms"] = self._parts.clock.wall_ms()
            hashed = await self._sealing.hash(committing)
        except Exception as error:  # whatever it is, the pages must not stay busy
            self._ahead.give_up(committing)
            is_news = not isinstance(error, TierFailed)  # a GPU's process has ended
            log.exception("commit failed", reservation=committing.reservation, reason=str(error), exc_info=is_news)
            return None
        metas["digest"], metas["slices"] = hashed.digests, [*map(len, hashed.slices)]
        return hashed.slices

    def publish(self, committed: Committed, metas: StructArray, slices: Sequence[SliceTable]) -> None:
        """Catalogue entries of what is new, in the same step as the core's publication."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        tiers = committed.extents["tier"][new]
        for tier in filter(is_shared, self._parts.tiers):
            rows = new[tiers == tier.position]
            if len(rows):
                tier.publish(picked(committed.extents, rows), picked(metas, rows), [slices[i] for i in rows.tolist()])
                self._parts.metrics.blocks_committed.labels(tier=tier.spec.name).inc(len(rows))
        reasons = np.full(len(new), Reason.NONE, dtype=np.uint16)
        self._flights.announce(picked(metas, new), tiers, reasons)
