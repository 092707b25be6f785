"""The durable side of a store: records on their way to the journal, syncs, snapshots.

- Records reach the file in the order of `add`, and a block's record after its slot file was synced.
- One flight at a time: data files, then the journal. A caller that comes during a flight shares the
  next.
- A file whose sync failed is never synced or written again, since the kernel may have dropped
  pages. The reason is in `failure`, and every `sync` raises.
- The journal that failed is replaced by `mend` with one of the same records, a slot file with one
  of its durable blocks. Records of other blocks are dropped, with a call of `lose`.
- Added records become durable within LAG_S without a call of `sync`, unless there is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from tierd.core.formats.model import StructArray
from tierd.errors import TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.io.calls import Calls
from tierd.tiers.store import recovery
from tierd.tiers.store.journal import BlocksStored, Journal, Record
from tierd.tiers.store.slots import SlotFile
from tierd.tiers.store.store_files import GENERATION_LEAP, SEGMENT_LEAP, OpenStore, renew

JOURNAL_LIMIT_BYTES = 8 << 20
"""A journal longer than this and than the last snapshot is folded into a new snapshot."""
LONG_JOURNAL_BYTES = 256 << 20
"""So is a journal of this length, however long the snapshot. Its contents are in memory while it is
folded, and during a start after a crash.
"""
PENDING_LIMIT = 256
"""More pending records than this start a flight at once."""
LAG_S = 1.0
"""The longest wait of a record for a flight, without a call of `sync`."""
SYNC_THREADS = 4
IN_TURN = 4
"""The limit of slot files synced in turn: the first sync empties the disk's cache for others."""
STRICT_TRIES = 3
"""After this many tries to renew a slot file, unreadable blocks in it are dropped."""

_T = TypeVar("_T")
SlotFiles = dict[int, SlotFile]
Failures = dict[int, BaseException]
"""By place."""


class Added(NamedTuple):
    """A record to be written. place: of the slot file that must be synced first, or None."""

    record: Record
    place: int | None


class Keeper(Protocol):
    """The store, as its ledger uses it."""

    def lose(self, stored: StructArray) -> None:
        """Blocks, META [n], were written and will not become durable."""

    def durable_spans(self, place: int) -> list[tuple[int, int]]:
        """Offset and length in bytes of the durable parts of a slot file."""

    def leave_behind(self, place: int, offsets: Sequence[int]) -> None:
        """The spans at these offsets were durable, but are missing in the new file."""


class Ledger:
    """The journal of an open store, and the timing of its writes.

    removed: which of its files was removed, or empty. is_loading: files are still read and must
    stay.
    abandoned: places whose slot file failed to sync, with the number of tries to renew it.
    """

    def __init__(self, opened: OpenStore, keeper: Keeper, calls: Calls) -> None:
        self._failure, self.removed = opened.fault, ""
        self.is_loading = False
        self.abandoned: dict[int, int] = {}
        self._keeper, self._calls = keeper, calls
        self._must_fold = False  # a journal that failed to sync still describes durable blocks
        self._next_number = opened.journal.number + 1
        self._is_closed = False
        self._has_news = opened.has_news  # the journal has changes that the newest snapshot lacks
        self._opened = opened
        self._threads = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix=f"tierd-{opened.name}-sync")
        self._pending: list[Added] = []
        self._dirty: set[int] = set()  # places whose slots were written since the last flight
        self.marks = self._durable_marks = opened.marks
        self._flying = asyncio.Lock()
        self._next_flight: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._compaction: asyncio.Task[None] | None = None
        self._is_given_up = False  # no more snapshots are wanted
        self._note_snapshot(opened.snapshot_bytes)

    def add(self, record: Record, *, place: int | None = None) -> None:
        """Append a record, in memory. place: of the slots that it describes, already written."""
        if self._is_closed:
            return
        self._pending.append(Added(record, place))
        if place is not None:
            self._dirty.add(place)
        with suppress(RuntimeError):  # without a loop, the next sync takes it
            self._see_to_it(asyncio.get_running_loop())

    def note_used(self, *, segment: int = 0, generation: int = 0) -> None:
        """Raise the marks above these numbers, with room ahead."""
        marks = self.marks
        if segment >= marks.next_segment:
            marks = replace(marks, next_segment=segment + SEGMENT_LEAP)
        if generation >= marks.next_generation:
            marks = replace(marks, next_generation=generation + GENERATION_LEAP)
        if marks is not self.marks:
            self.marks = marks
            self.add(marks)

    async def cover(self, *, segment: int = 0, generation: int = 0) -> None:
        """Wait until durable marks lie beyond these numbers. Raises TierFailed."""
        durable_marks = self._durable_marks
        if segment >= durable_marks.next_segment or generation >= durable_marks.next_generation:
            self.note_used(segment=segment, generation=generation)
            await self.sync()

    async def sync(self) -> None:
        """Make all added records durable. Raises TierFailed: for good, or while the disk is full."""
        self._check()
        try:
            await asyncio.shield(self._flight())
        except OSError as error:
            raise TierFailed(f"{self._opened.name}: {error}; check the disk") from error

    async def close(self, *, fold_until: float) -> None:
        """Sync, write a snapshot if the next start would write one, and end the threads.

        fold_until: the loop's time at which an unfinished snapshot is abandoned. The journals have
        the same content.
        """
        with suppress(TierFailed):  # callers that needed durability have called sync before
            await self.sync()
        self._cancel_timer()
        giving_up = asyncio.get_running_loop().call_at(fold_until, self._give_up)
        async with self._flying:
            await self._compacted()
            if self._has_news and not self.failure and self._is_much_news():
                await self._begin_compaction()
            await self._compacted()
        giving_up.cancel()
        self._is_closed = True
        self._cancel_timer()
        self._threads.shutdown(wait=False)  # none works any more

    # -- flights

    def _see_to_it(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.failure:
            return  # until it is mended
        if len(self._pending) > PENDING_LIMIT:
            self._flight()
        elif self._timer is None:
            self._timer = loop.call_later(LAG_S, self._flight)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flight(self) -> asyncio.Task[None]:
        """The next flight, which takes the records that exist at its start."""
        self._cancel_timer()
        if self._next_flight is None:
            self._next_flight = asyncio.create_task(self._fly())
            self._next_flight.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._next_flight

    def _check(self) -> None:
        if self.failure or self._is_closed:
            raise TierFailed(self.failure or f"{self._opened.name}: closed; open it again")

    async def _fly(self) -> None:
        async with self._flying:
            self._next_flight = None
            self._check()
            failpoint("nvme.data.before_sync")
            records, self._pending = self._pending, []
            dirty, self._dirty = self._dirty, set()
            marks = self.marks
            files = {place: self._opened.files[place] for place in sorted(dirty)}
            if len(files) > IN_TURN:
                await self._sync_apart(files, records)
                files = {}
            if files or records:
                await self._sync_in_turn(files, records)
            self._check()
            self._durable_marks = marks
            await self._compact_if_due()

    async def _sync_apart(self, files: SlotFiles, records: list[Added]) -> None:
        """Sync many slot files, each in a thread. Raises TierFailed."""
        flights = [self._call(self._opened.disk.sync_data, file.fd) for file in files.values()]
        results = await asyncio.gather(*flights, return_exceptions=True)
        errors = {place: e for place, e in zip(files, results, strict=True) if isinstance(e, BaseException)}
        self._check_data({place: e for place, e in errors.items() if isinstance(e, OSError)}, files, records)
        if errors:  # not errors of the disk
            error = next(iter(errors.values()))
            raise self._not_begun(files, records, error) from error

    async def _sync_in_turn(self, files: SlotFiles, records: list[Added]) -> None:
        """Sync a few slot files, then the journal, in one thread: a handover takes longer than most
        disks. Raises TierFailed."""
        failed, error = Failures(), list[OSError]()
        loop, call = asyncio.get_running_loop(), self._calls.begin("write")

        def run() -> None:
            for place, file in files.items():
                call.go_on("write", loop.time())
                try:
                    self._opened.disk.sync_data(file.fd)
                except Exception as e:  # noqa: BLE001 - raised below; the others are synced anyway
                    failed[place] = e
            if records and not failed:
                call.go_on("write", loop.time())
                try:
                    self._write_journal([added.record for added in records])
                    self.removed = self._find_removed(files)
                except OSError as e:
                    error.append(e)

        try:
            await self._in_thread(run)
        except Exception as e:
            raise self._not_begun(files, records, e) from e
        finally:
            self._calls.end(call)
        for fault in (*failed.values(), *error):
            self._calls.fail("write", str(fault))
        self._check_data(failed, files, records)
        self._check_journal(error, records)

    def _not_begun(self, files: SlotFiles, records: list[Added], error: BaseException) -> TierFailed:
        """Prepare a retry after an error of the system, not the disk; returns the error to raise."""
        self._put_back(records)
        self._dirty |= files.keys()
        return TierFailed(
            f"{self._opened.name}: not synced ({error}); nothing is lost; tierd retries: allow more threads or memory"
        )

    def _check_data(self, failed: Failures, files: SlotFiles, records: list[Added]) -> None:
        """Raise TierFailed after failed syncs. Records go back, except those of lost blocks."""
        if failed:
            self._pending = records + self._pending
            self._dirty |= files.keys() - failed.keys()
            for place, error in failed.items():
                self._abandon(place)
                failure = self._fail(files[place].path, error)
            raise failure

    def _abandon(self, place: int) -> None:
        """Drop records of blocks whose bytes may not be on the disk."""
        self.abandoned[place] = 0
        self._dirty.discard(place)
        lost = [added.record for added in self._pending if added.place == place]
        self._pending = [added for added in self._pending if added.place != place]
        for record in lost:
            if isinstance(record, BlocksStored):
                self._keeper.lose(record.metas)

    def _check_journal(self, errors: Iterable[OSError], records: list[Added]) -> None:
        """Raise TierFailed after a failed write of the journal; the records go back to pending."""
        for error in errors:
            self._put_back(records)  # they are still true
            if self._opened.journal.is_abandoned:
                raise self._fail(self._opened.directory / "journal", error) from error
            raise TierFailed(
                f"{self._opened.name}: the journal in {self._opened.directory} cannot be written ({error}); no block is"
                " lost, but no new block becomes durable: free space, or check the disk"
            ) from error

    def _put_back(self, records: list[Added]) -> None:
        """Keep records for the next flight, which a timer starts."""
        self._pending = records + self._pending
        self._timer = self._timer or asyncio.get_running_loop().call_later(LAG_S, self._flight)

    def _write_journal(self, records: list[Record]) -> None:
        self._has_news = True
        failpoint("nvme.journal.before_append")
        self._opened.journal.append(records)
        failpoint("nvme.journal.before_sync")
        self._opened.journal.sync()
        failpoint("nvme.journal.after_sync")

    def _fail(self, path: Path, error: BaseException) -> TierFailed:
        """Record a failed sync: the kernel may have dropped pages. Returns the error to raise."""
        self._failure = f"{self._opened.name}: {path} could not be made durable ({error}); check the disk"
        return TierFailed(self._failure)

    @property
    def failure(self) -> str:
        """Why nothing becomes durable now, or empty."""
        return self.removed or self._failure

    async def inspect(self) -> None:
        """Check that every file of the store still has its name; if not, `removed` says so."""
        async with self._flying:
            before, self.removed = self.removed, await self._in_thread(self._find_removed, self._opened.files)
        if self.removed != before:
            self._calls.stir()

    def _find_removed(self, files: SlotFiles) -> str:
        """Which slot file, journal or index was removed, and the effect; empty if none was."""
        opened, disk = self._opened, self._opened.disk
        lost = [file.path for file in files.values() if not disk.is_named(file.path, file.fd)]
        if not opened.journal.is_abandoned and not disk.is_named(opened.journal.path, opened.journal.fd):
            lost.append(opened.journal.path)
        if not lost and not (
            self._has_index() or self._has_index()
        ):  # twice: during a rename a listing may show neither name
            lost = [opened.directory / "store.json, or the snapshot"]
        if not lost:
            return ""
        blocks = sum(len(self._keeper.durable_spans(place)) for place in opened.files)
        return (
            f"{opened.name}: {lost[0]} was removed while the daemon ran; some or all of the store's {blocks} blocks are"
            " lost at its end, and no block becomes durable: put the files back, or restart tierd"
        )

    def _has_index(self) -> bool:
        names = self._opened.disk.list(self._opened.directory)
        return "store.json" in names and (bool(self._failure) or any(name.startswith("snapshot-") for name in names))

    # -- after a failure

    async def mend(self) -> None:
        """Replace the files that failed. Raises TierFailed if the disk refuses. The work goes on
        when cancelled, and `close` waits for it."""
        if self.removed:
            await self.inspect()
        if self.removed or (self.failure and self.is_loading):  # files still being read must not be replaced
            raise TierFailed(self.failure)
        if self.failure:
            work = asyncio.ensure_future(self._mend())
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(work)

    async def _mend(self) -> None:
        async with self._flying:
            await self._compacted()
            try:
                if self._opened.journal.is_abandoned or self._must_fold:
                    await self._replace_journal()
                    # Never twice with one number: a failed fold may have removed some of its
                    # sources.
                    await self._in_thread(self._fold, self._opened.journal.number)
                    self._must_fold = self._has_news = False
                for place in sorted(self.abandoned):
                    await self._renew(place)
            except (OSError, RuntimeError, MemoryError) as error:
                raise TierFailed(
                    f"{self.failure}; and no new file could be made ({str(error) or repr(error)}); free space, or raise the limit of threads or memory"
                ) from error
            self._failure = ""
        if self._pending:
            self._flight()

    async def _replace_journal(self) -> None:
        old = self._opened.journal
        self._opened.journal = await self._in_thread(self._new_journal, self._number())
        self._must_fold = True
        with suppress(OSError, RuntimeError):  # its records are durable, or written again
            await self._in_thread(old.close)

    async def _renew(self, place: int) -> None:
        """Copy the durable parts into a new slot file, which replaces the old one."""
        is_strict = self.abandoned[place] < STRICT_TRIES
        self.abandoned[place] += 1
        spans = self._keeper.durable_spans(place)
        old = self._opened.files[place]
        self._opened.files[place], left = await self._in_thread(
            lambda: renew(self._opened, place, spans, is_strict=is_strict)
        )
        self._opened.retired.append(old)
        self._keeper.leave_behind(place, left)
        del self.abandoned[place]

    def _number(self) -> int:
        """The number of the next journal. Never twice, even if its file failed."""
        self._next_number += 1
        return self._next_number - 1

    # -- compaction

    async def _compact_if_due(self) -> None:
        is_compacting = self._compaction is not None and not self._compaction.done()
        if self._opened.journal.bytes >= self._compact_at and not is_compacting and not self.is_loading:
            await self._begin_compaction()

    async def _compacted(self) -> None:
        """Wait for a running compaction, without interrupting it."""
        if self._compaction is not None:
            await asyncio.wait([self._compaction])

    def _is_much_news(self) -> bool:
        """Whether a start would write a new snapshot, or one is cheap."""
        return (
            self._snapshot_bytes <= JOURNAL_LIMIT_BYTES
            or self._opened.journal.bytes * recovery.REJOURNALED_SHARE > self._snapshot_bytes
        )

    def _give_up(self) -> None:
        self._is_given_up = True

    def _note_snapshot(self, length: int) -> None:
        self._snapshot_bytes = length
        self._compact_at = max(JOURNAL_LIMIT_BYTES, min(length, LONG_JOURNAL_BYTES))

    async def _begin_compaction(self) -> None:
        """Begin a new journal, and fold the old ones into a snapshot in the background."""
        failpoint("nvme.compact.before_journal")
        number, old = self._number(), self._opened.journal
        try:
            self._opened.journal = await self._in_thread(self._new_journal, number)
        except Exception as error:  # noqa: BLE001 - a lack of threads or memory is no failed sync
            self._put_off(error)
            return
        with suppress(OSError, RuntimeError):  # its records are durable, or written again
            await self._in_thread(old.close)
        self._has_news = False
        self._compaction = asyncio.create_task(self._compact(number))

    def _new_journal(self, number: int) -> Journal:
        opened = self._opened
        return Journal.create(opened.directory, store=opened.store, number=number, first=[self.marks], disk=opened.disk)

    async def _compact(self, number: int) -> None:
        try:
            length = await self._in_thread(self._fold, number)
            self._note_snapshot(length)
        except Exception as error:  # noqa: BLE001 - as above
            self._put_off(error)

    def _fold(self, number: int) -> int:
        opened = self._opened
        return recovery.compact(
            opened.directory,
            store=opened.store,
            number=number,
            disk=opened.disk,
            is_given_up=lambda: self._is_given_up,
        )

    def _put_off(self, error: Exception) -> None:
        """Keep the journals, which makes the next start longer; retry when they have doubled."""
        self._compact_at *= 2
        self._opened.notices.append(
            f"{self._opened.name}: no snapshot could be written in {self._opened.directory} ({str(error) or repr(error)}); free space, or raise the limit of threads or memory"
        )

    async def _call(self, work: Callable[..., _T], *args: object) -> _T:
        """Run in a thread, as a call that counts in the store's health. Raises OSError."""
        with self._calls.one("write"):
            try:
                return await self._in_thread(work, *args)
            except OSError as error:
                self._calls.fail("write", str(error))
                raise

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        """Run work in a thread; when this raises, no thread runs it or will. An executor that
        starts no thread may have queued it anyway."""
        turn = Future[_T]()

        def run() -> None:
            if turn.set_running_or_notify_cancel():
                try:
                    turn.set_result(work(*args))
                except BaseException as e:  # noqa: BLE001 - raised below
                    turn.set_exception(e)

        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except RuntimeError:
            if turn.cancel():
                raise
        if not turn.done():
            await asyncio.wrap_future(turn)
        return turn.result()
