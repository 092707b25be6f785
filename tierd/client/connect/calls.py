"""One call of the daemon: made again where it was refused for want of room. And deadlines.

Purpose: what every call of a verb passes. Non-purpose: over which link, and what becomes of a lost one (links.py).
Invariant: a call is made again only
where the daemon has not begun it, and within its deadline.
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
"""Of a verb: a time.monotonic(), or why there is none: the verb ends with that."""

LONGEST_S = 86400.0
"""What a timeout of infinity comes to; no wait of the system takes much more than 24 days."""


def seconds_of(timeout_s: Any) -> float:
    """A timeout as it is kept to. Raises InvalidArgument."""
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
    """Of a verb that begins. Raises the error that is in its place."""
    if isinstance(deadline, TierdError):
        raise deadline
    return deadline


def left_s(deadline: float) -> float:
    """Until a time.monotonic(); asked before whatever takes time. Raises DeadlineExceeded, and Stopped where nobody
    waits for the verb any more."""
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
    """One call; what the daemon refuses for want of room, and has not begun, is called again when it said, a few
    times."""
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
