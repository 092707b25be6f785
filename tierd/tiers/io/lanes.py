"""Lanes: the threads of a store, which take their jobs from one queue.

Purpose: as many calls at the disk as it wants, the hashing of one beside the I/O of others, and the event loop out of it: it wakes lanes that sleep, and
hears of a bundle once, at its end. Non-purpose: what a job does (`moves`). Invariants: jobs begin in the order in which they came, at most `count` at a
time; a bundle ends only when no lane has one of its jobs any more, and none is left in the queue; what no lane has begun is given up when every lane
hangs, or one has waited for its turn at the disk in vain, or none is awake and the system gives no thread.
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
        """Which way its bytes go."""

    def run(self) -> Sequence[Job]:
        """To its end, in a lane. Gives what is to be tried in its stead. Raises HangError where it is to be given up, and so is what waited as long."""

    def give_up(self) -> None:
        """It will not run."""


class Lanes:
    """See the module. count: how many there are; gives_way: their threads take no processor from who computes on it."""

    def __init__(self, count: int, *, name: str, calls: Calls, gives_way: bool = False) -> None:
        self.threads = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_give_way if gives_way else None)
        self._count, self._calls = count, calls
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Bundle, Job]] = deque()
        self._awake: set[Call] = set()
        self._mine = threading.local()  # a lane's own: its call, and what time it is
        self._all_asleep = asyncio.Event()
        self._all_asleep.set()

    async def carry(self, jobs: Sequence[Job], *, hang_s: float) -> None:
        """Until each has run or is given up, also when cancelled meanwhile. Raises what a job raises, when the last has ended.

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
        """Until every lane sleeps and nothing waits."""
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
        """As many lanes as there are jobs, or as sleep, or as get a thread."""
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
            time.sleep(0)  # lanes get the interpreter's lock now, not when this thread has prepared all that it is at

    def _fell_asleep(self, call: Call, lane: asyncio.Future[None]) -> None:
        self._lie_down(call)
        if self._queue:  # a job came when it had looked
            self._wake(lane.get_loop())
        lane.result()

    def _lie_down(self, call: Call) -> None:
        self._awake.discard(call)
        self._calls.end(call)
        if not self._awake:
            self._all_asleep.set()

    def _watch(self, bundle: _Bundle, hang_s: float) -> None:
        """Looks after so long, and again, whether the lanes hang."""

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
        """What no lane has begun of such bundles is given up."""
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
        """The lane of this thread has its turn at the disk: only from now on is its call under way."""
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
                self._withdraw(lambda its: its.begun <= call.begun)  # else each of them would wait for its turn in turn
            except Exception as error:  # noqa: BLE001  # it is for who carries
                bundle.error = error
            with self._lock:
                self._queue.extend((bundle, other) for other in instead)
                bundle.count(len(instead) - 1)

    def _next(self) -> tuple[_Bundle, Job] | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None


def _give_way() -> None:
    """This thread, woken, waits for its turn like everybody: each call at the disk that ends would else interrupt the client who copies there. What its operator has said stays."""
    with suppress(OSError):  # a sandbox may refuse it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Bundle:
    """Jobs that are waited for together, since `begun`. error: of one that raised."""

    def __init__(self, left: int, loop: asyncio.AbstractEventLoop) -> None:
        self.begun = loop.time()
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: Exception | None = None
        self.watch: asyncio.TimerHandle | None = None
        self._left = left

    def count(self, change: int) -> None:
        """So many more jobs of it are there; without any it is done. Under the lock of the lanes."""
        self._left += change
        if not self._left:
            self.done.get_loop().call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(None)
