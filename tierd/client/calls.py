"""One call of the daemon, as steps: made again where it was refused for want of room.

Purpose: what every call of a verb passes. Non-purpose: over which link, and what becomes of a lost one (verbs.py). Invariant: a call is made again only
where the daemon has not begun it, and within its deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from tierd.client.connection import Link, Meanwhile
from tierd.client.credits import pause_s
from tierd.client.steps import Call, Pause, Pull, Push, Steps
from tierd.errors import DeadlineExceeded, Overloaded

LONGEST_S = 86400.0
"""What a timeout of infinity comes to; no wait of the system takes much more than 24 days."""
NO_TIMEOUT = "timeout_s: {!r} is no number of seconds; give one, or math.inf"


def seconds_of(timeout_s: Any) -> float:
    """A timeout as it is kept to; NaN: it is none."""
    try:
        return min(float(timeout_s), LONGEST_S)
    except (TypeError, ValueError, OverflowError):
        return LONGEST_S if isinstance(timeout_s, int) and timeout_s > 0 else math.nan


def called(link: Link, method: str, request: Any, deadline: float, *, meanwhile: Meanwhile | None = None) -> Steps[Any]:
    """One request, one reply."""
    return insisted(lambda: Call(link, method, request, left_s(deadline), meanwhile), deadline)


def insisted(make: Callable[[], Call | Pull | Push], deadline: float) -> Steps[Any]:
    """One call; what the daemon refuses for want of room, and has not begun, is called again when it said, a few times. make: the call, anew each time."""
    tries = 1
    while True:
        try:
            return (yield make())
        except Overloaded as error:
            pause = pause_s(error, tries=tries, left_s=deadline - time.monotonic())
            if pause is None:
                raise
        tries += 1
        yield Pause(pause)


def left_s(deadline: float) -> float:
    """Until a time.monotonic(). Raises DeadlineExceeded."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("call: its deadline has passed; allow more with timeout_s, or take it as a miss")
    return left
