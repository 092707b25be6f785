"""Credits: the number of calls that this client may have in progress, and a turn for each.

The daemon's hello sets the number, so a client that keeps to it is not refused. Calls are in
local.py and grpc_calls.py. Waiting calls get their turns in order. If a waiting call has timed out,
its turn goes to the next one.
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
"""Calls that only release something; the daemon refuses none of them."""
TRIES = 5
"""Attempts of one call that is refused with a hint."""


class Credits:
    """count: turns at one time; 0: the daemon set no limit, so no call waits. Threads may share it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._turn = threading.Lock()
        self.on_wait: Callable[[float], None] = lambda _deadline: None
        """Called with the deadline when a call must wait for a turn, so that spare turns are given up."""

    @contextlib.contextmanager
    def turn(self, method: str, *, timeout_s: float) -> Iterator[float]:
        """Around a call; yields the seconds left for it. Raises Overloaded if no turn comes in time."""
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
        """A future to wait for; None: the call may go at once."""
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
        """Ends the call's turn; the first waiting call gets it."""
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
        """The call no longer waits; a turn granted meanwhile goes to the next call."""
        if waiter.cancel():
            with self._turn, contextlib.suppress(ValueError):
                self._waiting.remove(waiter)
        else:
            waiter.result()  # it is being granted at this moment
            self.give("")

    def too_late(self, timeout_s: float) -> Overloaded:
        """The error for a call that got no turn in time."""
        return Overloaded(
            f"client: {self.count} calls in progress use all credits, and none ended within {timeout_s:.3g} s;"
            " make fewer calls at one time, or allow more with timeout_s"
        )


def pause_s(error: Overloaded, *, tries: int, left_s: float) -> float | None:
    """Seconds until a refused call is sent again, at random to spread retries; None: do not."""
    if not error.retry_after_s or tries >= TRIES:
        return None
    pause = error.retry_after_s * random.uniform(1.0, 2.0)
    return pause if pause < left_s else None
