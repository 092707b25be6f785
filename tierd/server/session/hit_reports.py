"""Counts clients' one-sided gets and lookups, one report at a time between other work.

    notices ──▶ add ──▶ waiting, equal ones merged ──▶ handle, each in its own step of the loop

So reports never delay calls. Waiting reports have a bound per session and in all; more are dropped.
A repeated report keeps its place, so each is processed in time. An error in one does not stop the
others. A session's reports are processed before its end. service.py reads their content,
notice_polling.py decides when notices are read.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from typing import Protocol

import structlog

from tierd.errors import TierdError

log = structlog.get_logger(__name__)

USED, LOOKED_UP = struct.pack("<Q", 0), struct.pack("<Q", (1 << 64) - 1)
"""Prefixes of a notice without leases. A Group follows that the client got, or looked up, without a
call."""
SESSION_LIMIT, LIMIT = 64, 1024
"""Limits per session and in all.

A client thread reports at most 32 between two answers (`UNASKED_LIMIT` of
tierd/client/session/notices.py), of 20 KiB each at most (`MESSAGE_BYTES` of notices.py)."""
TIMES_LIMIT = 256
"""Equal reports that count. While they wait, more of them are ignored."""


class Handler(Protocol):
    """Processes a report that a session made `times` times. May raise."""

    def __call__(self, session: int, report: bytes, *, times: int) -> None:
        """See the class."""
        ...


class HitReports:
    """The waiting reports of all sessions."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._waiting: dict[tuple[int, bytes], int] = {}
        self._counts: Counter[int] = Counter()
        self._is_due = False

    def add(self, session: int, report: bytes) -> None:
        """Adds a report behind those that wait."""
        key = (session, report)
        times = self._waiting.get(key, 0)
        if not times:
            if self._counts[session] >= SESSION_LIMIT or len(self._waiting) >= LIMIT:
                return
            self._counts[session] += 1
        self._waiting[key] = min(times + 1, TIMES_LIMIT)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def finish(self, session: int) -> None:
        """Processes a session's reports before it ends."""
        for its, report in [key for key in self._waiting if key[0] == session]:
            self._handle_one(its, report)

    def _next(self) -> None:
        self._is_due = len(self._waiting) > 1
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)
        if self._waiting:
            self._handle_one(*next(iter(self._waiting)))

    def _handle_one(self, session: int, report: bytes) -> None:
        times = self._waiting.pop((session, report))
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session]
        try:
            self._handle(session, report, times=times)
        except TierdError:  # the client has gone, or the report is invalid
            log.debug("hit report is invalid", session=session, exc_info=True)
        except Exception:
            log.exception("hit report not handled", session=session)
