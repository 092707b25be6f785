"""Clients tell of gets and lookups that they made without a call; the daemon hears one at a time, between its other
work.

    mailbox ──▶ add ──▶ waiting, alike ones as one ──▶ hear, in a step of the loop each

Purpose: that nobody's calls wait for it, however much is told. Non-purpose: what is told (service.py), when mailboxes are read (notice_polling.py). Invariants: what waits has a bound, of each session and of
all, and beyond it is not heard; what is told again keeps its place, so none is passed over for ever; whatever hearing one of them comes to, the others are heard; what a session has told before its end
is heard before that.
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
"""Begin a message of the mailbox that is about no leases; a Group follows, which the client has got, or looked up,
without a call."""
SESSION_LIMIT, LIMIT = 64, 1024
"""Of one session, which tells of at most 32 between two answers (`UNASKED_LIMIT` of tierd/client/session/notices.py) in each
of its threads, and of all: 20 KiB each at most (`MESSAGE_BYTES` of notices.py)."""
TIMES_LIMIT = 256
"""Alike ones that count; beyond, while they wait, they are heard as so many."""


class Hear(Protocol):
    """A session has told this, so often. Raises what it raises."""

    def __call__(self, session: int, told: bytes, *, times: int) -> None:
        """So it has."""
        ...


class HitReports:
    """See the module."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._waiting: dict[tuple[int, bytes], int] = {}
        self._counts: Counter[int] = Counter()
        self._is_due = False

    def add(self, session: int, told: bytes) -> None:
        """To be heard soon, after those that wait."""
        key = (session, told)
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
        """The session ends: what it has told is heard now."""
        for its, told in [key for key in self._waiting if key[0] == session]:
            self._hear_one(its, told)

    def _next(self) -> None:
        self._is_due = len(self._waiting) > 1
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)
        if self._waiting:
            self._hear_one(*next(iter(self._waiting)))

    def _hear_one(self, session: int, told: bytes) -> None:
        times = self._waiting.pop((session, told))
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session]
        try:
            self._hear(session, told, times=times)
        except TierdError:  # of a client that has gone, or says what is none
            log.debug("a get that was told of is none", session=session, exc_info=True)
        except Exception:
            log.exception("a get that was told of was not heard", session=session)
