"""AsyncClient is Client with await."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

from tests.unit.client.conftest import CLASS_BYTES, SPEC
from tierd.client import AsyncClient, BlockStatus, Client, PutGroup
from tierd.errors import DeadlineExceeded, StaleHandle, TierFailed, Unavailable

TOKENS = list(range(40))
BLOCKS = [bytes([1]) * CLASS_BYTES, bytes([2]) * CLASS_BYTES, b"tail" * (CLASS_BYTES // 8)]


def test_the_faces_are_the_same():
    """Both clients have the same public names with the same parameters."""
    names = [name for name in dir(Client) if not name.startswith("_")]
    assert names == [name for name in dir(AsyncClient) if not name.startswith("_")]
    for name in [*names, "__init__"]:
        if callable(getattr(Client, name)):
            ours, theirs = (
                list(inspect.signature(getattr(c, name)).parameters.values()) for c in (Client, AsyncClient)
            )
            assert ours == theirs, name


async def test_put_and_get(daemon):
    """A get returns the bytes of a put, as views that own their pin and as copies."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        assert (await client.put(ns, TOKENS, BLOCKS)).stored == 3
        got = await client.get(ns, TOKENS)
        assert [bytes(view) for view in got.views] == BLOCKS
        assert (await client.lookup(ns, ns.hash(TOKENS))).tokens == 32
        out = bytearray(2 * CLASS_BYTES + CLASS_BYTES // 2)
        assert (await client.get(ns, TOKENS, out=out)).tokens == 40
        assert out == b"".join(BLOCKS)
        assert len(daemon.leases) >= 1
        del got
        await asyncio.to_thread(daemon.until, lambda: not daemon.leases)


async def test_reservations(daemon):
    """Reservations are committed and aborted with await, and aborted at the end of their block."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        reservation = await client.reserve(PutGroup.private(ns, 1))
        reservation.buffer(0)[:] = 5
        committed = await reservation.commit(ns.naming(ns.hash(TOKENS[:16]), index=[0]), lease=True)
        assert committed.statuses.tolist() == [BlockStatus.READY]
        assert set(committed.lease.view(0).tolist()) == {5}
        async with await client.reserve(PutGroup.private(ns, 1)):
            pass
        assert daemon.reservations == {}


async def test_many_at_once(daemon):
    """Verbs that run at the same time share one session."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        results = await asyncio.gather(*(client.put(ns, [i] * 16, [bytes([i]) * CLASS_BYTES]) for i in range(20)))
        assert all(results)
        got = await asyncio.gather(*(client.get(ns, [i] * 16) for i in range(20)))
        assert [bytes(g.views[0]) for g in got] == [bytes([i]) * CLASS_BYTES for i in range(20)]
        assert len(daemon.sessions.list()) == 1


async def test_errors_and_deadlines(daemon):
    """Errors and deadlines are those of the synchronous client."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        daemon.faults["Acquire"] = TierFailed("host.0: no")
        with pytest.raises(TierFailed, match=r"^host\.0: no$"):
            await client.get(ns, TOKENS)
        release = threading.Event()
        daemon.before["Lookup"] = lambda: release.wait(10)
        with pytest.raises(DeadlineExceeded):
            await client.lookup(ns, ns.hash(TOKENS), timeout_s=0.05)
        release.set()


async def test_a_cancelled_put_gives_its_pages_back(daemon):
    """A cancelled verb releases its pages."""
    release = threading.Event()
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        daemon.before["Commit"] = lambda: release.wait(10)
        put = asyncio.create_task(client.put(ns, TOKENS, BLOCKS))
        await asyncio.to_thread(daemon.until, lambda: daemon.calls["Commit"] == 1)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        await asyncio.to_thread(daemon.until, lambda: daemon.calls["aborted"] == 1)
        release.set()


async def test_restart(place):
    """A client survives a restart; old leases are stale."""
    async with AsyncClient(place.daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        await client.put(ns, TOKENS, BLOCKS)
        lease = await client.acquire(ns, ns.hash(TOKENS))
        await asyncio.to_thread(place.restart)
        with pytest.raises(StaleHandle):
            lease.views()
        assert (await client.get(ns, TOKENS)).tokens == 40


async def test_a_channel_that_breaks_is_replaced(daemon):
    """A call whose connection breaks is retried over a new connection."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(SPEC)
        client._connector.link.transport.close()
        assert await client.put(ns, TOKENS, BLOCKS)


async def test_no_daemon(tmp_path):
    """Without a daemon verbs are Unavailable, or misses with best effort."""
    async with AsyncClient(str(tmp_path)) as client:
        with pytest.raises(Unavailable):
            await client.open_namespace(SPEC)
    async with AsyncClient(str(tmp_path), best_effort=True) as client:
        ns = await client.open_namespace(SPEC)
        assert not await client.get(ns, TOKENS)


def test_another_loop(daemon):
    """A client that is used in another loop connects again there."""
    client = AsyncClient(daemon.target)

    async def work():
        ns = await client.open_namespace(SPEC)
        await client.put(ns, TOKENS, BLOCKS)
        return (await client.get(ns, TOKENS)).tokens

    assert [asyncio.run(work()) for _ in range(2)] == [40, 40]
    asyncio.run(client.close())


async def test_watch(daemon):
    """Events arrive as they happen."""
    async with AsyncClient(daemon.target) as client:
        async for event in client.watch(after=1):
            assert event.sequence == 2
            break
