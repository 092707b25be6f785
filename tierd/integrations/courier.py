"""Transfers that an engine's loop must not wait for: threads, a bounded queue, polled results.

A courier knows nothing of what a transfer does. At most `limit` jobs are unfinished; one more is
refused at once. Each accepted job is reported exactly once, a job that raised with its error.
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
    """A job's result: its value, or the error that it raised, and the seconds since it was accepted."""

    key: K
    value: T | None
    error: BaseException | None
    seconds: float


class Courier(Generic[K, T]):
    """Threads may share it. `name` names its threads, for debuggers. A courier thread calls `wake`
    after each job's outcome is available; `wake` must not raise."""

    def __init__(self, name: str, *, threads: int, limit: int, wake: Callable[[], object] = lambda: None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._limit = limit
        self._wake = wake
        self._done: deque[Outcome[K, T]] = deque()
        self._turn = threading.Condition()
        self._unfinished = 0

    @property
    def unfinished(self) -> int:
        """Accepted jobs that have not ended."""
        return self._unfinished

    def submit(self, key: K, work: Callable[[], T]) -> bool:
        """Accepts a job; False if the queue is full or closed."""
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
        """Outcomes of jobs that ended since the last call."""
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def await_any(self, *, timeout_s: float) -> bool:
        """Waits until `finished` has an outcome; False on timeout or without unfinished jobs."""
        with self._turn:
            return self._turn.wait_for(lambda: self._done or not self._unfinished, timeout_s) and bool(self._done)

    def drain(self, *, timeout_s: float) -> bool:
        """Waits until every job has ended; False on timeout."""
        with self._turn:
            return self._turn.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self, *, timeout_s: float) -> bool:
        """Accepts no more jobs and waits as `drain` does; jobs that never began are dropped."""
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
