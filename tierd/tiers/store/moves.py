"""Moves: batches of blocks between pages and slots, cut into jobs for the lanes.

A lane moves and hashes a run of slots, and records the outcome of each block. `nvme` maps slots and
adds records.

A block is READY only when a lane has hashed its bytes. Reads are hashed after they arrive. Writes
are hashed during the write if the slice table, which the header needs, is known, else before it. A
run that fails is retried slot by slot, so that a bad sector costs one block. Each row of a batch
belongs to one job.

A batch may be read in parts: the first layers of all blocks, then the next ones. The first part of
each block comes with its header, whose slice table verifies the parts as they arrive. One call
reads and sums pieces of several blocks. A piece that fails costs its block alone.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.meta import picked, put_at
from tierd.core.formats.model import BlockStatus, StructArray
from tierd.tiers.io.calls import Calls, HangError, Kind, outlast
from tierd.tiers.io.turns import Turns
from tierd.tiers.store.slots import (
    HEADER_BYTES,
    RUN_BYTES,
    TABLE_SLICES,
    HeaderPool,
    Headers,
    SlotFile,
    SlotIO,
    SlotRun,
    fill_headers,
    join_runs,
    matches,
    read_tables,
    stamp,
    vector,
)
from tierd.tiers.tier import HashRows, Parts, SliceTable

NO_TABLE: SliceTable = np.zeros(0, dtype=np.uint64)


def no_hash(rows: Sequence[int]) -> list[None]:
    """The `Batch.hash_rows` of a caller that needs no hashes."""
    return [None] * len(rows)


class GoneError(OSError):
    """Not a fault of the disk: the segment has ended, or its file was replaced."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means to move batches in one direction. turns: at the disk; hang_s: longest wait for one.
    begin_call: called when the lane has its turn. hashing: held while a lane hashes.
    find_file: the slot file of a segment, or GoneError. store: its id."""

    kind: Kind
    io: SlotIO
    turns: Turns
    hashing: Lock
    hang_s: float
    begin_call: Callable[[], None]
    pool: HeaderPool
    find_file: Callable[[int, Kind], SlotFile]
    store: bytes

    @contextmanager
    def at_disk(self) -> Iterator[None]:
        """Hold a turn during a call. Raises HangError."""
        if not self.turns.take(self.kind, timeout_s=self.hang_s):
            raise HangError
        try:
            self.begin_call()
            yield
        finally:
            self.turns.give(self.kind)


@dataclass(slots=True)
class Batch:
    """One read or write in flight. extents: EXTENT [n] with slots' offsets; headers: one per row.

    pages: a view per row, from `whole_pages`.
    hash_rows: called in a lane for rows read or being written; the tables, None if bytes are wrong.
    known: the tables of rows to be written, if known.
    """

    means: Means
    extents: StructArray
    metas: StructArray
    pages: Sequence[memoryview]
    headers: Headers
    hash_rows: HashRows
    known: Sequence[SliceTable | None] = ()
    tables: list[SliceTable] = field(init=False)
    statuses: NDArray[np.uint16] = field(init=False)
    files: dict[int, SlotFile] = field(default_factory=dict)
    """The file that each row was written to."""
    came: list[int] = field(default_factory=list)
    """Rows that were read."""
    outcomes: list[bool] = field(default_factory=list)
    """For each counted call, in order: whether it succeeded."""
    went: list[int] = field(default_factory=list)
    """Rows that were written, with right or wrong bytes."""
    unverified: list[int] = field(default_factory=list)
    """Rows with a known table, until all of their bytes were hashed."""
    wrong: list[int] = field(default_factory=list)
    """Rows whose bytes do not match their table."""
    fault: str = ""
    """The error of the last failed call."""

    def __post_init__(self) -> None:
        known = self.known or [None] * len(self.extents)
        self.tables = [NO_TABLE if table is None or len(table) > TABLE_SLICES else table for table in known]
        self.statuses = np.full(len(self.extents), BlockStatus.FAILED, dtype=np.uint16)

    def jobs(
        self, job: type[ReadRun | HeadRun | WriteRun], rows: NDArray[np.int64], classes: Sequence[int], *, depth: int
    ) -> list[RunJob | VerifyJob]:
        """A job per run of slots of these rows. If tables are known, also a `VerifyJob` after the
        first calls, and the headers of its rows are filled here at once.

        classes: bytes of each row's slot; depth: calls at the disk at one time.
        """
        names = rows.tolist()
        runs = join_runs(self.extents[rows], class_bytes=classes, most_bytes=RUN_BYTES[job.kind])
        jobs: list[RunJob | VerifyJob] = [
            job(self, replace(run, rows=tuple(names[i] for i in run.rows))) for run in runs
        ]
        self.unverified = [row for row in names if len(self.tables[row])]
        if self.unverified:
            self.stamp(self.unverified)
            jobs.insert(depth, VerifyJob(self, list(self.unverified)))
        return jobs

    def stamp(self, rows: Sequence[int]) -> None:
        """Fill the headers of rows that have their tables."""
        tables = [self.tables[row] for row in rows]
        stamped = stamp(self.metas.take(rows), self.extents[rows], tables, store=self.means.store)
        put_at(self.metas, rows, stamped)
        fill_headers(self.headers, rows, stamped, tables)

    def conclude(self, calls: Calls) -> None:
        """Counts the outcomes. After a write, unverified rows are FAILED, wrong ones CORRUPT."""
        self.statuses[self.unverified] = BlockStatus.FAILED
        self.statuses[self.wrong] = BlockStatus.CORRUPT
        while self.outcomes:  # lanes may add to it meanwhile
            if not self.outcomes.pop(0):
                calls.fail(self.means.kind, self.fault)
            elif self.means.kind == "read":
                calls.unread = 0

    def note_hang(self) -> None:
        """A job is given up."""
        self.fault = "the disk hangs"
        self.outcomes.append(False)

    def judge(self, held: NDArray[np.bool_]) -> None:
        """After a read: READY if the header is the expected block's, else CORRUPT. held: bool [n],
        rows that the store still holds; others stay FAILED."""
        rows = np.sort(np.array(self.came, dtype=np.int64))
        rows = rows[held[rows]]
        if not len(rows):
            return
        found, tables = read_tables(self.headers if len(rows) == len(self.headers) else self.headers[rows])
        good = matches(found, picked(self.metas, rows), picked(self.extents, rows), store=self.means.store)
        good &= [table is not None for table in tables]
        self.statuses[rows] = np.where(good, BlockStatus.READY, BlockStatus.CORRUPT)
        for row, table, is_good in zip(rows.tolist(), tables, good.tolist(), strict=True):
            if table is not None and is_good:
                self.tables[row] = table


class RunJob:
    """A run of slots, in one call."""

    kind: Kind

    def __init__(self, batch: Batch, run: SlotRun) -> None:
        self._batch, self._run = batch, run

    def run(self) -> Sequence[Self]:
        """As `Job.run`."""
        try:
            return self._move()
        except OSError as error:
            if len(self._run.rows) > 1:
                return self._one_by_one(self._run.rows)
            self._batch.fault = str(error)
            if not isinstance(error, GoneError):
                self._batch.outcomes.append(False)
            return ()

    def give_up(self) -> None:
        """As `Job.give_up`."""
        self._batch.note_hang()

    def _move(self) -> Sequence[Self]:
        raise NotImplementedError

    def _one_by_one(self, rows: Sequence[int]) -> list[Self]:
        batch, run = self._batch, self._run
        return [type(self)(batch, run.only(row)) for row in rows]

    def _buffers(self, filler: memoryview) -> list[memoryview]:
        return vector(self._run, self._batch.headers, self._batch.pages, filler=filler)


class ReadRun(RunJob):
    """Read slots into pages and hash them."""

    kind: Kind = "read"

    def _move(self) -> Sequence[Self]:
        batch, run, means = self._batch, self._run, self._batch.means
        buffers = self._buffers(means.pool.waste)
        with means.at_disk():
            done = means.io.read(means.find_file(run.segment, self.kind), run.offset, buffers)
        ends = [i * run.class_bytes + HEADER_BYTES + len(batch.pages[row]) for i, row in enumerate(run.rows)]
        came = [row for row, end in zip(run.rows, ends, strict=True) if done >= end]  # else the file ends before it
        batch.outcomes += [True] * len(came) + [False] * (len(ends) - len(came))
        with means.hashing:
            batch.hash_rows(came)
        batch.came += came
        return ()


class HeadRun(RunJob):
    """Read only the headers of slots."""

    kind: Kind = "read"

    def _move(self) -> Sequence[Self]:
        batch, run, means, came = self._batch, self._run, self._batch.means, list[int]()
        for i, row in enumerate(run.rows):
            at = run.offset + i * run.class_bytes
            with means.at_disk():
                done = means.io.read(means.find_file(run.segment, self.kind), at, [batch.headers[row].data])
            if done == HEADER_BYTES:
                came.append(row)
        batch.outcomes += [True] * len(came) + [False] * (len(run.rows) - len(came))
        batch.came += came  # a whole run or none of it: if one row fails, all are retried
        return ()


class WriteRun(RunJob):
    """Write pages into slots. A block without a table is hashed first, and skipped if it is wrong."""

    kind: Kind = "write"

    def _move(self) -> Sequence[Self]:
        batch, run, means = self._batch, self._run, self._batch.means
        rows = list(run.rows)
        if unknown := [row for row in rows if not len(batch.tables[row])]:
            with means.hashing:
                good = self._hashed(unknown)
            if len(good) < len(unknown):
                return self._one_by_one([row for row in rows if len(batch.tables[row])])
        buffers = self._buffers(means.pool.zeros)
        with means.at_disk():
            file = means.find_file(run.segment, self.kind)
            batch.files.update(dict.fromkeys(rows, file))
            means.io.write(file, run.offset, buffers)
        batch.went += rows
        batch.statuses[rows] = BlockStatus.READY
        return ()

    def _hashed(self, rows: Sequence[int]) -> list[int]:
        """The rows with right bytes; their tables and headers are now in the batch."""
        batch = self._batch
        for row, table in zip(rows, batch.hash_rows(rows), strict=True):
            if table is None:
                batch.statuses[row] = BlockStatus.CORRUPT
            elif len(table) <= TABLE_SLICES:
                batch.tables[row] = table
        if good := [row for row in rows if len(batch.tables[row])]:
            batch.stamp(good)
        return good


class VerifyJob:
    """Hash pages during their write, as many at a time as are written together."""

    kind: Kind = "write"

    def __init__(self, batch: Batch, rows: Sequence[int]) -> None:
        self._batch, self._rows = batch, rows

    def run(self) -> Sequence[VerifyJob]:
        """As `Job.run`."""
        batch = self._batch
        step = max(1, RUN_BYTES[self.kind] // max(1, *map(len, batch.pages)))
        for i in range(0, len(self._rows), step):
            rows = self._rows[i : i + step]
            with batch.means.hashing:
                tables = batch.hash_rows(rows)
            batch.wrong += [row for row, table in zip(rows, tables, strict=True) if table is None]
        batch.unverified.clear()
        return ()

    def give_up(self) -> None:
        """As `Job.give_up`: no row becomes READY."""


class _Part:
    """A part of a batch: rows that have bytes in it, by their place on the disk, and their PIECE [n]."""

    def __init__(self, batch: Batch, order: NDArray[np.int64], parts: Parts, number: int) -> None:
        self.number = number
        self.rows = rows = order[parts.pieces["length"][number, order] > 0]
        self.pieces = parts.pieces[number, rows]
        self.pieces["offset"] += batch.extents["offset"][rows]
        if number == 0:
            self.pieces["head"] = batch.headers.ctypes.data + rows * HEADER_BYTES
        else:
            self.pieces["offset"] += np.uint64(HEADER_BYTES)
        self.has_ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._left, self._lock = 0, Lock()

    def groups(self, segments: NDArray[np.uint64], *, turns: int) -> list[_Group]:
        """A group for each turn, or more of about as many bytes as a run. segments: of the batch."""
        if not len(self.rows):
            self.has_ended.set()
            return []
        most = max(1, RUN_BYTES["read"] // (int(self.pieces["length"].max()) + HEADER_BYTES))
        size, its = min(most, -(-len(self.rows) // turns)), segments[self.rows]
        cuts = np.union1d(np.arange(0, len(its), size), 1 + np.flatnonzero(its[1:] != its[:-1])).tolist()
        self._left, ends = len(cuts), [*cuts[1:], len(its)]
        return [_Group(self, int(its[i]), self.pieces[i:end]) for i, end in zip(cuts, ends, strict=True)]

    def count_down(self) -> None:
        """A group has ended; called in any thread."""
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._loop.call_soon_threadsafe(self.has_ended.set)


class _Group(NamedTuple):
    """Pieces of one part and segment that one call reads."""

    part: _Part
    segment: int
    pieces: StructArray


class PartRun:
    """Reads a group, then another one, until none is left. groups: of all parts in order."""

    kind: Kind = "read"

    def __init__(self, batch: Batch, groups: deque[_Group]) -> None:
        self._batch, self._groups = batch, groups

    def run(self) -> Sequence[PartRun]:
        """As `Job.run`. Jobs of other batches have their turn between two groups."""
        try:
            group = self._groups.popleft()
        except IndexError:
            return ()
        try:
            self._read(group)
        finally:
            group.part.count_down()
        return (self,)

    def give_up(self) -> None:
        """As `Job.give_up`."""
        self._batch.note_hang()

    def _read(self, group: _Group) -> None:
        batch, means = self._batch, self._batch.means
        try:
            with means.at_disk():
                means.io.read_pieces(means.find_file(group.segment, self.kind), group.pieces)
        except OSError as error:
            batch.fault = str(error)
            if not isinstance(error, GoneError):
                batch.outcomes.append(False)
            return
        errors = group.pieces["error"].tolist()
        batch.outcomes += [error == 0 for error in errors]
        if (worst := max(errors)) > 0:
            batch.fault = os.strerror(worst)


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
    segments, turns = batch.extents["segment"], batch.means.turns.most
    order = rows[np.lexsort((batch.extents["offset"][rows], segments[rows]))]
    found = [_Part(batch, order, parts, number) for number in range(len(parts.pieces))]
    groups = deque(group for part in found for group in part.groups(segments, turns=turns))

    async def read() -> None:
        try:
            await carry([PartRun(batch, groups) for _ in groups][:turns])
        finally:
            for part in found:  # groups may have been given up
                part.has_ended.set()

    work = asyncio.create_task(read())
    try:
        for part in found:
            await part.has_ended.wait()
            has_come = part.pieces["error"] == 0
            if part.number == 0:
                batch.came = part.rows[has_come].tolist()
                batch.judge(holds())
            batch.statuses[part.rows[~has_come]] = BlockStatus.FAILED
            rows = rows[batch.statuses[rows] == BlockStatus.READY]
            parts.landed(part.number, rows, batch.tables)
    finally:
        await outlast(work)  # no thread uses the pages any more
    batch.statuses[rows[~holds()[rows]]] = BlockStatus.FAILED
