"""Best effort: a failure becomes a smaller hit, and at most one log line a minute.

Operators learn of failures, and the worker's log is not flooded. Metrics are elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tierd.errors import DeadlineExceeded, InvalidArgument, TierdError

log = logging.getLogger("tierd.client")

T = TypeVar("T")
INTERVAL_S = 60.0
PROBE_S = 0.1
"""Time limit of a probe, which asks whether the daemon answers."""
ARGUMENT_ERRORS = (TypeError, ValueError, OverflowError, AttributeError, LookupError, BufferError)
"""Python raises these for arguments of a wrong kind."""
_TEXT = "arguments: {} ({}); see the docstring of the method"


class BestEffort:
    """Failures of one client. is_silent: a call timed out, and no probe has succeeded since."""

    def __init__(self, target: str, *, best_effort: bool) -> None:
        self.is_silent = False
        self._target, self._best_effort = target, best_effort
        self._next = 0.0
        self._unsaid = 0

    def shrunk(self, work: Callable[[], T], nothing: Callable[[], T]) -> T:
        """Runs work; with best_effort a failure gives `nothing` instead. Raises InvalidArgument
        for Python's own argument errors, and otherwise what `work` raises."""
        begun = time.monotonic()
        try:
            return work()
        except Exception as raised:
            if not self._best_effort and not _is_of_python(raised):
                raise
            error = InvalidArgument(_TEXT.format(raised, type(raised).__name__)) if _is_of_python(raised) else raised
            try:
                if not self._best_effort:
                    raise error from raised
                # A call with less time than a probe says nothing about the daemon.
                self.is_silent |= isinstance(error, DeadlineExceeded) and time.monotonic() - begun >= PROBE_S
                self.note(error)
                return nothing()
            finally:
                del error  # otherwise its traceback would keep the call's objects until garbage collection

    def note(self, error: Exception) -> None:
        """Logs the error, at most once a minute, with the number of errors not logged since."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        rest = f" ({self._unsaid} more since the last line)" if self._unsaid else ""
        log.warning("tierd at %s: %s: %s%s; served as misses", self._target, type(error).__name__, str(error), rest)
        self._next, self._unsaid = now + INTERVAL_S, 0


def _is_of_python(error: Exception) -> bool:
    return isinstance(error, ARGUMENT_ERRORS) and not isinstance(error, TierdError)
