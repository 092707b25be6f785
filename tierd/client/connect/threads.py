"""Threads for the verbs of an AsyncClient.

Purpose: one verb, one thread, from its first step to its last: a hop to it and one back is all that asyncio adds to what Client does. Non-purpose: verbs, how they are stopped (cancellation.py).
Invariants: no more than THREADS of a client run at one time, the others wait in the order in which they came, each for its own time; a verb that is cancelled has ended before its caller hears of it, or STOP_S later,
and copies nothing after that; a child of a fork has threads of its own. An interpreter that ends
waits for verbs that nobody has cancelled, as it does for all threads of a pool; each has its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from tierd.client.connect import forks
from tierd.client.connect.cancellation import Stop
from tierd.errors import DeadlineExceeded

T = TypeVar("T")

THREADS = 128
"""More than a daemon gives credits for, as a rule: then it is for these that verbs wait."""
LEAST_S = 0.1
"""Within which a verb is begun, however little time it has: how little it says itself."""
STOP_S = 1.0
"""How long a verb that is cancelled may take to end: a copy goes on to its end, and a daemon that hangs may be asked for a last answer."""


class NotBegun(DeadlineExceeded):
    """Nothing of the verb was done."""


class Threads:
    """Of one client, in whatever loop it is used."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        forks.register(self)

    async def run(self, verb: Callable[[], T], *, timeout_s: float) -> T:
        """The verb's result. Raises what it raises, and NotBegun where no thread took it within its time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tierd-client")
        stop, loop = Stop(), asyncio.get_running_loop()
        work = self._pool.submit(stop.around, verb)
        result, patience = asyncio.wrap_future(work), loop.call_later(max(timeout_s, LEAST_S), work.cancel)
        try:
            await asyncio.wait({result})
        except asyncio.CancelledError as error:
            stop.set()
            work.cancel()
            await _ended(result)
            del work, result  # with what the verb was given: who keeps the error keeps the frames that it came through
            raise error.with_traceback(None) from None
        finally:
            patience.cancel()
        if result.cancelled():
            raise NotBegun(
                f"client: none of its {THREADS} threads had time for the call before its deadline; call less at one time, or allow more"
            )
        return result.result()

    def close(self) -> None:
        """Takes no more; those under way go on."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def forked(self) -> None:
        """In a child: the threads are the parent's."""
        forks.abandon(self._pool)
        self._pool = None


async def _ended(result: asyncio.Future[T]) -> None:
    """Until it is, for STOP_S at most, however often that is cancelled too. What it ends with is nobody's to log."""
    result.add_done_callback(lambda done: done.cancelled() or done.exception())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STOP_S
    while not result.done() and (left_s := deadline - loop.time()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait({result}, timeout=left_s)
