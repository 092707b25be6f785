"""The event log."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tierd.cache import events
from tierd.cache.events import EventKind, EventLog


def _add(log: EventLog, count: int, *, namespace: int = 1) -> None:
    for _ in range(count):
        log.add(EventKind.STORED, tier=0, namespace=namespace, hashes=bytes(32), reason="none")


async def test_watcher_sees_what_follows() -> None:
    """A watcher gets the events after its start, and none from before."""
    log = EventLog(limit=10)
    _add(log, 1)
    async with aclosing(log.follow()) as followed:
        waiting = asyncio.ensure_future(anext(followed))
        await asyncio.sleep(0)
        _add(log, 2)
        async with asyncio.timeout(5):
            assert [e.sequence for e in await waiting] == [2, 3]


async def test_watcher_resumes() -> None:
    """Following from a sequence number gives everything after it."""
    log = EventLog(limit=10)
    _add(log, 5)
    async with aclosing(log.follow(2)) as followed:
        assert [e.sequence for e in await anext(followed)] == [3, 4, 5]


async def test_gap_is_told() -> None:
    """A watcher behind the log's limit gets a LOST event."""
    log = EventLog(limit=3)
    _add(log, 10)
    async with aclosing(log.follow(1)) as followed:
        kinds = [e.kind for e in await anext(followed)]
    assert kinds == [EventKind.LOST, EventKind.STORED, EventKind.STORED, EventKind.STORED]


async def test_other_tenants_are_not_seen() -> None:
    """A restricted watcher gets events of its own namespaces only."""
    log = EventLog(limit=10)
    _add(log, 1, namespace=1)
    _add(log, 1, namespace=2)
    async with aclosing(log.follow(0, sees=lambda n: n == 2)) as followed:
        waiting = asyncio.ensure_future(anext(followed))
        await asyncio.sleep(0)
        _add(log, 1, namespace=1)
        _add(log, 1, namespace=2)
        async with asyncio.timeout(5):
            assert [e.namespace for e in await waiting] == [2]


async def test_close_ends_watchers() -> None:
    """After close a watcher gets the remaining events, then the end."""
    log = EventLog(limit=10)
    _add(log, 3)
    async with aclosing(log.follow(1)) as followed:
        log.close()
        assert [[e.sequence for e in batch] async for batch in followed] == [[2, 3]]


async def test_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large events keep the log within its byte limit: it drops the oldest and reports LOST."""
    monkeypatch.setattr(events, "LOG_BYTES", 10 * 32)
    log = EventLog(limit=1000)
    for _ in range(30):
        log.add(EventKind.STORED, tier=0, namespace=1, hashes=bytes(3 * 32), reason="none")
    async with aclosing(log.follow(1)) as batches:
        batch = await anext(batches)
    assert [len(event.hashes) // 32 for event in batch] == [0, 3, 3, 3]
    assert batch[0].kind is EventKind.LOST


async def test_no_event_and_no_batch_outgrows_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log splits an event with very many blocks, and sends a slow watcher several batches."""
    monkeypatch.setattr(events, "EVENT_BYTES", 4 * 32)
    monkeypatch.setattr(events, "BATCH_BYTES", 8 * 32)
    log = EventLog(limit=1000)
    _add(log, 1)
    told = b"".join(bytes([i]) * 32 for i in range(30))
    log.add(EventKind.REMOVED, tier=0, namespace=1, hashes=told, reason="none")
    log.close()
    async with aclosing(log.follow(1)) as batches:
        seen = [batch async for batch in batches]
    assert b"".join(event.hashes for batch in seen for event in batch) == told
    assert max(sum(len(event.hashes) for event in batch) for batch in seen) <= 8 * 32
