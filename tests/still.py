"""Stops processes with SIGSTOP."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

LIMIT_S = 30.0


def stand_still(pid: int) -> None:
    """Stops a process, perhaps no child, and waits for it: SIGSTOP takes effect after kill()
    returns, so the process could still handle the sender's next message."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    while set(_states(pid)) - {"T"}:
        assert time.monotonic() < until, f"process {pid}: its threads are {_states(pid)} {LIMIT_S:g} s after SIGSTOP"


def _states(pid: int) -> list[str]:
    """The states of its threads."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states
