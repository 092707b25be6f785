"""What the event log promises."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tierd.cache.events import EventKind, EventLog


def _add(log: EventLog, count: int, *, namespace: int = 1) -> None:
    for _ in range(count):
        log.add(EventKind.STORED, tier=0, namespace=namespace, hashes=bytes(32), reason="none")


async def test_watcher_sees_what_follows() -> None:
    """A watcher that waits gets the next event, and not those before it came."""
    log = EventLog(limit=10)
    _add(log, 1)
    async with aclosing(log.follow()) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        _add(log, 2)
        async with asyncio.timeout(5):
            assert [e.sequence for e in await waiting] == [2, 3]


async def test_watcher_resumes() -> None:
    """Following from a sequence number gives everything after it."""
    log = EventLog(limit=10)
    _add(log, 5)
    async with aclosing(log.follow(2)) as events:
        assert [e.sequence for e in await anext(events)] == [3, 4, 5]


async def test_gap_is_told() -> None:
    """A watcher that fell behind the log's limit is told that events were lost."""
    log = EventLog(limit=3)
    _add(log, 10)
    async with aclosing(log.follow(1)) as events:
        kinds = [e.kind for e in await anext(events)]
    assert kinds == [EventKind.LOST, EventKind.STORED, EventKind.STORED, EventKind.STORED]


async def test_other_tenants_are_not_seen() -> None:
    """A restricted watcher hears only of the namespaces that it may."""
    log = EventLog(limit=10)
    _add(log, 1, namespace=1)
    _add(log, 1, namespace=2)
    async with aclosing(log.follow(0, sees=lambda n: n == 2)) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        _add(log, 1, namespace=1)
        _add(log, 1, namespace=2)
        async with asyncio.timeout(5):
            assert [e.namespace for e in await waiting] == [2]


async def test_close_ends_watchers() -> None:
    """After close a watcher gets what there is, and then the end."""
    log = EventLog(limit=10)
    _add(log, 3)
    async with aclosing(log.follow(1)) as events:
        log.close()
        assert [[e.sequence for e in batch] async for batch in events] == [[2, 3]]
