"""AsyncClient: the same verbs and results as Client, and cancelled calls that hold nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.system.sdk import BIG, HOST, SMALL, await_nothing_held, count_calls, held, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import AsyncClient, Client, Group, PutGroup
from tierd.client.connect import threads
from tierd.client.session import notices
from tierd.errors import DeadlineExceeded, TierdError, ViewsAlive
from tierd.testing import chain, content_of

COUNT = 6
BOTH = HOST + '[[nvme]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n'
RESERVED_PAGES = 3
"""Index of the reserved pages in `held`."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with host memory only."""
    with Daemon(HOST) as running:
        yield running


def contents(seed: int, count: int, size: int) -> list[np.ndarray]:
    """The blocks of a chain."""
    return [content_of(name, size) for name in chain(seed, count)]


async def got(call: Any) -> Any:
    """The result of either client's verb, or its error's class name. A failing call comes as a function."""
    try:
        answer = call() if callable(call) else call
        return await answer if inspect.isawaitable(answer) else answer
    except TierdError as error:
        return type(error).__name__


async def every_verb(client: Any, seed: int) -> list[Any]:
    """Runs all verbs once; the results that both clients must share."""
    said: list[Any] = []
    namespace = await got(client.open_namespace(SMALL))
    hashes = chain(seed, COUNT)
    said += [namespace.epoch, (await got(client.lookup(namespace, hashes))).tokens]
    said += [bool(await got(client.get(namespace, hashes))), bool(await got(client.acquire(namespace, hashes)))]
    stored = await got(client.put(namespace, hashes, contents(seed, COUNT, 4096)))
    said += [stored.statuses.tolist(), stored.stored]
    again = await got(client.put(namespace, hashes, contents(seed, COUNT, 4096)))
    found = await got(client.lookup(namespace, hashes))
    said += [again.statuses.tolist(), found.tokens, found.tier_tokens, [part.tolist() for part in found.tier_of]]
    result = await got(client.get(namespace, hashes))
    said += [result.tokens, result.blocks, result.tier_tokens, right(result.views, seed)]
    out = np.zeros((COUNT, 4096), dtype=np.uint8)
    said += [(await got(client.get(namespace, Group(namespace, hashes), out=out))).blocks, right(list(out), seed)]
    lease = await got(client.acquire(namespace, hashes))
    view = lease.view(1)
    said += [lease.tokens, lease.check(), (await got(client.report_attention(lease, np.ones((1, COUNT)))))]
    with contextlib.suppress(ViewsAlive):
        lease.release()
        said.append("released with a view alive")
    del view
    gc.collect()
    lease.release()
    pages = await got(client.reserve(PutGroup.private(namespace, 2)))
    for page, block in zip(pages.buffers(), contents(seed + 1, 2, 4096), strict=True):
        page[:] = block
    committed = await got(pages.commit(namespace.naming(chain(seed + 1, 2), index=[0, 1]), lease=True))
    said += [committed.statuses.tolist(), committed.lease.tokens, right(committed.lease.views(), seed + 1)]
    dropped = await got(client.reserve(PutGroup.private(namespace, 2)))
    said += [len(dropped), await got(dropped.abort()), await got(dropped.commit), bool(dropped)]
    said += [
        await got(client.prefetch(namespace, hashes)),
        await got(lambda: client.get(namespace, hashes, timeout_s=-1.0)),
    ]
    return said


async def test_same_results(daemon: Daemon) -> None:
    """Every verb gives the same answers and raises the same errors from both clients."""
    with Client(daemon.target) as client:
        sync = await every_verb(client, 100)
    async with AsyncClient(daemon.target) as client:
        assert await every_verb(client, 200) == sync
    await asyncio.to_thread(await_nothing_held, daemon, "both clients")


async def test_many_at_once(daemon: Daemon) -> None:
    """Fifty puts and gets in flight on one client give each its own blocks."""
    async with AsyncClient(daemon.target) as client:
        namespace = await client.open_namespace(SMALL)

        async def there_and_back(seed: int) -> int:
            await client.put(namespace, chain(seed, COUNT), contents(seed, COUNT, 4096))
            return right((await client.get(namespace, chain(seed, COUNT))).views, seed)

        assert await asyncio.gather(*(there_and_back(seed) for seed in range(300, 350))) == [COUNT] * 50


VERBS: dict[str, Callable[[AsyncClient, Any, int], Awaitable[Any]]] = {
    "get": lambda client, namespace, _: client.get(namespace, chain(1, COUNT)),
    "copy": lambda client, namespace, _: client.get(namespace, chain(1, COUNT), out=bytearray(COUNT * BIG.block_bytes)),
    "acquire": lambda client, namespace, _: client.acquire(namespace, chain(1, COUNT)),
    "reserve": lambda client, namespace, seed: client.reserve(PutGroup(namespace, chain(seed, 2))),
    "put": lambda client, namespace, seed: client.put(namespace, chain(seed, 2), contents(seed, 2, BIG.block_bytes)),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_cancelled(daemon: Daemon, verb: str) -> None:
    """A call cancelled at any moment holds nothing afterwards, and the client works on."""
    async with AsyncClient(daemon.target) as client:
        namespace = await client.open_namespace(BIG)
        await client.put(namespace, chain(1, COUNT), contents(1, COUNT, BIG.block_bytes))
        cancelled, kept = 0, []
        for turn in range(40):
            task = asyncio.ensure_future(VERBS[verb](client, namespace, 400 + turn))
            for _ in range(turn * turn):
                await asyncio.sleep(0)  # not a wait: the loop runs one round
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            cancelled += isinstance(outcome, asyncio.CancelledError)
            assert isinstance(outcome, asyncio.CancelledError) or not isinstance(outcome, BaseException), outcome
            if isinstance(outcome, asyncio.CancelledError):
                kept.append((task, outcome))  # the daemon gets its pages back despite these references
            del task, outcome
        print(f"{verb}: {cancelled} of 40 were cancelled in time")
        assert cancelled > 0
        await asyncio.to_thread(await_nothing_held, daemon, f"cancelled calls of {verb}")
        await client.put(namespace, chain(1, COUNT), contents(1, COUNT, BIG.block_bytes))
        assert right((await client.get(namespace, chain(1, COUNT))).views, 1) == COUNT


async def test_as_few_calls_as_the_other(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts in a row cost one call each, and a second get of a sequence costs none, as with Client."""
    monkeypatch.setattr(notices, "NOTICE_S", 600.0)
    asked, out, size = count_calls(monkeypatch), np.zeros((COUNT, 4096), np.uint8), 4096
    async with AsyncClient(daemon.target) as client:
        namespace = await client.open_namespace(SMALL)
        for seed in range(500, 504):
            await client.put(namespace, chain(seed, COUNT), contents(seed, COUNT, size))
        await client.get(namespace, chain(503, COUNT), out=out)
        asked.clear()
        await client.put(namespace, chain(504, COUNT), contents(504, COUNT, size))
        assert asked["Commit"] == 1 and asked["Reserve"] <= 1  # the Reserve is for the next puts
        asked.clear()
        assert (await client.get(namespace, chain(503, COUNT), out=out)).blocks == right(list(out), 503) == COUNT
        assert not asked


async def test_a_get_that_waits_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled get ends at once, before its far tier answers, and never writes its buffers after that."""
    monkeypatch.setattr(threads, "STOP_S", 60.0)
    with Daemon(BOTH, faults=True) as far, far.faults() as faults:
        async with AsyncClient(far.target) as client:
            namespace, out = await client.open_namespace(SMALL), np.zeros((COUNT, 4096), np.uint8)
            await client.put(namespace, chain(1, COUNT), contents(1, COUNT, 4096), durable=True)
            with connect(far.target) as operator:
                operator.ask(pb.EvictRequest(tier="host.0"))
            faults.arm("nvme.slots.before_read", "delay:2")
            task = asyncio.ensure_future(client.get(namespace, chain(1, COUNT), out=out))
            assert await asyncio.to_thread(faults.await_hits, "nvme.slots.before_read")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert held(far)[RESERVED_PAGES]  # the disk still reads into these pages
            faults.disarm()
            await asyncio.to_thread(await_nothing_held, far, "a get that was cancelled")
            assert not out.any()
            assert (await client.get(namespace, chain(1, COUNT), out=out)).blocks == right(list(out), 1) == COUNT


async def test_a_watch_that_is_cancelled_ends_nothing_else(daemon: Daemon) -> None:
    """A watch cancelled during its wait ends neither the client's leases nor its session."""
    async with AsyncClient(daemon.target) as client:
        namespace = await client.open_namespace(SMALL)
        await client.put(namespace, chain(600, COUNT), contents(600, COUNT, 4096))
        lease, link = await client.acquire(namespace, chain(600, COUNT)), client._connector.link
        watcher = client.watch()
        first, seed = asyncio.ensure_future(anext(watcher)), 700
        while not first.done():  # a watch sees only blocks stored after it begins
            await client.put(namespace, chain(seed, 1), contents(seed, 1, 4096))
            seed += 1
        await first
        await client.lookup(namespace, chain(600, 1))
        watch = asyncio.ensure_future(_last(watcher))
        await client.lookup(namespace, chain(600, 1))
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
        await client.lookup(namespace, chain(600, 1))
        assert lease.check() == COUNT
        assert client._connector.link is link
        assert right(lease.views(), 600) == COUNT


async def _last(watcher: AsyncIterator[Any]) -> None:
    """Waits for events without end."""
    async for _ in watcher:
        pass


async def test_best_effort_without_a_thread(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free thread in time a best-effort client misses, and another client raises."""
    monkeypatch.setattr(threads, "THREADS", 1)
    for is_best_effort in (True, False):
        over = threading.Event()
        async with AsyncClient(daemon.target, best_effort=is_best_effort) as client:
            namespace = await client.open_namespace(SMALL)
            busy = asyncio.ensure_future(client._threads.run(over.wait, timeout_s=60.0))
            await asyncio.sleep(0)
            call = client.get(namespace, chain(1, 1), timeout_s=0.01)
            if is_best_effort:
                assert not await call
            else:
                with pytest.raises(DeadlineExceeded):
                    await call
            over.set()
            await busy
