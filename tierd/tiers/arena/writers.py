"""Processes beside the daemon that write to a tier's memory by themselves: noted before the first byte, waited for by the next daemon.

Purpose: `note_writer`, `await_writers`. Non-purpose: ending them. Invariants: a process that may write is in the file before it can; memory that a former life
left is in nobody's hands before every process that its file names is gone, since a GPU that is slow to die may still be copying there.

A file of lines `pid start_time`, beside the tables of the tier. What it says of another boot, or of another container's processes, is of processes that are gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tierd.errors import TierFailed
from tierd.linux.processes import find_start_time, has_ended, open_process

NAME = "writers.txt"
PATIENCE_S = 60.0
"""For a killed process whose driver is still letting go."""


def note_writer(tables: Path, pid: int) -> None:
    """Before it may write. Those that are gone are forgotten. Raises OSError, for a process that /proc hides as well: the next daemon could not wait for it."""
    start_time = find_start_time(pid)
    if start_time is None:
        if _is_there(pid):
            raise PermissionError(
                f"/proc/{pid}/stat cannot be read; mount /proc without hidepid, or run tierd with ProtectProc=default"
            )
        return
    lines = dict.fromkeys(f"{pid} {start}\n" for pid, start in (*_living(tables), (pid, start_time)))
    new = tables / f"{NAME}.new"
    new.write_text("".join(lines))
    new.replace(tables / NAME)


def await_writers(tables: Path, *, what: str) -> None:
    """Returns when none of them is left. what: the tier, for the message. Raises TierFailed, OSError."""
    until = time.monotonic() + PATIENCE_S
    for pid, start in _living(tables):
        pidfd = open_process(pid, start_time=start)
        if pidfd is None:
            continue
        try:
            if not has_ended(pidfd, within_s=until - time.monotonic()):
                raise TierFailed(
                    f"{what}: process {pid} of a former daemon may still write to {tables} and was not gone after {PATIENCE_S:g} s; end it, or begin "
                    "without what lies there (`tierd purge`)"
                )
        finally:
            os.close(pidfd)
    (tables / NAME).unlink(missing_ok=True)


def _is_there(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not has_ended(pidfd)
    finally:
        os.close(pidfd)


def _living(tables: Path) -> Iterator[tuple[int, int]]:
    """Those of the file that are there; what is no line of it, and a file that is not there, name nobody."""
    try:
        text = (tables / NAME).read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        pid, _, start = line.partition(" ")
        if pid.isdigit() and start.isdigit() and find_start_time(int(pid)) == int(start):
            yield int(pid), int(start)
