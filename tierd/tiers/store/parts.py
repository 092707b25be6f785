"""Reads of blocks in parts: the first layers of all blocks, then the next ones.

The first part of each block comes with its header, whose slice table verifies the parts as they
arrive. `tierd/loads_by_layer.py` divides blocks into parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import BlockStatus
from tierd.tiers.io.calls import Kind
from tierd.tiers.store.moves import Batch, RunJob
from tierd.tiers.store.slots import HEADER_BYTES, SlotRun, join_runs
from tierd.tiers.tier import Parts


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a block's payload. is_first: they come with the header."""

    start: int
    end: int
    is_first: bool


class PartRun(RunJob):
    """Read a span of one block, and hash it."""

    kind: Kind = "read"

    def __init__(self, batch: Batch, run: SlotRun, span: Span) -> None:
        super().__init__(batch, run)
        self._span = span

    def _move(self) -> Sequence[PartRun]:
        batch, means, span, row = self._batch, self._batch.means, self._span, self._run.rows[0]
        offset = self._run.offset if span.is_first else self._run.offset + HEADER_BYTES + span.start
        buffers = [batch.headers[row].data] * span.is_first + [batch.pages[row][span.start : span.end]]
        with means.at_disk():
            done = means.io.read(means.find_file(self._run.segment, self.kind), offset, buffers)
        is_whole = done == sum(map(len, buffers))
        batch.outcomes.append(is_whole)
        if is_whole:
            with means.hashing:
                batch.hash_rows([row])
            batch.came.append(row)
        return ()


async def read_parts(
    batch: Batch,
    rows: NDArray[np.int64],
    parts: Parts,
    *,
    carry: Callable[[Sequence[PartRun]], Awaitable[None]],
    holds: Callable[[], NDArray[np.bool_]],
) -> None:
    """Reads part 0 of these rows, then part 1 of those that have it, and so on.

    carry: runs jobs to their end. holds: which of the batch's rows the store still has.
    """
    begin = np.zeros(len(batch.extents), np.int64)
    for part, end in enumerate(parts.ends.T):
        batch.came, batch.hash_rows = [], partial(parts.arrived, part)
        wanted = rows if part == 0 else rows[end[rows] > begin[rows]]  # short blocks have few parts
        jobs = []
        for run in join_runs(batch.extents[wanted], class_bytes=[0] * len(wanted), most_bytes=0):
            row = int(wanted[run.rows[0]])
            span = Span(int(begin[row]), min(int(end[row]), len(batch.pages[row])), is_first=part == 0)
            jobs.append(PartRun(batch, SlotRun(run.segment, 0, run.offset, (row,)), span))
        await carry(jobs)
        batch.statuses[np.setdiff1d(wanted, batch.came)] = BlockStatus.FAILED
        if part == 0:
            batch.judge(holds())
        rows, begin = rows[batch.statuses[rows] == BlockStatus.READY], end
        parts.landed(part, rows, [batch.tables[row] for row in rows.tolist()])
    batch.statuses[rows[~holds()[rows]]] = BlockStatus.FAILED
