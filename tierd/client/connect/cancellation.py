"""Verbs that nobody waits for any more: how a thread that carries one out is told, in the middle of a wait too.

    stop.around(verb), in its thread ──▶ a wait ──▶ ended_by(what ends it) ◀── stop.set(), in another

Purpose: AsyncClient's verbs run in threads, and its caller may be cancelled. Non-purpose: threads (threads.py), what a verb gives back then (the verbs). Invariants: a verb is told once, by
`Stopped` where it waits or before it goes on, and what it does about that is not disturbed; where nobody can stop
it, in every verb of Client, all of this costs one look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(BaseException):
    """Nobody waits for this verb any more; not an error, and nothing takes it for one."""


class Stop:
    """Of one verb. The thread that it runs in and another one share it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_set = threading.Event()
        self._is_told = False
        self._end: Callable[[], Any] | None = None

    def around(self, verb: Callable[[], T]) -> T:
        """The verb, which can be stopped in this thread."""
        _mine.stop = self
        try:
            return verb()
        finally:
            _mine.stop = None

    def set(self) -> None:
        """Nobody waits for it. What it waits for ends now."""
        with self._turn:
            self._is_set.set()
            if self._end is not None:
                self._end()

    @property
    def is_due(self) -> bool:
        """Whether the verb is to be told."""
        return self._is_set.is_set() and not self._is_told

    def tell(self) -> Stopped:
        """What the verb is told; from now on it was."""
        self._is_told = True
        return Stopped()

    def wait(self, seconds: float) -> None:
        """A pause of the verb."""
        if self._is_told:
            time.sleep(seconds)
        else:
            self._is_set.wait(seconds)

    def begin_wait(self, end: Callable[[], Any]) -> None:
        """The verb is about to wait for what this ends."""
        with self._turn:
            self._end = end
            if self.is_due:
                end()

    def end_wait(self) -> None:
        """It waits no more."""
        with self._turn:
            self._end = None


class _Mine(threading.local):
    stop: Stop | None = None


_mine = _Mine()


def check() -> None:
    """Before what takes time. Raises Stopped."""
    stop = _mine.stop
    if stop is not None and stop.is_due:
        raise stop.tell()


def is_possible() -> bool:
    """Whether this thread's verb is one that can be stopped."""
    return _mine.stop is not None


def pause(seconds: float) -> None:
    """As time.sleep. Raises Stopped."""
    stop = _mine.stop
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)
        check()


def ended_by(end: Callable[[], Any]) -> AbstractContextManager[None]:
    """Around a wait: `end` ends it, from another thread, and may be called before it has begun. Whatever error that
    makes, it raises Stopped."""
    stop = _mine.stop
    return _NOTHING if stop is None else _ended_by(stop, end)


@contextmanager
def _ended_by(stop: Stop, end: Callable[[], Any]) -> Iterator[None]:
    stop.begin_wait(end)
    try:
        yield
    except BaseException:
        if stop.is_due:
            raise stop.tell() from None
        raise
    finally:
        stop.end_wait()


@contextmanager
def apart() -> Iterator[None]:
    """Around what a verb does for others: it is not stopped in the middle, and told afterwards."""
    stop, _mine.stop = _mine.stop, None
    try:
        yield
    finally:
        _mine.stop = stop


_NOTHING = nullcontext()
