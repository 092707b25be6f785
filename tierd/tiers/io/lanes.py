"""Lanes: the threads of a store, which take their jobs from one queue.

They keep as many calls at the disk as it needs, and hash one block during the I/O of others. The
event loop only wakes sleeping lanes and learns once that a bundle has ended. `moves` defines the
jobs.

Jobs begin in order of arrival, at most `count` at a time. A bundle ends only when no lane or queue
has one of its jobs. Queued jobs fail if every lane hangs, or a lane waited in vain for its turn at
the disk. They also fail if no lane is awake and the system gives no thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Protocol

import structlog

from tierd.tiers.io.calls import Call, Calls, HangError, Kind, outlast

log = structlog.get_logger(__name__)


class Job(Protocol):
    """Work for a lane."""

    @property
    def kind(self) -> Kind:
        """The direction of its bytes."""

    def run(self) -> Sequence[Job]:
        """Run to the end, in a lane; returns jobs to try instead. Raises HangError if this job, and
        all that waited as long, are to be given up."""

    def give_up(self) -> None:
        """The job will not run."""


class Lanes:
    """Threads of one store. count: of threads; gives_way: run them with SCHED_BATCH."""

    def __init__(self, count: int, *, name: str, calls: Calls, gives_way: bool = False) -> None:
        self.threads = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_give_way if gives_way else None)
        self._count, self._calls = count, calls
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Bundle, Job]] = deque()
        self._awake: set[Call] = set()
        self._mine = threading.local()  # per lane: its call and its clock
        self._all_asleep = asyncio.Event()
        self._all_asleep.set()

    async def carry(self, jobs: Sequence[Job], *, hang_s: float) -> None:
        """Wait until each job has run or is given up, even when cancelled. Then raises a job's
        error.

        hang_s: a call that takes longer hangs.
        """
        if not jobs:
            return
        loop = asyncio.get_running_loop()
        bundle = _Bundle(len(jobs), loop)
        with self._lock:
            self._queue.extend((bundle, job) for job in jobs)
        self._wake(loop)
        self._watch(bundle, hang_s)
        await outlast(bundle.done)

    async def idle(self) -> None:
        """Wait until every lane sleeps and no job is queued."""
        while self._awake:
            await self._all_asleep.wait()

    def close(self) -> None:
        """No lane may be awake."""
        self.threads.shutdown(wait=False)

    @property
    def are_taken(self) -> bool:
        """Whether a new job would have to wait."""
        return len(self._awake) == self._count

    # -- on the loop

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake a lane for each job, limited by sleeping lanes and available threads."""
        with self._lock:
            kinds = [job.kind for _, job in islice(self._queue, self._count - len(self._awake))]
        for kind in kinds:
            call = self._calls.begin(kind)
            self._awake.add(call)
            self._all_asleep.clear()
            try:
                lane = loop.run_in_executor(self.threads, self._drain, call, loop.time)
            except RuntimeError:
                log.exception("no thread for a lane", awake=len(self._awake) - 1, waiting=len(self._queue))
                self._lie_down(call)
                break
            lane.add_done_callback(partial(self._fell_asleep, call))
        if kinds and not self._awake:
            self._withdraw(lambda _: True)
        elif kinds:
            time.sleep(0)  # let lanes take the interpreter's lock before this thread goes on

    def _fell_asleep(self, call: Call, lane: asyncio.Future[None]) -> None:
        self._lie_down(call)
        if self._queue:  # a job came after its last look
            self._wake(lane.get_loop())
        lane.result()

    def _lie_down(self, call: Call) -> None:
        self._awake.discard(call)
        self._calls.end(call)
        if not self._awake:
            self._all_asleep.set()

    def _watch(self, bundle: _Bundle, hang_s: float) -> None:
        """Check after hang_s, repeatedly, whether the lanes hang."""

        def look() -> None:
            if bundle.done.done():
                return
            if self.are_taken and loop.time() - max(call.begun for call in self._awake) > hang_s:
                self._withdraw(lambda its: its is bundle)
            self._watch(bundle, hang_s)

        loop = bundle.done.get_loop()
        bundle.watch = loop.call_later(hang_s, look)

    # -- on the loop, or in a lane

    def _withdraw(self, is_meant: Callable[[_Bundle], bool]) -> None:
        """Give up the queued jobs of such bundles."""
        with self._lock:
            waiting, self._queue = self._queue, deque[tuple[_Bundle, Job]]()
            for its, job in waiting:
                if is_meant(its):
                    job.give_up()
                    its.count(-1)
                else:
                    self._queue.append((its, job))

    # -- in a lane

    def begin_call(self) -> None:
        """This lane has its turn at the disk: its call is in flight only from now on."""
        call: Call = self._mine.call
        call.go_on(call.kind, self._mine.now())

    def _drain(self, call: Call, now: Callable[[], float]) -> None:
        self._mine.call, self._mine.now = call, now
        while entry := self._next():
            bundle, job = entry
            call.go_on(job.kind, now())
            instead: Sequence[Job] = ()
            try:
                instead = job.run()
            except HangError:
                job.give_up()
                self._withdraw(lambda its: its.begun <= call.begun)  # else each of them would wait for its turn in vain
            except Exception as error:  # noqa: BLE001  # for the caller of carry
                bundle.error = error
            with self._lock:
                self._queue.extend((bundle, other) for other in instead)
                bundle.count(len(instead) - 1)

    def _next(self) -> tuple[_Bundle, Job] | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None


def _give_way() -> None:
    """Run this thread under SCHED_BATCH, so that a finished call does not interrupt a client's
    copying. A policy that the operator set stays."""
    with suppress(OSError):  # a sandbox may refuse it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Bundle:
    """Jobs that are awaited together, since `begun`. error: of one that raised."""

    def __init__(self, left: int, loop: asyncio.AbstractEventLoop) -> None:
        self.begun = loop.time()
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: Exception | None = None
        self.watch: asyncio.TimerHandle | None = None
        self._left = left

    def count(self, change: int) -> None:
        """Change the number of jobs; at 0 the bundle is done. Under the lock of the lanes."""
        self._left += change
        if not self._left:
            self.done.get_loop().call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)
