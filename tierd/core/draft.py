"""A plan while it is being made.

Purpose: collects what one step of the core decides, in order. Non-purpose: deciding. A page that was set aside and taken back within
the step leaves no trace: nobody outside has seen it.
"""

from __future__ import annotations

import numpy as np

from tierd.core.model import SegmentAssignment, StructArray
from tierd.core.plan import NO_EXTENTS, NO_TRANSFERS, NO_WAITS, NONE_FREED, Ids, Plan, TransferIds
from tierd.core.sets import among, distinct


class Draft:
    """Arrays of a plan, part by part. now: the time of the step."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._freed: list[StructArray] = []
        self._reserved: list[StructArray] = []
        self._transfers: list[StructArray] = []
        self._waits: list[TransferIds] = []
        self._segments: list[SegmentAssignment] = []

    def free(self, records: StructArray) -> None:
        """FREED records."""
        self._freed.append(records)

    def reserve(self, extents: StructArray) -> None:
        """EXTENT of pages set aside."""
        self._reserved.append(extents)

    def begin(self, assignment: SegmentAssignment) -> None:
        """A segment begins a life."""
        self._segments.append(assignment)

    def transfer(self, records: StructArray) -> None:
        """TRANSFER records, after those that they follow."""
        self._transfers.append(records)

    def wait(self, ids: TransferIds) -> None:
        """Transfers of earlier plans."""
        self._waits.append(ids)

    def plan(self) -> Plan:
        """What was collected."""
        reserved, freed = _joined(self._reserved, NO_EXTENTS), _joined(self._freed, NONE_FREED)
        if len(reserved) and len(freed):  # what was both, nobody ever saw
            old, new = freed["extent"]["generation"], reserved["generation"]
            if old.max() >= new.min():
                reserved, freed = reserved[~among(new, old)], freed[~among(old, new)]
        transfers = _joined(self._transfers, NO_TRANSFERS)
        waits = _joined(self._waits, NO_WAITS)
        if len(waits):
            waits = distinct(waits[~among(waits, transfers["id"])])
        return Plan(freed, self._segments, reserved, transfers, waits)


def _joined(parts: list[StructArray], none: StructArray) -> StructArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else none


def no_ids() -> Ids:
    """An empty array of ids."""
    return np.zeros(0, np.int64)
