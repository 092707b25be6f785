"""What a commit does to bytes and catalogues: sums of what was written, entries of what is new.

Purpose: what of a commit touches tiers. Non-purpose: its order, its lease (cache.py), copies into sealed pages
(sealing.py). Invariants: whatever fails,
the commit goes on to its end, so that no page stays busy; entries are made in the step in which the core publishes; what is answered before that step ends is what the
core says in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from tierd.cache.flights import Flights
from tierd.cache.parts import Parts
from tierd.cache.sealing import Sealing
from tierd.core.block import slice_cut
from tierd.core.layout import WORD_BYTES
from tierd.core.meta import picked
from tierd.core.model import BlockStatus, Durability, Reason, StructArray
from tierd.core.plan import Committed, Committing, Plan
from tierd.core.sets import kinds, some, true_rows
from tierd.errors import InvalidArgument, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.checksum import raw_tables, table_digests
from tierd.tiers.tier import SliceTable, is_mapped, is_shared

log = structlog.get_logger(__name__)

Foresee = Callable[[Committed], Callable[[], None]]
"""Takes what a commit is going to answer, but for the blocks' ids, and gives what answers so."""
Sums = Callable[[], Awaitable[bytes]]
"""Waits until a commit's pages are written, and gives what `CommitQuery.sums` is."""


@dataclass(frozen=True, slots=True)
class CommitQuery:
    """What is to be committed. blocks: COMMIT_BLOCK [n], or None for all as they were named in Reserve. lease: whether to pin it. keep_open: other blocks of the reservation
    stay reserved. sums: its writer's slice tables, u64 after u64 in the order of the blocks; empty: the daemon makes
    them. written: its pages are still to be written, and
    their sums come then."""

    reservation: int
    blocks: StructArray | None = None
    durability: Durability = Durability.MEMORY
    lease: bool = False
    keep_open: bool = False
    sums: bytes = b""
    written: Sums | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A commit whose pages are written. slices: its writer's sums; None: the daemon has to make them. answer:
    answers it, where what it comes to can be known."""

    slices: list[SliceTable] | None
    answer: Callable[[], None] | None


class Publication:
    """See the module."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._parts, self._flights = parts, flights
        self._sealing = Sealing(parts.mover)

    async def await_written(self, committing: Committing, query: CommitQuery, foresee: Foresee | None) -> Written:
        """When this returns what is committed is written. Where it raises, the commit is as if it had not begun.
        Raises InvalidArgument for sums that are not the blocks'."""
        try:
            answer = self._prepared(committing, query, foresee)
            raw = await query.written() if query.written is not None else query.sums
            slices = _tables(raw, committing.metas) if raw and self._is_summed(committing) else None
        except BaseException:
            self._flights.start(self._parts.core.withdraw_commit(committing, now=self._parts.clock.now()))
            raise
        return Written(slices, answer)

    def _is_summed(self, committing: Committing) -> bool:
        """Whether its writer's sums count: of pages of memory that he wrote himself."""
        if some(committing.staging["page"] >= 0):
            return False
        return all(is_mapped(self._parts.tiers[tier]) for tier in kinds(committing.extents["tier"]))

    def _prepared(
        self, committing: Committing, query: CommitQuery, foresee: Foresee | None
    ) -> Callable[[], None] | None:
        """Does the part of a commit that needs no sums, while the client writes."""
        metas, registry, core = committing.metas, self._parts.registry, self._parts.core
        metas["layers"] = registry.layers_of(metas["namespace"])
        metas["epoch"] = registry.epochs_of(metas["namespace"])
        metas["time_ms"] = self._parts.clock.wall_ms()
        is_plain = query.durability is Durability.MEMORY and not query.lease
        if not core.is_new(committing) or not is_plain or foresee is None:
            return None
        return foresee(_foreseen(committing))

    async def sum(self, committing: Committing, written: Written) -> list[SliceTable] | None:
        """Fills in what metas lack; the blocks' slice tables, or None if their bytes cannot be had."""
        metas, slices = committing.metas, written.slices
        if slices is not None:
            metas["digest"] = table_digests(raw_tables(slices))
        else:
            try:
                made = await self._sealing.sum(committing)
            except Exception as error:  # whatever it is, the pages must not stay busy
                is_news = not isinstance(error, TierFailed)  # a GPU's process has ended
                log.exception("commit failed", reservation=committing.reservation, reason=str(error), exc_info=is_news)
                return None
            metas["digest"], slices = made.digests, made.slices
        metas["slices"] = [*map(len, slices)]
        return slices

    def publish(
        self,
        committing: Committing,
        query: CommitQuery,
        slices: Sequence[SliceTable] | None,
        written: Written,
    ) -> Committed:
        """In core and catalogue, in one step. Where the core will say READY of all, entries and answer come first: what it does takes longer than both, and nobody can look meanwhile."""
        core = self._parts.core
        core.catch_up()  # a policy that fails does so before anything is answered
        is_foreseen = slices is not None and core.is_new(committing)
        try:
            if slices is not None and is_foreseen:
                self._enter(_foreseen(committing), slices)
                if written.answer is not None:
                    written.answer()
                failpoint("cache.commit.before_books")
        finally:
            committed = core.finish_commit(
                committing,
                digests=committing.metas["digest"],
                ok=np.full(len(committing.metas), slices is not None),
                lease=query.lease,
                keep_open=query.keep_open,
                now=self._parts.clock.now(),
            )
        if slices is not None and not is_foreseen:
            self._enter(committed, slices)
        self._announce(committed)
        return committed

    def _enter(self, committed: Committed, slices: Sequence[SliceTable]) -> None:
        """Catalogue entries of what is new."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        extents, metas, tiers = committed.extents, committed.metas, committed.extents["tier"][new]
        for tier in filter(is_shared, self._parts.tiers):
            rows = new[tiers == tier.position]
            if len(rows):
                tier.publish(picked(extents, rows), picked(metas, rows), [slices[i] for i in rows.tolist()])

    def _announce(self, committed: Committed) -> None:
        """Tells watchers and metrics of what is new."""
        new = true_rows(committed.statuses == BlockStatus.READY)
        tiers, reasons = committed.extents["tier"][new], np.full(len(new), Reason.NONE, dtype=np.uint16)
        for position in kinds(tiers):
            name = self._parts.tiers[position].spec.name
            self._parts.metrics.blocks_committed.labels(tier=name).inc(int(np.count_nonzero(tiers == position)))
        self._flights.announce(picked(committed.metas, new), tiers, reasons)


def _tables(raw: bytes, metas: StructArray) -> list[SliceTable]:
    """A writer's sums, by block. metas: META [n] with their layers. Raises InvalidArgument."""
    cuts = map(slice_cut, metas["stored_length"].tolist(), metas["layers"].tolist())
    counts = [cut.pieces * cut.layers for cut in cuts]
    if len(raw) != WORD_BYTES * sum(counts):
        raise InvalidArgument(
            f"commit.sums: {len(raw)} bytes, but the {len(metas)} blocks have {sum(counts)} slices, {WORD_BYTES} bytes each; "
            "sum the slices that their namespace's layers give, or send no sums"
        )
    sums = np.frombuffer(raw, "<u8")
    if counts.count(counts[0]) == len(counts):
        return list(sums.reshape(len(counts), counts[0]))
    return np.split(sums, np.cumsum(counts)[:-1])


def _foreseen(committing: Committing) -> Committed:
    """What becomes of a commit all of which is new, but for its ids."""
    count = len(committing.metas)
    statuses, ids = np.full(count, BlockStatus.READY, np.uint16), np.full(count, -1, np.int64)
    return Committed(statuses, committing.extents, ids, committing.metas, 0, Plan())
