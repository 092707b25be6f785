"""Cache: the engines' verbs over core, transfers and tiers.

    sessions.py ──▶ gets.py, puts.py ──▶ cache.py: each adds its verbs to those before

Purpose: one object for the server, with the verbs that are neither. Non-purpose: messages (server), bookkeeping (core),
bytes (mover.py, tiers).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tierd.cache.events import Event
from tierd.cache.gets import Gets
from tierd.cache.puts import Puts
from tierd.core.formats.model import StructArray


class Cache(Gets, Puts):
    """One per daemon; every method runs on its event loop."""

    def report_attention(self, session: int, lease: int, group: int, mass: StructArray) -> None:
        """Attention mass per rank and block of a lease's group, added to what the blocks have. Raises NotFound, InvalidArgument."""
        self.tenant_of(session)
        self.core.report_attention(session, lease=lease, group=group, mass=mass, now=self.clock.now())

    async def watch(self, session: int, *, after: int, sees_all: bool) -> AsyncIterator[list[Event]]:
        """Batches of events until the session stops; of its tenant only, unless it sees all. Raises SessionLost."""
        tenant = self.tenant_of(session)
        sees = None if sees_all else lambda n: self.registry.get(n).tenant == tenant
        async for batch in self.events.follow(after, sees=sees, check=lambda: self.tenant_of(session)):
            yield batch
