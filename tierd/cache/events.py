"""Block events, as a bounded log that watchers follow.

A watcher sees each stored and removed block in order, or a LOST event if some were dropped. The log
keeps the last `limit` events, with LOG_BYTES of hashes at most. No batch exceeds a message's limit.
Sequence numbers rise by one. One of an earlier daemon counts as a gap. The daemon never waits for a
watcher.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from itertools import islice

LOG_BYTES = 32 << 20
"""Limit of hash bytes in the log."""
EVENT_BYTES = 1 << 20
"""Limit of hash bytes in one event. More blocks make several events."""
BATCH_EVENTS = 256
BATCH_BYTES = 2 << 20
"""Limit of hash bytes in one batch. Its last event may go beyond."""


class EventKind(enum.IntEnum):
    """As in cache.proto."""

    STORED = 0
    REMOVED = 1
    LOST = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Event:
    """hashes: 32 bytes per block, all of one namespace id and one tier."""

    sequence: int
    kind: EventKind
    tier: int
    namespace: int
    hashes: bytes
    reason: str


class EventLog:
    """The last events, and a bell that wakes watchers."""

    def __init__(self, *, limit: int, first: int = 1) -> None:
        """first: sequence number of the first event, far from those of earlier daemons."""
        self._events: deque[Event] = deque()
        self._limit = limit
        self._bytes = 0
        self._last = first - 1
        self._bell = asyncio.Event()
        self._is_closed = False

    @property
    def last(self) -> int:
        """Sequence number of the last event, or of the one before the first."""
        return self._last

    def close(self) -> None:
        """Lets every watcher finish after the events that the log has now."""
        self._is_closed = True
        self._bell.set()

    def add(self, kind: EventKind, *, tier: int, namespace: int, hashes: bytes, reason: str) -> None:
        """Appends an event, or several if there are many hashes, and wakes the watchers."""
        for start in range(0, max(len(hashes), 1), EVENT_BYTES):
            part = hashes[start : start + EVENT_BYTES]
            self._last += 1
            self._events.append(Event(self._last, kind, tier, namespace, part, reason))
            self._bytes += len(part)
        while len(self._events) > self._limit or self._bytes > LOG_BYTES:
            self._bytes -= len(self._events.popleft().hashes)
        self.ring()

    def ring(self) -> None:
        """Wakes the watchers: there is a new event, or a session has ended."""
        self._bell.set()
        self._bell = asyncio.Event()

    async def follow(
        self,
        after: int = 0,
        *,
        sees: Callable[[int], bool] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[list[Event], None]:
        """Yields batches of events after a sequence number (0: from now on), until `close`.

        sees: whether the watcher may see a namespace id; None: it sees all. check: raises when the
        watcher must stop. A gap is one LOST event.
        """
        if after > self._last:
            yield [Event(self._last, EventKind.LOST, 0, 0, b"", "the watcher followed another daemon")]
        position = min(after or self._last, self._last)
        while True:
            bell = self._bell
            check()
            batch = self._since(position)
            if batch:
                position = batch[-1].sequence
                seen = [e for e in batch if sees is None or e.kind is EventKind.LOST or sees(e.namespace)]
                if seen:
                    yield seen
            elif self._is_closed:
                return
            else:
                await bell.wait()

    def _since(self, position: int) -> list[Event]:
        if not self._events or self._events[-1].sequence <= position:
            return []
        oldest = self._events[0].sequence
        batch, size = [], 0
        if position + 1 < oldest:
            batch.append(Event(oldest - 1, EventKind.LOST, 0, 0, b"", "the watcher was too slow"))
        for event in islice(self._events, max(0, position + 1 - oldest), None):
            batch.append(event)
            size += len(event.hashes)
            if len(batch) >= BATCH_EVENTS or size >= BATCH_BYTES:
                break
        return batch
