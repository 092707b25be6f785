"""One call of the daemon, with its deadline and its retries.

A call refused for lack of room is sent again, but only if the daemon has not begun
it, and within the deadline. The choice of a link, and lost links, are in links.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tierd.client.connect import cancellation
from tierd.client.connect.credits import pause_s
from tierd.client.connect.link import Link, Meanwhile
from tierd.errors import DeadlineExceeded, InvalidArgument, Overloaded, TierdError

T = TypeVar("T")
Deadline = float | TierdError
"""The deadline of a verb as time.monotonic(), or the error that ends the verb at once."""

LONGEST_S = 86400.0
"""Stands for a timeout of infinity; no wait of the system takes much more than 24 days."""


def seconds_of(timeout_s: Any) -> float:
    """A timeout in seconds, at most LONGEST_S. Raises InvalidArgument."""
    try:
        seconds = min(float(timeout_s), LONGEST_S)
    except (TypeError, ValueError, OverflowError):
        seconds = LONGEST_S if isinstance(timeout_s, int) and timeout_s > 0 else math.nan
    if math.isnan(seconds):
        raise InvalidArgument(f"timeout_s: {timeout_s!r:.80} is no number of seconds; give one, or math.inf")
    return seconds


def deadline_of(timeout_s: Any) -> Deadline:
    """The deadline of a verb that begins now."""
    try:
        return time.monotonic() + seconds_of(timeout_s)
    except InvalidArgument as error:
        return error


def due(deadline: Deadline) -> float:
    """The deadline as a time. Raises the error that is in its place."""
    if isinstance(deadline, TierdError):
        raise deadline
    return deadline


def left_s(deadline: float) -> float:
    """Seconds until a deadline; called before anything that takes time. Raises DeadlineExceeded,
    and Cancelled if the verb was cancelled."""
    cancellation.check()
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("call: its deadline has passed; allow more with timeout_s, or take it as a miss")
    return left


def called(link: Link, method: str, request: Any, deadline: float, *, meanwhile: Meanwhile | None = None) -> Any:
    """One request, one reply."""
    return insisted(
        lambda: link.transport.call(method, request, timeout_s=left_s(deadline), meanwhile=meanwhile), deadline
    )


def insisted(call: Callable[[], T], deadline: float) -> T:
    """Calls; if the daemon refuses for lack of room, calls again after its hint, up to TRIES times."""
    tries = 1
    while True:
        try:
            return call()
        except Overloaded as error:
            pause = pause_s(error, tries=tries, left_s=deadline - time.monotonic())
            if pause is None:
                raise
        tries += 1
        cancellation.pause(pause)
