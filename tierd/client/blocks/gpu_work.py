"""GPU work that must end before a page changes hands.

`pauses` waits for events of any framework, without importing it. The caller records the events. The
GPU is only asked whether the work is done, so a hanging GPU costs a deadline and never a thread.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from tierd.errors import DeadlineExceeded, InvalidArgument

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.00002, 0.001
"""Between two checks of work that is not done."""


def is_done(work: Any) -> bool:
    """Whether work is done: torch (`query`), cupy (`done`) or similar. Raises InvalidArgument."""
    for name in ("query", "done"):
        answer = getattr(work, name, None)
        if answer is not None:
            return bool(answer() if callable(answer) else answer)
    raise InvalidArgument(
        f"after: {type(work).__name__} has neither query() nor done; pass an event or a stream of torch or cupy"
    )


def pauses(work: Iterable[Any], deadline: float) -> Generator[float, None, None]:
    """Yields pauses in seconds until all work is done. Raises DeadlineExceeded, InvalidArgument."""
    for each in work:
        pause_s = FIRST_PAUSE_S
        while not is_done(each):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"after: {type(each).__name__} is not done in time; nothing was committed or released, so try again when it is"
                )
            yield pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
