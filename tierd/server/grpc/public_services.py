"""Public services, without session or credential: health checks and reflection.

The guard does not bound these, so this module does. A late message times out. A call counts until
its reply is sent, and is refused if too many of one server are in progress. Health watches end with
the daemon. No reader can block another one or the daemon.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tierd.errors import Overloaded, TierdError
from tierd.server.grpc.call_errors import abort, unless_over
from tierd.server.grpc.credits import RETRY_AFTER_S
from tierd.server.grpc.guard import Parse, parsed, received

SILENCE_S = 5.0
"""Wait for a message."""
CALLS = 64
"""Calls in progress in one server, of each method."""
WATCHES = 16
"""The same for health watches, which have no end."""
Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Health checks. services: the known ones besides "", the whole daemon."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = {"", *services}
        self._status = Status.NOT_SERVING
        self._changed = asyncio.Event()

    def set_status(self, *, serving: bool) -> None:
        """Sets the status and wakes the watches. They end when it is not serving."""
        self._status = Status.SERVING if serving else Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
        """The present status."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Status(status=self._status)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802  # gRPC's name
        """The present status, then each change since the last read."""
        is_known, last = request.service in self._services, None
        while last != Status.NOT_SERVING:
            changed, now = self._changed, self._status
            if now != last:
                last = now
                yield Status(status=now if is_known else Status.SERVICE_UNKNOWN)
            else:
                await changed.wait()


class PublicServices:
    """A gRPC server for the generated code. It serves added services to any caller, within bounds."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._open = Counter[str]()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the registered handlers are the same."""

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Any]) -> None:
        """Adds all of a service's methods, by name."""
        bounded = {method: self._bounded(method, handler) for method, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, bounded),))
        self._server.add_registered_method_handlers(name, bounded)

    def _bounded(self, method: str, handler: Any) -> Any:
        """Wraps a handler as stream to stream, so that all waits for request and reply happen here."""
        replies, parse = _replies(handler), handler.request_deserializer
        most = WATCHES if method == "Watch" else CALLS

        async def call(_raw: Any, context: Any) -> None:
            try:
                self._enter(method, most)
                async for reply in replies(parse, context):
                    with unless_over():
                        await context.write(reply)
            except (TierdError, TimeoutError) as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    def _enter(self, method: str, most: int) -> None:
        """Counts the call until its task ends, after the reply was sent. Raises Overloaded."""
        if self._open[method] >= most:
            raise Overloaded(f"{method}: {most} in progress; try again later", retry_after_s=RETRY_AFTER_S)
        task = asyncio.current_task()
        assert task is not None
        self._open[method] += 1
        task.add_done_callback(lambda _: self._open.subtract([method]))


def _replies(handler: Any) -> Callable[[Parse, Any], AsyncIterator[Any]]:
    """A handler's replies, for each kind of handler."""

    async def one(parse: Parse, context: Any) -> AsyncIterator[Any]:
        yield await handler.unary_unary(await received(parse, context, within_s=SILENCE_S), context)

    async def several(parse: Parse, context: Any) -> AsyncIterator[Any]:
        async for reply in handler.unary_stream(await received(parse, context, within_s=SILENCE_S), context):
            yield reply

    if handler.request_streaming:
        return lambda parse, context: handler.stream_stream(_each(parse, context), context)
    return several if handler.response_streaming else one


async def _each(parse: Parse, context: Any) -> AsyncIterator[Any]:
    while True:
        async with asyncio.timeout(SILENCE_S):
            raw = await context.read()
        if not isinstance(raw, bytes):  # the end
            return
        yield parsed(parse, raw)
