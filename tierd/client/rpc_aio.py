"""gRPC for one link on asyncio: the transport of AsyncClient. Loaded on its first call.

Purpose: the same calls as rpc.py, awaited. Invariant: a channel belongs to the loop that it was made in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio

from tierd._proto import cache_pb2_grpc
from tierd.client.connection import Link
from tierd.client.rpc import OPTIONS, translated


class AsyncTransport:
    """Calls that are awaited."""

    def __init__(self, link: Link, address: str) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub: Any = cache_pb2_grpc.CacheStub(self._channel)

    @property
    def fits(self) -> bool:
        """Whether the running loop, if any, is its own."""
        return asyncio._get_running_loop() in (None, self._loop)

    async def call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """One request, one reply."""
        with translated(self._link):
            return await getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._link.metadata)

    async def pull(self, method: str, request: Any, *, timeout_s: float, take: Callable[[Any], None]) -> None:
        """One request; every reply goes to take."""
        with translated(self._link):
            async for reply in getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._link.metadata):
                take(reply)

    async def push(self, method: str, requests: Iterator[Any], *, timeout_s: float) -> Any:
        """An iterator of requests, one reply."""
        with translated(self._link):
            return await getattr(self._stub, method)(requests, timeout=timeout_s, metadata=self._link.metadata)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Replies for as long as they are wanted."""
        call = getattr(self._stub, method)(request, metadata=self._link.metadata)
        try:
            with translated(self._link):
                async for reply in call:
                    yield reply
        finally:
            call.cancel()

    def close(self) -> None:
        """Closes in the background; in a loop that is gone there is nothing left to close."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._channel.close(None)))
