"""Threads for the verbs of an AsyncClient.

Each verb runs in one thread from start to end, so asyncio adds one hop to it and one back. At most
THREADS of a client run at one time. Others wait in order of arrival, each for its own timeout. A
cancelled verb ends before its caller resumes, or within STOP_S; it copies nothing after that. The
cancellation itself is in cancellation.py. A forked child has threads of its own. At exit the
interpreter waits for verbs that were not cancelled, as for all pool threads; each has its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from tierd import tracing
from tierd.client.connect import forks
from tierd.client.connect.cancellation import Cancellation
from tierd.errors import DeadlineExceeded

T = TypeVar("T")

THREADS = 128
"""Usually more than the daemon's credits, so verbs wait for credits and not for threads."""
LEAST_S = 0.1
"""Minimum time for a verb to start, even if its timeout is shorter; the verb then reports that."""
STOP_S = 1.0
"""Time for a cancelled verb to end: its copy goes on, and it may send one last request."""


class NotBegun(DeadlineExceeded):
    """No step of the verb was done."""


class Threads:
    """The threads of one client, in whatever loop it is used."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        forks.register(self)

    async def run(self, verb: Callable[[], T], *, timeout_s: float) -> T:
        """The verb's result. Raises what it raises, and NotBegun if no thread took it in time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tierd-client")
        stop, loop = Cancellation(), asyncio.get_running_loop()
        work = self._pool.submit(stop.around, tracing.here(verb))
        result, patience = asyncio.wrap_future(work), loop.call_later(max(timeout_s, LEAST_S), work.cancel)
        try:
            await asyncio.wait({result})
        except asyncio.CancelledError as error:
            stop.set()
            work.cancel()
            await _ended(result)
            del work, result  # an error that is kept also keeps its frames, and so what the verb was given
            raise error.with_traceback(None) from None
        finally:
            patience.cancel()
        if result.cancelled():
            raise NotBegun(
                f"client: all {THREADS} threads were busy until its deadline; make fewer at a time, or allow more"
            )
        return result.result()

    def close(self) -> None:
        """Takes no more verbs; running ones go on."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def forked(self) -> None:
        """In a child process: abandons the parent's threads."""
        forks.abandon(self._pool)
        self._pool = None


async def _ended(result: asyncio.Future[T]) -> None:
    """Waits for the end, at most STOP_S, even if cancelled again. The verb's own error is not logged."""
    result.add_done_callback(lambda done: done.cancelled() or done.exception())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STOP_S
    while not result.done() and (left_s := deadline - loop.time()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait({result}, timeout=left_s)
