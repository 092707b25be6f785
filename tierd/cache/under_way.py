"""Commits under way, by session: what nobody waits for stands back until they have ended.

Purpose: to begin with something when a client is not waiting for its put. Non-purpose: commits themselves. Invariant: who waits here waits for those that had begun
before, and for none that begins meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator


class UnderWay:
    """See the module."""

    def __init__(self) -> None:
        self._ends: defaultdict[int, set[asyncio.Future[None]]] = defaultdict(set)

    @contextlib.contextmanager
    def one(self, session: int) -> Iterator[None]:
        """Around a commit of the session."""
        end = asyncio.get_running_loop().create_future()
        self._ends[session].add(end)
        try:
            yield
        finally:
            end.set_result(None)
            self._ends[session].discard(end)
            if not self._ends[session]:
                del self._ends[session]

    async def ended(self, session: int) -> None:
        """When all that the session has begun have ended."""
        if ends := self._ends.get(session):
            await asyncio.wait(ends)
