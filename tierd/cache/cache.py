"""Cache: the engines' verbs over core, transfers and tiers.

    sessions.py ──▶ gets.py, puts.py ──▶ cache.py: each adds its verbs to those before

One object for the server. This module adds the verbs that are neither gets nor puts. The server
handles messages, the core the bookkeeping, mover.py and tiers the bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tierd.cache.events import Event
from tierd.cache.gets import Gets
from tierd.cache.puts import Puts
from tierd.core.formats.model import StructArray


class Cache(Gets, Puts):
    """One per daemon. Every method runs on its event loop."""

    def report_attention(self, session: int, lease: int, group: int, mass: StructArray) -> None:
        """Adds attention mass per rank and block of a lease's group to the blocks' totals. Raises
        NotFound, InvalidArgument."""
        self.tenant_of(session)
        self.core.report_attention(session, lease=lease, group=group, mass=mass, now=self.clock.now())

    async def watch(self, session: int, *, after: int, sees_all: bool) -> AsyncIterator[list[Event]]:
        """Yields batches of events until the session stops. Raises SessionLost. A session sees its
        own tenant only, unless sees_all."""
        tenant = self.tenant_of(session)
        sees = None if sees_all else lambda n: self.registry.get(n).tenant == tenant
        async for batch in self.events.follow(after, sees=sees, check=lambda: self.tenant_of(session)):
            yield batch
