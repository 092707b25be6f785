"""gRPC for one link on asyncio: the transport of AsyncClient. Loaded on its first call.

Purpose: the same calls as rpc.py, awaited. It uses the synchronous channel's futures and not grpc.aio, whose poller thread never leaves gRPC: a
child of a fork could then never use gRPC again. It is no slower, and belongs to no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tierd.client import forks
from tierd.client.connection import Link, Meanwhile
from tierd.client.credits import Credits
from tierd.client.rpc import SyncTransport, named, translated


class AsyncTransport:
    """Calls that are awaited."""

    def __init__(self, link: Link, address: str) -> None:
        self._sync = SyncTransport(link, address)

    async def call(self, method: str, request: Any, *, timeout_s: float, meanwhile: Meanwhile | None = None) -> Any:
        """One request, one reply."""
        link = self._sync.link
        async with _turn(link.credits, method, timeout_s=timeout_s) as left_s:
            deadline = time.monotonic() + left_s
            if meanwhile is not None and meanwhile.is_due:
                await asyncio.to_thread(meanwhile.run)
            with named(link, method) as metadata:
                left_s = max(0.0, deadline - time.monotonic())  # noqa: PLW2901
                return await self._call(method, request, timeout_s=left_s, metadata=metadata)

    async def _call(self, method: str, request: Any, *, timeout_s: float, metadata: Any) -> Any:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        ended = forks.begin_call()
        try:
            with translated(self._sync.link):
                call = getattr(self._sync.stub, method).future(request, timeout=timeout_s, metadata=metadata)
        except BaseException:
            ended()
            raise

        def arrived(_: Any) -> None:
            ended()
            _wake(loop, done)

        call.add_done_callback(arrived)
        try:
            await done
        except asyncio.CancelledError:
            call.cancel()
            raise
        with translated(self._sync.link):
            return call.result()

    async def push(self, method: str, requests: Iterator[Any], *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        return await self.call(method, requests, timeout_s=timeout_s)

    async def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> None:
        """One request; every reply goes to take, in a thread."""
        await asyncio.to_thread(self._sync.pull, method, request, timeout_s=timeout_s, take=take)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Replies for as long as they are wanted."""
        call = getattr(self._sync.stub, method)(request, metadata=self._sync.link.metadata)
        try:
            with translated(self._sync.link):
                while (reply := await asyncio.to_thread(next, call, None)) is not None:
                    yield reply
        finally:
            call.cancel()

    def close(self) -> None:
        """Cancels what is in flight."""
        self._sync.close()


@contextlib.asynccontextmanager
async def _turn(credits: Credits, method: str, *, timeout_s: float) -> AsyncIterator[float]:
    """`Credits.turn`, awaited."""
    deadline = time.monotonic() + timeout_s
    waiter = credits.ask(method)
    if waiter is not None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(waiter)
        except BaseException as error:
            credits.withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise credits.too_late(timeout_s) from None
            raise
    try:
        yield max(0.0, deadline - time.monotonic())
    finally:
        credits.give(method)


def _wake(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    """From gRPC's thread. A loop that is gone waits for nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))
