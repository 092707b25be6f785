"""Threads that end a hanging daemon: one watches the event loop, one the shutdown.

`LoopWatch`, `Deadman` and `end_now` do this. Time in which the whole process was stopped does not
count. The log's last line names what ended the process. A thread that holds the interpreter's lock
for ever stops these threads too. Then the supervisor's watchdog remains; lifecycle.py sends its
keepalives from the loop itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn, Self

import structlog

from tierd.metrics import Metrics

log = structlog.get_logger(__name__)

TICK_S = 0.5
"""Each tick wakes the loop and the thread, most of an idle daemon's processor time."""


class LoopWatch:
    """A context manager on the loop that it watches.

    warning_s: after this hang it logs every thread's stack, once.
    limit_s: after this it ends the process."""

    def __init__(self, metrics: Metrics, *, warning_s: float, limit_s: float) -> None:
        self._lag = metrics.loop_lag
        self._warning_s, self._limit_s = warning_s, limit_s
        self._ended = threading.Event()
        self._beaten = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tierd-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._beaten.clear()
            self._loop.call_soon_threadsafe(self._beat, time.monotonic())
            self._await_beat()
            self._ended.wait(TICK_S)

    def _await_beat(self) -> None:
        """Waits in ticks, so that a stop of the whole process counts as one tick."""
        waited_s, has_warned = 0.0, False
        while not self._beaten.wait(TICK_S) and not self._ended.is_set():
            waited_s += TICK_S
            if waited_s >= self._limit_s:
                self._end()
            if waited_s >= self._warning_s and not has_warned:
                has_warned = True
                log.warning("event loop not turning", seconds=waited_s)
                faulthandler.dump_traceback(sys.stderr)

    def _beat(self, asked: float) -> None:
        self._lag.observe(time.monotonic() - asked)
        self._beaten.set()

    def _end(self) -> NoReturn:
        last = f"tierd: the event loop has not turned for {self._limit_s:g} s; aborted, for the supervisor to start it again\n"
        try:
            faulthandler.dump_traceback(sys.stderr)
            os.write(sys.stderr.fileno(), last.encode())
        finally:
            faulthandler.disable()  # otherwise it would write after the last line
            os.abort()


class Deadman:
    """Ends the process if it is still running after so many seconds."""

    def __init__(self, after_s: float) -> None:
        timer = threading.Timer(after_s, end_now, args=[f"still running {after_s:g} s after the order to end"])
        timer.daemon = True
        timer.start()


def end_now(why: str, *, status: int = 1) -> NoReturn:
    """Ends the process at once, even if threads hang. It loses no more than a crash would."""
    try:
        log.warning("ended at once", why=why)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
