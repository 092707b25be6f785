"""Work on a GPU that must have ended before a page changes hands.

Purpose: `finished`, a wait that any framework's events can be given to. Non-purpose: recording them, CUDA. Invariants: nothing is asked of the GPU
but whether the work is done, so a GPU that hangs costs a deadline and never a thread; no framework is imported.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from tierd.errors import DeadlineExceeded, InvalidArgument

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.00002, 0.001
"""Between two looks at work that is not done."""


def is_done(work: Any) -> bool:
    """Of an event or a stream: of torch (`query`), of cupy (`done`), or anything alike. Raises InvalidArgument."""
    for name in ("query", "done"):
        told = getattr(work, name, None)
        if told is not None:
            return bool(told() if callable(told) else told)
    raise InvalidArgument(
        f"after: {type(work).__name__} has neither query() nor done; pass an event or a stream of torch or cupy"
    )


def pauses(work: Iterable[Any], deadline: float) -> Generator[float, None, None]:
    """Pauses to make, in seconds, until all of the work is done. deadline: of time.monotonic(). Raises DeadlineExceeded, InvalidArgument."""
    for each in work:
        pause_s = FIRST_PAUSE_S
        while not is_done(each):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"after: {type(each).__name__} is not done in time; nothing was committed or released, so try again when it is"
                )
            yield pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
