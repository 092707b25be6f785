"""Other processes that write to a tier's memory: recorded before the first byte, awaited by the
next daemon.

This module does not end them. A process is in the file before it can write. The next daemon uses
inherited memory only once every recorded process is gone. A GPU that is slow to die may still be
copying there. The file holds lines `pid start_time`, beside the tables of the tier. Entries from
another boot or container are of processes that are gone.
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
"""Wait for a killed process whose driver is still releasing memory."""


def note_writer(tables: Path, pid: int) -> None:
    """Record a process before it may write; drops processes that are gone. Raises OSError, also for
    a process that /proc hides, which the next daemon could not wait for."""
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
    """Wait until all are gone. what: the tier, for the message. Raises TierFailed, OSError."""
    until = time.monotonic() + PATIENCE_S
    for pid, start in _living(tables):
        pidfd = open_process(pid, start_time=start)
        if pidfd is None:
            continue
        try:
            if not has_ended(pidfd, within_s=until - time.monotonic()):
                raise TierFailed(
                    f"{what}: process {pid} of an earlier daemon may still write to {tables} and runs after"
                    f" {PATIENCE_S:g} s; end it, or discard the files there (`tierd purge`)"
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
    """Recorded processes that are alive. A missing file and malformed lines are ignored."""
    try:
        text = (tables / NAME).read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        pid, _, start = line.partition(" ")
        if pid.isdigit() and start.isdigit() and find_start_time(int(pid)) == int(start):
            yield int(pid), int(start)
