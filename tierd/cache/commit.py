"""Commits in the core and in catalogues: sums of written pages, entries of new blocks.

This is the part of a commit that touches tiers. `puts.py` has its order and its lease; `sealing.py`
copies into sealed pages. Every commit ends in the core, so no page stays busy. The daemon writes
catalogue entries in the step in which the core publishes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.cache.sealing import Sealing
from tierd.checksum import raw_tables, table_digests
from tierd.core.arrays.sets import kinds, some, true_rows
from tierd.core.formats.block import slice_cut
from tierd.core.formats.layout import WORD_BYTES
from tierd.core.formats.meta import picked
from tierd.core.formats.model import BlockStatus, Durability, Fault, Reason, StructArray
from tierd.core.plan import Committed, Committing
from tierd.errors import InvalidArgument, TierFailed
from tierd.tiers.tier import SliceTable, is_mapped, is_shared

log = structlog.get_logger(__name__)

Sums = Callable[[], Awaitable[bytes]]
"""Waits until a commit's pages are written. Returns the bytes of `CommitQuery.sums`."""


@dataclass(frozen=True, slots=True)
class CommitQuery:
    """One Commit call.

    blocks: COMMIT_BLOCK [n], or None for all blocks named in Reserve. lease: whether to pin them.
    keep_open: the reservation's other blocks stay reserved.
    sums: the client's slice tables, u64 values in the order of the blocks. If empty, the daemon
    computes them.
    written: set if pages are still being written; it returns their sums."""

    reservation: int
    blocks: StructArray | None = None
    durability: Durability = Durability.MEMORY
    lease: bool = False
    keep_open: bool = False
    sums: bytes = b""
    written: Sums | None = None


class Publication:
    """The steps of a commit that touch tiers."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._parts, self._flights = parts, flights
        self._sealing = Sealing(parts.mover)

    async def written(self, committing: Committing, query: CommitQuery) -> list[SliceTable] | None:
        """Waits for the writes. Returns the client's sums by block; None: the daemon must compute
        them.

        Raises InvalidArgument for sums that do not fit the blocks. If this raises, the commit is
        withdrawn.
        """
        metas, registry = committing.metas, self._parts.registry
        try:
            metas["layers"] = registry.layers_of(metas["namespace"])
            metas["epoch"] = registry.epochs_of(metas["namespace"])
            metas["time_ms"] = self._parts.clock.wall_ms()
            raw = await query.written() if query.written is not None else query.sums
            return _tables(raw, metas) if raw and self._is_summed(committing) else None
        except BaseException:
            self._flights.start(self._parts.core.withdraw_commit(committing, now=self._parts.clock.now()))
            raise

    def _is_summed(self, committing: Committing) -> bool:
        """Whether the client's sums count: only for mapped pages that the client wrote itself."""
        if some(committing.staging["page"] >= 0):
            return False
        return all(is_mapped(self._parts.tiers[tier]) for tier in kinds(committing.extents["tier"]))

    async def sum(self, committing: Committing, slices: list[SliceTable] | None) -> list[SliceTable] | None:
        """Fills in the metas. Returns the slice tables, or None if bytes cannot be read."""
        metas = committing.metas
        if slices is not None:
            metas["digest"] = table_digests(raw_tables(slices))
        else:
            try:
                made = await self._sealing.sum(committing)
            except Exception as error:  # after any error, the pages must not stay busy
                is_news = not isinstance(error, TierFailed)  # TierFailed is expected: a GPU's process has ended
                log.exception("commit failed", reservation=committing.reservation, reason=str(error), exc_info=is_news)
                return None
            metas["digest"], slices = made.digests, made.slices
        metas["slices"] = [*map(len, slices)]
        return slices

    def publish(self, committing: Committing, query: CommitQuery, slices: Sequence[SliceTable] | None) -> Committed:
        """Ends the commit in the core. `enter` must follow before anything else runs."""
        return self._parts.core.finish_commit(
            committing,
            digests=committing.metas["digest"],
            ok=np.full(len(committing.metas), slices is not None),
            lease=query.lease,
            keep_open=query.keep_open,
            now=self._parts.clock.now(),
        )

    def enter(self, committed: Committed, slices: Sequence[SliceTable]) -> None:
        """Writes catalogue entries of the new blocks. A page without an entry cannot be verified.
        So if this raises, the pages are quarantined."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        extents, metas, tiers = committed.extents, committed.metas, committed.extents["tier"][new]
        try:
            for tier in filter(is_shared, self._parts.tiers):
                rows = new[tiers == tier.position]
                if len(rows):
                    tier.publish(picked(extents, rows), picked(metas, rows), [slices[i] for i in rows.tolist()])
        except BaseException:
            self._flights.condemn(picked(extents, new), Fault.IO)
            raise
        self._announce(committed)

    def _announce(self, committed: Committed) -> None:
        """Reports new blocks to watchers and metrics."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        tiers, reasons = committed.extents["tier"][new], np.full(len(new), Reason.NONE, dtype=np.uint16)
        for position in kinds(tiers):
            name = self._parts.tiers[position].spec.name
            self._parts.metrics.blocks_committed.labels(tier=name).inc(int(np.count_nonzero(tiers == position)))
        self._flights.announce(picked(committed.metas, new), tiers, reasons)


def _tables(raw: bytes, metas: StructArray) -> list[SliceTable]:
    """A client's sums, by block. metas: META [n] with their layers. Raises InvalidArgument."""
    cuts = map(slice_cut, metas["stored_length"].tolist(), metas["layers"].tolist())
    counts = [cut.pieces * cut.layers for cut in cuts]
    if len(raw) != WORD_BYTES * sum(counts):
        raise InvalidArgument(
            f"commit.sums: {len(raw)} bytes, but the {len(metas)} blocks have {sum(counts)} slices, {WORD_BYTES} bytes each; "
            "send one checksum per slice, or none"
        )
    sums = np.frombuffer(raw, "<u8")
    if counts.count(counts[0]) == len(counts):
        return list(sums.reshape(len(counts), counts[0]))
    return np.split(sums, np.cumsum(counts)[:-1])
