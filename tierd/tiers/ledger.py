"""The durable side of a store: records on their way to the journal, syncs, snapshots.

Purpose: `Ledger`. Non-purpose: what the records mean (`stored_index`), slots. Invariants:
- Records reach the file in the order in which they were added, and the record of a block after its slot file was synced.
- One flight at a time: data files, then the journal. Whoever comes while one flies shares the next.
- A sync that fails is the end: nothing is retried, `failure` says what happened, and every later `sync` raises.
- What is added becomes durable within LAG_S even if nobody asks.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers import recovery
from tierd.tiers.journal import Journal, Record
from tierd.tiers.store_files import GENERATION_LEAP, SEGMENT_LEAP, OpenStore

JOURNAL_LIMIT_BYTES = 8 << 20
"""A journal longer than this, and than the snapshot before it, is folded into a new snapshot."""
PENDING_LIMIT = 256
"""So many records not yet in the journal set a flight off at once."""
LAG_S = 1.0
"""For so long may a record wait for a flight that nobody asked for."""
SYNC_THREADS = 4

_T = TypeVar("_T")


class Ledger:
    """The journal of an open store, and when it is written. failure: empty, or why the store is out of service."""

    def __init__(self, opened: OpenStore) -> None:
        self.failure = ""
        self._is_closed = False
        self._has_news = False  # the journal tells what the newest snapshot does not
        self._opened = opened
        self._threads = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix=f"tierd-{opened.name}-sync")
        self._pending: list[Record] = []
        self._dirty: set[int] = set()  # places whose slots were written since the last flight
        self._marks = self._durable_marks = opened.marks
        self._flying = asyncio.Lock()
        self._next_flight: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._compaction: asyncio.Task[None] | None = None
        self._compact_at = max(JOURNAL_LIMIT_BYTES, opened.snapshot_bytes)

    def add(self, record: Record, *, dirty: set[int] | frozenset[int] = frozenset()) -> None:
        """Appends a record, in memory. dirty: places whose slots it tells of, written already."""
        if self.failure or self._is_closed:
            return
        self._pending.append(record)
        self._dirty |= dirty
        with suppress(RuntimeError):  # no loop runs: the next call of sync takes it
            self._see_to_it(asyncio.get_running_loop())

    def note_used(self, *, segment: int = 0, generation: int = 0) -> None:
        """Lets the marks run ahead of these numbers."""
        marks = self._marks
        if segment >= marks.next_segment:
            marks = replace(marks, next_segment=segment + SEGMENT_LEAP)
        if generation >= marks.next_generation:
            marks = replace(marks, next_generation=generation + GENERATION_LEAP)
        if marks is not self._marks:
            self._marks = marks
            self.add(marks)

    async def cover(self, *, segment: int = 0, generation: int = 0) -> None:
        """Returns when durable marks lie beyond these numbers. Raises TierFailed."""
        durable_marks = self._durable_marks
        if segment >= durable_marks.next_segment or generation >= durable_marks.next_generation:
            self.note_used(segment=segment, generation=generation)
            await self.sync()

    async def sync(self) -> None:
        """Everything added so far is durable. Raises TierFailed: for good, or while the disk is full."""
        self._check()
        await asyncio.shield(self._flight())

    async def close(self) -> None:
        """A last sync and a snapshot, if they can be; then no thread works any more."""
        with suppress(TierFailed):  # who needed something durable has asked before
            await self.sync()
        async with self._flying:
            if self._compaction is not None:
                await self._compaction
            if self._has_news and not self.failure:
                await self._begin_compaction()
            if self._compaction is not None:
                await self._compaction
        self._is_closed = True
        self._cancel_timer()
        self._threads.shutdown()

    # -- flights

    def _see_to_it(self, loop: asyncio.AbstractEventLoop) -> None:
        if len(self._pending) > PENDING_LIMIT:
            self._flight()
        elif self._timer is None:
            self._timer = loop.call_later(LAG_S, self._flight)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flight(self) -> asyncio.Task[None]:
        """The next flight, which takes what is there when it starts."""
        self._cancel_timer()
        if self._next_flight is None:
            self._next_flight = asyncio.create_task(self._fly())
            self._next_flight.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._next_flight

    def _check(self) -> None:
        if self.failure:
            raise TierFailed(self.failure)

    async def _fly(self) -> None:
        async with self._flying:
            self._next_flight = None
            self._check()
            records, self._pending = self._pending, []
            dirty, self._dirty = self._dirty, set()
            marks = self._marks
            failpoint("nvme.data.before_sync")
            await self._sync_data(dirty)
            if records:
                await self._sync_journal(records)
            self._durable_marks = marks
            await self._compact_if_due()

    async def _sync_data(self, dirty: set[int]) -> None:
        files = [self._opened.files[place] for place in sorted(dirty)]
        flights = [self._in_thread(self._opened.disk.sync_data, file.fd) for file in files]
        results = await asyncio.gather(*flights, return_exceptions=True)
        for file, error in zip(files, results, strict=True):
            if isinstance(error, BaseException):
                raise self.fail(file.path, error) from error

    async def _sync_journal(self, records: list[Record]) -> None:
        try:
            await self._in_thread(self._write_journal, records)
        except OSError as error:
            if self._opened.journal.is_abandoned or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise self.fail(self._opened.directory / "journal", error) from error
            self._pending = records + self._pending  # nothing of it is in the file; the next flight tries again
            self._timer = self._timer or asyncio.get_running_loop().call_later(LAG_S, self._flight)
            raise TierFailed(
                f"{self._opened.name}: no space for the journal in {self._opened.directory}; nothing is lost, but nothing new"
                " becomes durable: free space"
            ) from error

    def _write_journal(self, records: list[Record]) -> None:
        self._has_news = True
        failpoint("nvme.journal.before_append")
        self._opened.journal.append(records)
        failpoint("nvme.journal.before_sync")
        self._opened.journal.sync()
        failpoint("nvme.journal.after_sync")

    def fail(self, path: Path, error: BaseException) -> TierFailed:
        """The end of this store: what the kernel could not write it may have forgotten. Gives what is to be raised."""
        self.failure = (
            f"{self._opened.name}: {path} could not be made durable ({error}); the store is out of service:"
            " check the disk, then restart"
        )
        self._opened.notices.append(self.failure)
        self._pending.clear()
        self._dirty.clear()
        return TierFailed(self.failure)

    async def _compact_if_due(self) -> None:
        is_compacting = self._compaction is not None and not self._compaction.done()
        if self._opened.journal.bytes >= self._compact_at and not is_compacting:
            await self._begin_compaction()

    async def _begin_compaction(self) -> None:
        """Begins a new journal, and folds the old ones into a snapshot beside the store's work."""
        failpoint("nvme.compact.before_journal")
        number = self._opened.journal.number + 1
        try:
            journal = await self._in_thread(self._new_journal, number)
        except OSError as error:
            self._put_off(error)
            return
        self._opened.journal.close()
        self._opened.journal = journal
        self._has_news = False
        self._compaction = asyncio.create_task(self._compact(number))

    def _new_journal(self, number: int) -> Journal:
        opened = self._opened
        return Journal.create(
            opened.directory, store=opened.store, number=number, first=[self._marks], disk=opened.disk
        )

    async def _compact(self, number: int) -> None:
        try:
            length = await self._in_thread(self._fold, number)
            self._compact_at = max(JOURNAL_LIMIT_BYTES, length)
        except OSError as error:
            self._put_off(error)

    def _fold(self, number: int) -> int:
        opened = self._opened
        return recovery.compact(opened.directory, store=opened.store, number=number, disk=opened.disk)

    def _put_off(self, error: OSError) -> None:
        """The journals stay and are longer to read at the next start; tried again when they have doubled."""
        self._compact_at *= 2
        self._opened.notices.append(
            f"{self._opened.name}: no snapshot could be written in {self._opened.directory} ({error}); free space"
        )

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
