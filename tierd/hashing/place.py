"""On which processor the hash process is when it has nothing to do.

The kernel wakes a process where it ran last, unless another processor has nothing to do just then. When it has hashed the last pages of a put the hash process is, as a rule, where the client was, who waits for his
answer by then. With his next put he copies there: on two processors the hash process had its turn when he was done, though the daemon's processor was idle by then. So it goes to sleep where the daemon is,
which has little to do once it has asked for hashes.

Purpose: `lie_down_beside`. Non-purpose: where it works, which is the kernel's to choose. Invariant: it may run wherever it might before, but on
processors that its control group is given later.
"""

from __future__ import annotations

import os
from contextlib import suppress

PROCESSOR_FIELD = 36
"""Of /proc/PID/stat, from the first behind the name (proc(5)): on which processor its first thread ran last."""


def processor_of(process: int) -> int:
    """Where its first thread ran last. Raises OSError."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[PROCESSOR_FIELD])


def lie_down_beside(daemon: int) -> None:
    """This thread goes on where the daemon's loop ran last, and may go elsewhere after that. Where it may not, or nobody can say, it stays."""
    with suppress(OSError):
        processor, mine = processor_of(daemon), os.sched_getaffinity(0)
        if processor in mine:
            os.sched_setaffinity(0, {processor})
            os.sched_setaffinity(0, mine)
