"""A whole daemon in the test's process, with all sockets and a way past gRPC for 100,000s of calls.

`Inside.call` passes bytes to the daemon's own interceptor and handlers, as grpc does after it reads
a connection. The daemon's answer returns as bytes, an error as `Refused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import msgpack
import structlog

from tests.system.raw import hello
from tests.unit.cache.world import SOON_S, directories
from tierd.config import read_config, resolve
from tierd.server.assembly import Assembly, assemble
from tierd.server.listeners import Listeners

CONFIG = """
[server]
runtime_dir = "{root}/run"
state_dir = "{root}/state"
session_limit = 64
[[host]]
capacity = "8 MiB"
segment = "1 MiB"
arena_dir = "{arena}"
[[nvme]]
path = "{root}/nvme"
capacity = "16 MiB"
segment = "1 MiB"
"""


@dataclass
class Refused(Exception):  # an answer
    """The daemon's error. fault: the traceback of an unforeseen exception, else empty."""

    code: grpc.StatusCode
    details: str
    fault: str


@dataclass
class Context:
    """The part of a gRPC call context that a handler uses."""

    timeout_s: float
    replies: list[Any] = field(default_factory=list)
    metadata: tuple[tuple[str, str], ...] = ()
    asks: list[bytes] = field(default_factory=list)

    def time_remaining(self) -> float:
        return self.timeout_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    async def read(self) -> Any:
        return self.asks.pop(0) if self.asks else grpc.aio.EOF

    async def write(self, reply: Any) -> None:
        self.replies.append(reply)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        fault = traceback.format_exc() if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) else ""
        raise Refused(code, details, fault)


@dataclass
class Inside:
    """The daemon. reached: calls that reached their handler, by RPC; faults: errors that no caller saw."""

    daemon: Assembly
    listeners: Listeners
    handlers: dict[str, Any]
    target: Path
    reached: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def connect(self) -> socket.socket:
        """A nonblocking session socket before its hello."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        client.connect(str(self.target / "session.sock"))
        return client

    async def session(self, client: socket.socket) -> dict[str, Any]:
        """Sends the hello; the daemon's greeting."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, msgpack.packb(hello()))
        return msgpack.unpackb(await loop.sock_recv(client, 65536))

    async def call(
        self, method: str, raw: Sequence[bytes], *, metadata: dict[str, str], timeout_s: float
    ) -> list[bytes]:
        """The replies to these requests of a method such as `/tierd.v1.Cache/Get`. Raises Refused."""
        context = Context(timeout_s, metadata=tuple(metadata.items()), asks=list(raw))
        details = SimpleNamespace(method=method, invocation_metadata=context.metadata)
        handler = await self.listeners._rpc.guard.intercept_service(self._handler, details)
        if handler.response_streaming:
            with contextlib.suppress(TimeoutError):  # an endless stream ends with its reader
                async with asyncio.timeout(timeout_s):
                    await handler.stream_stream(None, context)
        else:
            context.replies.append(await handler.stream_unary(_each(raw), context))
        return [handler.response_serializer(reply) for reply in context.replies]

    async def _handler(self, details: Any) -> Any:
        return self.handlers[details.method]

    def _counting(self, name: str, handler: Any) -> Any:
        kind = next(k for k in ("unary_unary", "unary_stream", "stream_unary", "stream_stream") if getattr(handler, k))
        inner: Callable[..., Any] = getattr(handler, kind)

        def reached(request: Any, context: Any) -> Any:
            self.reached[name] += 1
            return inner(request, context)

        return handler._replace(**{kind: reached})


async def _each(raw: Sequence[bytes]) -> AsyncIterator[bytes]:
    for each in raw:
        yield each


@contextlib.asynccontextmanager
async def inside(config: str = CONFIG) -> AsyncIterator[Inside]:
    """A serving daemon, for the duration of the `with` block."""
    made, handlers = grpc.aio.server, dict[str, Any]()

    def server(*given: Any, **options: Any) -> Any:
        real = made(*given, **options)
        real.add_generic_rpc_handlers = lambda found: None
        real.add_registered_method_handlers = lambda service, found: handlers.update(
            {f"/{service}/{name}": handler for name, handler in found.items()}
        )
        return real

    with directories() as places, _log() as faults:
        for name, path in places.items():
            config = config.replace("{" + name + "}", path)
        async with assemble(resolve(read_config(config), environ={})) as daemon:
            async with Listeners(daemon) as listeners:
                with mock.patch.object(grpc.aio, "server", server):
                    await listeners.open()
                daemon.cache.background.start()
                await daemon.load()
                daemon.state = "serving"
                found = Inside(daemon, listeners, {}, Path(places["root"]) / "run", faults=faults)
                found.handlers = {
                    name: found._counting(name, each)
                    for name, each in handlers.items()
                    if name.startswith("/tierd.v1.")
                }
                asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
                yield found
                daemon.cache.events.close()
                await listeners.wear.stop()
                await listeners.learned.stop()
            await daemon.cache.background.stop()
            await daemon.cache.flights.idle(timeout_s=SOON_S)


@contextlib.contextmanager
def _log() -> Any:
    """The daemon's log entries with a traceback or of an unforeseen error."""
    faults, kept = list[str](), structlog.get_config()

    def note(_logger: Any, level: str, event: dict[str, Any]) -> Any:
        if event.get("exc_info") or level in ("exception", "critical"):
            faults.append(f"{event}\n{traceback.format_exc()}")
        raise structlog.DropEvent

    structlog.configure(processors=[note])
    try:
        yield faults
    finally:
        structlog.configure(**kept)
