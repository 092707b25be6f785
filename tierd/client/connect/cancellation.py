"""Cancels verbs in their threads, also in the middle of a wait.

    stop.around(verb), in its thread ──▶ a wait ──▶ ended_by(end) ◀── stop.set(), in another

AsyncClient's verbs run in threads (threads.py), and the task that awaits one may be cancelled. A
cancelled verb raises `Cancelled` once, in a wait or before its next step; its cleanup then runs
undisturbed. Client's verbs cannot be cancelled; for them each check costs one attribute read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class Cancelled(BaseException):
    """The verb was cancelled. This is not an error, and no handler of errors catches it."""


class Cancellation:
    """The cancellation of one verb, shared by the verb's thread and the thread that cancels."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_set = threading.Event()
        self._is_raised = False
        self._end: Callable[[], Any] | None = None

    def around(self, verb: Callable[[], T]) -> T:
        """Runs the verb in this thread so that it can be cancelled."""
        _mine.stop = self
        try:
            return verb()
        finally:
            _mine.stop = None

    def set(self) -> None:
        """Cancels the verb and ends its current wait."""
        with self._turn:
            self._is_set.set()
            if self._end is not None:
                self._end()

    @property
    def is_due(self) -> bool:
        """Whether the verb was cancelled and has not raised Cancelled yet."""
        return self._is_set.is_set() and not self._is_raised

    def take_error(self) -> Cancelled:
        """The error that the verb raises. Notes that it was raised."""
        self._is_raised = True
        return Cancelled()

    def wait(self, seconds: float) -> None:
        """Pauses the verb."""
        if self._is_raised:
            time.sleep(seconds)
        else:
            self._is_set.wait(seconds)

    def begin_wait(self, end: Callable[[], Any]) -> None:
        """Notes that the verb is about to wait; `end` ends that wait."""
        with self._turn:
            self._end = end
            if self.is_due:
                end()

    def end_wait(self) -> None:
        """Notes that the wait is over."""
        with self._turn:
            self._end = None


class _Mine(threading.local):
    stop: Cancellation | None = None


_mine = _Mine()


def check() -> None:
    """Called before anything that takes time. Raises Cancelled."""
    stop = _mine.stop
    if stop is not None and stop.is_due:
        raise stop.take_error()


def is_possible() -> bool:
    """Whether this thread's verb can be cancelled."""
    return _mine.stop is not None


def pause(seconds: float) -> None:
    """As time.sleep, but raises Cancelled."""
    stop = _mine.stop
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)
        check()


def ended_by(end: Callable[[], Any]) -> AbstractContextManager[None]:
    """Around a wait: a cancellation calls `end` from another thread, perhaps before the wait
    begins. Any error that results becomes Cancelled."""
    stop = _mine.stop
    return _NOTHING if stop is None else _ended_by(stop, end)


@contextmanager
def _ended_by(stop: Cancellation, end: Callable[[], Any]) -> Iterator[None]:
    stop.begin_wait(end)
    try:
        yield
    except BaseException:
        if stop.is_due:
            raise stop.take_error() from None
        raise
    finally:
        stop.end_wait()


@contextmanager
def apart() -> Iterator[None]:
    """Around work for other verbs: a cancellation takes effect only after it."""
    stop, _mine.stop = _mine.stop, None
    try:
        yield
    finally:
        _mine.stop = stop


_NOTHING = nullcontext()
