"""The effect of a fork on clients: the child starts afresh and uses no object of its parent's.

A fork waits for calls in flight, because gRPC's own preparation for a fork works only while no
thread is inside gRPC. It never waits longer than FORK_WAIT_S. Each client is notified in the child.
The child never uses, closes or frees an object of the parent's gRPC.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from tierd.errors import Unsupported

FORK_WAIT_S = 1.0
"""How long a fork waits for calls in flight."""


class Forkable(Protocol):
    """An object that must be notified in a forked child."""

    def forked(self) -> None:
        """Called in the child before any other code runs there."""


class Bound:
    """An object that works only in the process that made it."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        """For pickle and copy. Raises Unsupported."""
        name = type(self).__name__
        raise Unsupported(
            f"{name}: it belongs to process {os.getpid()} and cannot be pickled or copied; make one in each process, and send tokens, hashes or numpy.array(view)"
        )


class _Gate:
    """Calls in flight, and a fork that waits for them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls = 0
        self.is_forking = False

    def begin(self) -> None:
        """Begins a call; waits while a fork is in progress."""
        with self.changed:
            if self.is_forking:
                self.changed.wait_for(lambda: not self.is_forking, timeout=FORK_WAIT_S)
            self.calls += 1

    def end(self) -> None:
        """Ends a call."""
        with self.changed:
            self.calls -= 1
            if self.is_forking:
                self.changed.notify_all()


_gate = _Gate()
_forkables: weakref.WeakSet[Any] = weakref.WeakSet()
_abandoned: list[Any] = []
"""The parent's objects, kept so that they are never collected in the child."""


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Around one short call of gRPC."""
    gate = _gate
    gate.begin()
    try:
        yield
    finally:
        gate.end()


def register(forkable: Forkable) -> None:
    """Notifies the object of forks for as long as it lives."""
    _forkables.add(forkable)


def abandon(thing: object) -> None:
    """Keeps an object for ever, because the child must not run its destructor."""
    _abandoned.append(thing)


def _before() -> None:
    deadline = time.monotonic() + FORK_WAIT_S
    with _gate.changed:
        _gate.is_forking = True
        _gate.changed.wait_for(lambda: _gate.calls == 0, timeout=max(0.0, deadline - time.monotonic()))


def _after_in_parent() -> None:
    with _gate.changed:
        _gate.is_forking = False
        _gate.changed.notify_all()


def _after_in_child() -> None:
    global _gate  # noqa: PLW0603 - the old one's lock may be held by a thread that does not exist here
    _gate = _Gate()
    for forkable in list(_forkables):
        forkable.forked()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
