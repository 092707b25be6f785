"""What clients tell of gets that they made by themselves: heard one at a time, between whatever else there is to do.

    mailbox ──▶ add ──▶ waiting, alike ones as one ──▶ hear, in a step of the loop each

Purpose: that nobody's calls wait for it, however much is told. Non-purpose: what is told (service.py), when mailboxes are read (mailboxes.py). Invariants: what waits has a bound, of each session and of
all, and beyond it is not heard; whatever hearing one of them comes to, the others are heard.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

import structlog

from tierd.errors import TierdError

log = structlog.get_logger(__name__)

SESSION_LIMIT, LIMIT = 64, 1024
"""Of one session, which tells of at most 32 between two answers (`UNASKED_LIMIT` of tierd/client/mailbox.py) in each of its threads, and of all: 4 KiB each."""


class Hear(Protocol):
    """A session has made a get of this Group by itself, so often. Raises what it raises."""

    def __call__(self, session: int, group: bytes, *, times: int) -> None:
        """So it has."""
        ...


class Hearsay:
    """See the module."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._waiting: dict[tuple[int, bytes], int] = {}
        self._counts: Counter[int] = Counter()

    def add(self, session: int, group: bytes) -> None:
        """To be heard soon, after those that were told last before."""
        key = (session, group)
        times = self._waiting.pop(key, 0)
        if not times:
            if self._counts[session] >= SESSION_LIMIT or len(self._waiting) >= LIMIT:
                return
            self._counts[session] += 1
        self._waiting[key] = times + 1
        if len(self._waiting) == 1 and not times:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        session, group = key = next(iter(self._waiting))
        times = self._waiting.pop(key)
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        try:
            self._hear(session, group, times=times)
        except TierdError:  # of a client that has gone, or says what is none
            log.debug("a get that was told of is none", session=session, exc_info=True)
        except Exception:
            log.exception("a get that was told of was not heard", session=session)
