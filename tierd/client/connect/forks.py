"""What a fork does to clients: the child starts afresh, and touches nothing of its parent's.

Purpose: a moment without calls for the fork, and word to every client in the child. Non-purpose: connecting. Invariants: gRPC's own
preparation for a fork only works while no other thread is inside it, so a fork waits for calls in flight, but never for long;
in the child no object of the parent's gRPC is used, not even to close or to free it.
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
    """Something that must know that it is in a child now."""

    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


class Bound:
    """What is of use in the process that made it alone."""

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
        """A call begins; not in the middle of a fork."""
        with self.changed:
            if self.is_forking:
                self.changed.wait_for(lambda: not self.is_forking, timeout=FORK_WAIT_S)
            self.calls += 1

    def end(self) -> None:
        """A call has ended."""
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
    """Word of forks goes to it for as long as it lives."""
    _forkables.add(forkable)


def abandon(thing: object) -> None:
    """Keeps something for ever, in a child that must not run its destructor."""
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
