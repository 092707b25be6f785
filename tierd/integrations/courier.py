"""Transfers that an engine's loop must not wait for: a few threads, a bounded queue, results that are polled.

Purpose: work goes in, outcomes come out, nothing blocks. Non-purpose: knowing what a transfer is. Invariants: at most `limit` jobs are unfinished, one more
is refused at once; each job that was taken comes out exactly once; a job that raises comes out with its error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierd.errors import Unavailable

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[K, T]):
    """What became of a job: its value, or the error that it raised; seconds since it was taken."""

    key: K
    value: T | None
    error: BaseException | None
    seconds: float


class Courier(Generic[K, T]):
    """name: of its threads, for debuggers. wake: called on a thread of it, after a job's outcome is there; it must not raise. Threads may share it."""

    def __init__(self, name: str, *, threads: int, limit: int, wake: Callable[[], object] = lambda: None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._limit = limit
        self._wake = wake
        self._done: deque[Outcome[K, T]] = deque()
        self._turn = threading.Condition()
        self._unfinished = 0

    @property
    def unfinished(self) -> int:
        """Jobs that were taken and have not ended."""
        return self._unfinished

    def submit(self, key: K, work: Callable[[], T]) -> bool:
        """Takes a job; False if the queue is full or closed."""
        with self._turn:
            if self._unfinished >= self._limit:
                return False
            self._unfinished += 1
        began = time.monotonic()
        try:
            future = self._pool.submit(work)
        except RuntimeError:  # closed
            with self._turn:
                self._unfinished -= 1
            return False
        future.add_done_callback(lambda ended: self._end(key, ended, time.monotonic() - began))
        return True

    def finished(self) -> list[Outcome[K, T]]:
        """What has ended since the last time."""
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def await_any(self, *, timeout_s: float) -> bool:
        """Waits until a job has ended that `finished` has not told of yet; False if there is none to wait for, or that took too long."""
        with self._turn:
            return self._turn.wait_for(lambda: self._done or not self._unfinished, timeout_s) and bool(self._done)

    def drain(self, *, timeout_s: float) -> bool:
        """Waits until every job has ended; False if that took too long."""
        with self._turn:
            return self._turn.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self, *, timeout_s: float) -> bool:
        """Takes no more, and waits as drain does; jobs that never began are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return self.drain(timeout_s=timeout_s)

    def _end(self, key: K, ended: Future[T], seconds: float) -> None:
        if ended.cancelled():
            outcome: Outcome[K, T] = Outcome(key, None, Unavailable("courier: closed before the job began"), seconds)
        else:
            error = ended.exception()
            outcome = Outcome(key, None if error else ended.result(), error, seconds)
        self._done.append(outcome)
        self._wake()
        with self._turn:
            self._unfinished -= 1
            self._turn.notify_all()
