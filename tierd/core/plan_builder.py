"""A plan while it is being made.

It collects the decisions of one step of the core, in order. If a step reserves a page and frees it
again, the plan omits it: no other part has seen it.
"""

from __future__ import annotations

import numpy as np

from tierd.core.arrays.sets import among, distinct
from tierd.core.formats.meta import joined
from tierd.core.formats.model import SegmentAssignment, StructArray
from tierd.core.plan import NO_EXTENTS, NO_TRANSFERS, NO_WAITS, NONE_FREED, Ids, Lengths, Plan, TransferIds


class PlanBuilder:
    """Collects the arrays of a plan. now: the time of the step. limit_bytes: that it may bring."""

    def __init__(self, now: float, limit_bytes: int | None = None) -> None:
        self.now, self._left_bytes, self._is_short = now, limit_bytes, False
        self._retired: list[StructArray] = []
        self._freed: list[StructArray] = []
        self._reserved: list[StructArray] = []
        self._transfers: list[StructArray] = []
        self._waits: list[TransferIds] = []
        self._segments: list[SegmentAssignment] = []

    def allowed(self, lengths: Lengths) -> int:
        """How many of the blocks with these lengths, in order, the limit permits."""
        if self._left_bytes is None:
            return len(lengths)
        count = int((np.cumsum(lengths, dtype=np.int64) <= self._left_bytes).sum())
        self._is_short |= count < len(lengths)
        return count

    def take(self, lengths: Lengths) -> None:
        """Counts blocks that were brought against the limit."""
        if self._left_bytes is not None:
            self._left_bytes -= int(lengths.sum(dtype=np.int64))

    def retire(self, extents: StructArray) -> None:
        """EXTENT of pinned pages that lookups no longer find."""
        self._retired.append(extents)

    def free(self, records: StructArray) -> None:
        """FREED records."""
        self._freed.append(records)

    def rank(self, ranks: Ids, *, candidates: int) -> None:
        """Says of the last FREED records which of the candidates they were, from 0, the coldest."""
        self._freed[-1]["rank"], self._freed[-1]["candidates"] = ranks + 1, candidates

    def reserve(self, extents: StructArray) -> None:
        """EXTENT of reserved pages."""
        self._reserved.append(extents)

    def begin(self, assignment: SegmentAssignment) -> None:
        """A segment begins."""
        self._segments.append(assignment)

    def transfer(self, records: StructArray) -> None:
        """TRANSFER records, after those that they depend on."""
        self._transfers.append(records)

    def wait(self, ids: TransferIds) -> None:
        """Transfers of earlier plans."""
        self._waits.append(ids)

    def plan(self) -> Plan:
        """The collected plan."""
        reserved = joined(self._reserved) if self._reserved else NO_EXTENTS
        freed = joined(self._freed) if self._freed else NONE_FREED
        if len(reserved) and len(freed):  # pages in both were never seen outside
            old, new = freed["extent"]["generation"], reserved["generation"]
            if old.max() >= new.min():
                reserved, freed = reserved[~among(new, old)], freed[~among(old, new)]
        transfers = joined(self._transfers) if self._transfers else NO_TRANSFERS
        waits = np.concatenate(self._waits) if self._waits else NO_WAITS
        if len(waits):
            waits = distinct(waits[~among(waits, transfers["id"])])
        retired = joined(self._retired) if self._retired else NO_EXTENTS
        return Plan(freed, self._segments, reserved, transfers, waits, retired, self._is_short)


def no_ids() -> Ids:
    """An empty array of ids."""
    return np.zeros(0, np.int64)
