"""Threads for the verbs of an AsyncClient.

Purpose: one verb, one thread, from its first step to its last: a hop to it and one back is all that asyncio adds to what Client does. Non-purpose: verbs, how they are stopped (stopping.py).
Invariants: no more than THREADS of a client run at one time, the others wait in the order in which they came, each for its own time; a verb that is cancelled has ended before its caller hears of it, or STOP_S later,
and copies nothing after that; a child of a fork has threads of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tierd.client import forks
from tierd.client.stopping import Stop
from tierd.errors import DeadlineExceeded

T = TypeVar("T")

THREADS = 128
"""More than a daemon gives credits for, as a rule: then it is for these that verbs wait."""
STOP_S = 1.0
"""How long a verb that is cancelled may take to end: a copy goes on to its end, and a daemon that hangs may be asked for a last answer."""


class Threads:
    """Of one client, in whatever loop it is used."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        forks.register(self)

    async def run(self, verb: Callable[[], T], *, timeout_s: float) -> T:
        """The verb's result. Raises what it raises, and DeadlineExceeded where it has not begun within its time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tierd-client")
        stop, loop = Stop(), asyncio.get_running_loop()
        work = self._pool.submit(stop.around, verb)
        result, patience = asyncio.wrap_future(work), loop.call_later(timeout_s, work.cancel)
        result.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if result.cancelled() and not _is_cancelled():
                raise DeadlineExceeded(
                    f"client: {THREADS} calls in progress, and none ended in time; call less at one time, or allow more"
                ) from None
            stop.set()
            if not work.cancel():
                await asyncio.wait({result}, timeout=STOP_S)
            raise
        finally:
            patience.cancel()

    def close(self) -> None:
        """Takes no more; those under way go on."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def forked(self) -> None:
        """In a child: the threads are the parent's."""
        forks.abandon(self._pool)
        self._pool = None


def _retrieve(result: asyncio.Future[T]) -> None:
    """What a verb ended with that nobody waits for is nobody's to log."""
    if not result.cancelled():
        result.exception()


def _is_cancelled() -> bool:
    """Whether it is the caller's task that somebody has cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
