"""Processes that are made to stand still."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

LIMIT_S = 30.0


def stand_still(pid: int) -> None:
    """SIGSTOP to a process, perhaps no child of ours, and stopped: the signal comes later than its sender goes on, and what is sent next may be handled before it."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    while set(_states(pid)) - {"T"}:
        assert time.monotonic() < until, f"process {pid}: its threads are {_states(pid)} {LIMIT_S:g} s after SIGSTOP"


def _states(pid: int) -> list[str]:
    """Of its threads."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states
