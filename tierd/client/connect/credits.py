"""Credits: how many calls this client may have in progress, and a turn for each.

Purpose: keep to what the daemon's hello said, so that nothing has to be refused. Non-purpose: calls (local.py, grpc_calls.py). Invariants: no more turns are out
than there are credits; those who wait are served in order; a turn that comes too late for its waiter goes to the next.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate

from tierd.client.connect import cancellation
from tierd.errors import Overloaded

UNPAID = frozenset({"Release", "Abort"})
"""Calls that only give back; the daemon refuses none of them."""
TRIES = 5
"""Of one call that is refused with a hint."""


class Credits:
    """count: turns at one time; 0: the daemon has named no number, so every call has its turn at once. Threads may share it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._turn = threading.Lock()
        self.on_wait: Callable[[float], None] = lambda _deadline: None
        """Called where a call has to wait for a turn, with its deadline: for who has one that he can do without."""

    @contextlib.contextmanager
    def turn(self, method: str, *, timeout_s: float) -> Iterator[float]:
        """Around a call; the seconds left for it. Raises Overloaded if no turn comes in time."""
        deadline = time.monotonic() + timeout_s
        waiter = self.ask(method)
        if waiter is not None:
            try:
                self.on_wait(deadline)
                with cancellation.ended_by(waiter.cancel):
                    waiter.result(max(0.0, deadline - time.monotonic()))
            except BaseException as error:
                self.withdraw(waiter)
                if isinstance(error, TooLate):
                    raise self.too_late(timeout_s) from None
                raise
        try:
            yield max(0.0, deadline - time.monotonic())
        finally:
            self.give(method)

    def ask(self, method: str) -> Future[None] | None:
        """A turn to wait for; None: go."""
        if not self.count or method in UNPAID:
            return None
        with self._turn:
            if self._free:
                self._free -= 1
                return None
            waiter: Future[None] = Future()
            self._waiting.append(waiter)
            return waiter

    def give(self, method: str) -> None:
        """The call has ended: the turn goes to whoever waits first."""
        if not self.count or method in UNPAID:
            return
        while True:
            with self._turn:
                if not self._waiting:
                    self._free += 1
                    return
                waiter = self._waiting.popleft()
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
                return

    def withdraw(self, waiter: Future[None]) -> None:
        """Nobody waits for it any more; a turn that it was given in this moment goes on."""
        if waiter.cancel():
            with self._turn, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)
        else:
            waiter.result()  # it is being given in this moment
            self.give("")

    def too_late(self, timeout_s: float) -> Overloaded:
        """What is raised where no turn came in time."""
        return Overloaded(
            f"client: {self.count} calls in progress, its credits with the daemon, and none ended within {timeout_s:.3g} s;"
            " call less at one time, or allow more with timeout_s"
        )


def pause_s(error: Overloaded, *, tries: int, left_s: float) -> float | None:
    """How long to wait before a refused call is made again, at random so that not all come at once; None: it is not."""
    if not error.retry_after_s or tries >= TRIES:
        return None
    pause = error.retry_after_s * random.uniform(1.0, 2.0)
    return pause if pause < left_s else None
