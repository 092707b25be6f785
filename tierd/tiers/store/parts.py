"""Reads of blocks in parts: the first layers of all blocks, then the next ones.

The first part of each block comes with its header, whose slice table verifies the parts as they
arrive. `tierd/loads_by_layer.py` divides blocks into parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """Read a span of one block, and hash it. came: the rows that came."""

    kind: Kind = "read"

    def __init__(self, batch: Batch, run: SlotRun, span: Span, *, arrived: Callable[[Sequence[int]], object]) -> None:
        super().__init__(batch, run)
        self._span, self._arrived = span, arrived
        self.has_come = False

    @property
    def row(self) -> int:
        """Of the batch."""
        return self._run.rows[0]

    def _move(self) -> Sequence[PartRun]:
        batch, means, span, row = self._batch, self._batch.means, self._span, self.row
        offset = self._run.offset if span.is_first else self._run.offset + HEADER_BYTES + span.start
        buffers = [batch.headers[row].data] * span.is_first + [batch.pages[row][span.start : span.end]]
        with means.at_disk():
            done = means.io.read(means.find_file(self._run.segment, self.kind), offset, buffers)
        self.has_come = done == sum(map(len, buffers))
        batch.outcomes.append(self.has_come)
        if self.has_come:
            with means.hashing:
                self._arrived([row])
        return ()


async def read_parts(
    batch: Batch,
    rows: NDArray[np.int64],
    parts: Parts,
    *,
    carry: Callable[[Sequence[PartRun]], Coroutine[Any, Any, None]],
    holds: Callable[[], NDArray[np.bool_]],
) -> None:
    """Reads part 0 of these rows, then part 1, and so on. A part begins while the one before ends, so
    that the disk's queue stays full.

    carry: runs jobs to their end. holds: which of the batch's rows the store still has.
    """
    count = parts.ends.shape[1]
    jobs = [_jobs(batch, rows, parts, part) for part in range(count)]
    running = [asyncio.create_task(carry(some)) for some in jobs[:2]]
    try:
        for part in range(count):
            await running[part]
            if part + 2 < count:
                running.append(asyncio.create_task(carry(jobs[part + 2])))
            late = [job.row for job in jobs[part] if not job.has_come]
            if part == 0:
                batch.came = [job.row for job in jobs[0] if job.has_come]
                batch.judge(holds())
            batch.statuses[late] = BlockStatus.FAILED
            rows = rows[batch.statuses[rows] == BlockStatus.READY]
            parts.landed(part, rows, [batch.tables[row] for row in rows.tolist()])
    finally:
        await asyncio.wait(running)  # no thread uses the pages any more
    batch.statuses[rows[~holds()[rows]]] = BlockStatus.FAILED


def _jobs(batch: Batch, rows: NDArray[np.int64], parts: Parts, part: int) -> list[PartRun]:
    """Reads of one part, by their place on the disk; blocks that are too short have none."""
    ends = parts.ends[:, part]
    begins = parts.ends[:, part - 1] if part else np.zeros_like(ends)
    rows = rows if part == 0 else rows[ends[rows] > begins[rows]]
    jobs = []
    for run in join_runs(batch.extents[rows], class_bytes=[0] * len(rows), most_bytes=0):
        row = int(rows[run.rows[0]])
        span = Span(int(begins[row]), min(int(ends[row]), len(batch.pages[row])), is_first=part == 0)
        slot = SlotRun(run.segment, 0, run.offset, (row,))
        jobs.append(PartRun(batch, slot, span, arrived=partial(parts.arrived, part)))
    return jobs
