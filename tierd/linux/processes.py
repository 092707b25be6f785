"""Other processes: identified by number and start time, and watched until they end.

A returned pidfd is of the requested process, not of a later one with its number.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

_START_TIME_FIELD = 19
"""Of /proc/<pid>/stat, counted from the field behind the closing parenthesis of the name."""


def open_process(pid: int, *, start_time: int) -> int | None:
    """A pidfd of the process with this number and start time; None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # Read after the descriptor is open: from here on the number can only be this process's own.
    if find_start_time(pid) == start_time and not has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def has_ended(pidfd: int, *, within_s: float = 0.0) -> bool:
    """Whether the process has exited, with its memory and descriptors; waits up to within_s."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, within_s) * 1000))


def find_start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of the process; None if it is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[_START_TIME_FIELD]) if len(fields) > _START_TIME_FIELD else None
