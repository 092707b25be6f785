"""Moves: batches of blocks on their way between pages and slots, cut into jobs for the lanes.

Purpose: what a lane does with a run of slots, hashing included; what came of it, block by block. Non-purpose: which slot is whose, what is told of it
(`nvme`). Invariants: a block is hashed in the lane that moves it, before its bytes go out or after they came in; a run that fails is tried
slot by slot, so that a bad sector costs one block; rows of a batch belong to one job each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, Semaphore
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierd.core.meta import put_at
from tierd.core.model import BlockStatus, StructArray
from tierd.tiers.calls import HangError, Kind
from tierd.tiers.slots import (
    HEADER_BYTES,
    TABLE_SLICES,
    HeaderPool,
    Headers,
    Payload,
    Run,
    SlotFile,
    SlotIO,
    fill_headers,
    matches,
    read_tables,
    stamp,
    vector,
)
from tierd.tiers.tier import SliceTable

NO_TABLE: SliceTable = np.zeros(0, dtype=np.uint64)


class GoneError(OSError):
    """No fault of the disk's: the segment has ended, or its file has given way."""


@dataclass(frozen=True, slots=True)
class Means:
    """What moves a batch. disk: places for as many calls as are at it at one time; hang_s: for so long a lane waits for one; begin_call: told when it has one. hashing: held by the
    lane that hashes, and prepares what it writes. find_file: the slot file of a segment, or GoneError. store: its id."""

    io: SlotIO
    disk: Semaphore
    hashing: Lock
    hang_s: float
    begin_call: Callable[[], None]
    pool: HeaderPool
    find_file: Callable[[int, Kind], SlotFile]
    store: bytes

    @contextmanager
    def at_disk(self) -> Iterator[None]:
        """Around a call. Raises HangError."""
        if not self.disk.acquire(timeout=self.hang_s):
            raise HangError
        try:
            self.begin_call()
            yield
        finally:
            self.disk.release()


@dataclass(slots=True)
class Batch:
    """One read or write under way. extents: EXTENT [n] with slots' offsets; headers: one per row.

    hash_row: called in a lane when a row is about to be written, for its table, None if its bytes are wrong; or when its bytes have come.
    """

    means: Means
    extents: StructArray
    metas: StructArray
    views: Sequence[memoryview]
    headers: Headers
    hash_row: Callable[[int], SliceTable | None]
    tables: list[SliceTable] = field(init=False)
    statuses: NDArray[np.uint16] = field(init=False)
    files: dict[int, SlotFile] = field(default_factory=dict)
    """Rows to the files that they were written to."""
    came: list[int] = field(default_factory=list)
    """Rows that were read."""
    outcomes: list[bool] = field(default_factory=list)
    """Of each call that counts, in their order: whether the disk did it."""

    def __post_init__(self) -> None:
        self.tables = [NO_TABLE] * len(self.extents)
        self.statuses = np.full(len(self.extents), BlockStatus.FAILED, dtype=np.uint16)

    def payloads(self, run: Run) -> list[Payload]:
        """The pages of a run as the disk wants them."""
        align, lengths = self.means.io.align_bytes, self.extents["length"][list(run.rows)].tolist()
        return [Payload(self.views[row], length=n, align_bytes=align) for row, n in zip(run.rows, lengths, strict=True)]

    def judge(self) -> None:
        """Of what was read: READY where the header is that of the block meant, else CORRUPT."""
        rows = sorted(self.came)
        if not rows:
            return
        found, tables = read_tables(self.headers[rows])
        good = matches(found, self.metas[rows], self.extents[rows], store=self.means.store)
        for row, table, is_its in zip(rows, tables, good.tolist(), strict=True):
            is_good = table is not None and is_its
            self.statuses[row] = BlockStatus.READY if is_good else BlockStatus.CORRUPT
            if table is not None and is_good:
                self.tables[row] = table


class _RunJob:
    """A run of slots, in one call."""

    kind: Kind

    def __init__(self, batch: Batch, run: Run) -> None:
        self._batch, self._run = batch, run

    def run(self) -> Sequence[Self]:
        """As `Job.run`."""
        try:
            return self._move()
        except OSError as error:
            if len(self._run.rows) > 1:
                return self._one_by_one(self._run.rows)
            if not isinstance(error, GoneError):
                self._batch.outcomes.append(False)
            return ()

    def give_up(self) -> None:
        """As `Job.give_up`."""
        self._batch.outcomes.append(False)

    def _move(self) -> Sequence[Self]:
        raise NotImplementedError

    def _one_by_one(self, rows: Sequence[int]) -> list[Self]:
        batch, run = self._batch, self._run
        return [type(self)(batch, run.only(row)) for row in rows]

    def _buffers(self, payloads: Sequence[memoryview], filler: memoryview) -> list[memoryview]:
        headers = [self._batch.headers[row] for row in self._run.rows]
        return vector(headers, payloads, class_bytes=self._run.class_bytes, filler=filler)


class ReadRun(_RunJob):
    """Slots into pages, and hashed there."""

    kind: Kind = "read"

    def _move(self) -> Sequence[Self]:
        batch, run, means = self._batch, self._run, self._batch.means
        payloads = batch.payloads(run)
        buffers = self._buffers([p.buffer for p in payloads], means.pool.waste)
        with means.at_disk():
            done = means.io.read(means.find_file(run.segment, self.kind), run.offset, buffers)
        with means.hashing:
            for i, (row, payload) in enumerate(zip(run.rows, payloads, strict=True)):
                end = i * run.class_bytes + HEADER_BYTES + len(payload.buffer)
                is_there = done >= end  # or the file ends before it
                batch.outcomes.append(is_there)
                if is_there:
                    payload.give()
                    batch.hash_row(row)
                    batch.came.append(row)
        return ()


class HeadRun(_RunJob):
    """Headers of slots alone."""

    kind: Kind = "read"

    def _move(self) -> Sequence[Self]:
        batch, run, means = self._batch, self._run, self._batch.means
        for i, row in enumerate(run.rows):
            at = run.offset + i * run.class_bytes
            with means.at_disk():
                done = means.io.read(means.find_file(run.segment, self.kind), at, [batch.headers[row].data])
            batch.outcomes.append(done == HEADER_BYTES)
            if done == HEADER_BYTES:
                batch.came.append(row)
        return ()


class WriteRun(_RunJob):
    """Pages, hashed, into slots. A block whose bytes are wrong stays out of its slot."""

    kind: Kind = "write"

    def _move(self) -> Sequence[Self]:
        batch, run, means = self._batch, self._run, self._batch.means
        with means.hashing:
            good = [row for row in run.rows if self._is_hashed(row)]
            if len(good) < len(run.rows):
                return self._one_by_one(good)
            rows = list(run.rows)
            buffers = self._prepared(rows)
        with means.at_disk():
            file = means.find_file(run.segment, self.kind)
            batch.files.update(dict.fromkeys(rows, file))
            means.io.write(file, run.offset, buffers)
        batch.statuses[rows] = BlockStatus.READY
        return ()

    def _prepared(self, rows: Sequence[int]) -> list[memoryview]:
        """What is written of rows whose tables are there."""
        batch, run, means = self._batch, self._run, self._batch.means
        tables = [batch.tables[row] for row in rows]
        stamped = stamp(batch.metas.take(rows), batch.extents[rows], tables, store=means.store)
        put_at(batch.metas, rows, stamped)
        fill_headers(batch.headers, rows, stamped, tables)
        return self._buffers([p.take() for p in batch.payloads(run)], means.pool.zeros)

    def _is_hashed(self, row: int) -> bool:
        if not len(self._batch.tables[row]):
            table = self._batch.hash_row(row)
            if table is None:
                self._batch.statuses[row] = BlockStatus.CORRUPT
            if table is None or len(table) > TABLE_SLICES:
                return False
            self._batch.tables[row] = table
        return True
