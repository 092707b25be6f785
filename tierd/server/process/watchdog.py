"""Threads that see to it that the daemon never hangs for good: one looks at the event loop, one at the end.

Purpose: `LoopWatch`, `Deadman`, `end_now`. Non-purpose: keepalives to the supervisor, which come from the loop itself (lifecycle.py). Invariants: time in which
the whole process was stopped does not count; what ends the process says so in the log's last line. A thread that holds the interpreter's lock for
ever stops these threads too: then the supervisor's own watchdog is left.
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
"""Each costs the loop and the thread a wake-up, which are most of what an idle daemon takes of a processor."""


class LoopWatch:
    """As a context manager, on the loop that it watches.

    warning_s: the loop has not turned for so long: every thread's stack goes to the log, once. limit_s: the process ends.
    """

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
        """In ticks, so that a process that was stopped as a whole has waited one of them."""
        waited_s, is_told = 0.0, False
        while not self._beaten.wait(TICK_S) and not self._ended.is_set():
            waited_s += TICK_S
            if waited_s >= self._limit_s:
                self._end()
            if waited_s >= self._warning_s and not is_told:
                is_told = True
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
            faulthandler.disable()  # it would speak once more, after the last line
            os.abort()


class Deadman:
    """Ends the process if it has not ended by itself after so many seconds."""

    def __init__(self, after_s: float) -> None:
        timer = threading.Timer(after_s, end_now, args=[f"not ended {after_s:g} s after it was told to"])
        timer.daemon = True
        timer.start()


def end_now(why: str, *, status: int = 1) -> NoReturn:
    """The end, whatever threads hang. Nothing is lost by it that a crash would not lose."""
    try:
        log.warning("ended at once", why=why)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
