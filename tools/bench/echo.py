"""Raw gRPC, and a raw socket, in a separate process: a call's limits without the work of tierd.

    python -m tools.bench.echo ADDRESS

Bytes in, bytes out: no message is encoded. The server is grpc.aio, as the daemon's; the caller's
side is synchronous, as the SDK's. A request begins with the length of the reply that it wants.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from tierd.client.transport.grpc_calls import OPTIONS
from tools.bench.measure import COLD_BYTES, Cold, line_of

HEAD = struct.Struct("<II")
"""Bytes of a reply, and how many replies a pull gets."""
START_S, CALL_S = 30.0, 30.0
LENGTH, RAW = struct.Struct("<I"), ".raw"
"""The length before each message on a raw socket; the suffix of its path."""
SERVICE = "bench.Echo"
COLD_MESSAGES = 192
"""Messages that a stream uses in turn, at most."""
_REPLIES: dict[int, bytes] = {}


def request_of(length: int, *, reply: int, count: int = 1) -> bytes:
    """A request of this many bytes (8 at least) for a reply, or for `count` of them from a pull."""
    return HEAD.pack(reply, count).ljust(length, b"x")


def _reply(request: bytes) -> bytes:
    length = HEAD.unpack_from(request)[0]
    if length not in _REPLIES:
        _REPLIES[length] = bytes(length)
    return _REPLIES[length]


@functools.cache
def cold_messages(length: int) -> Iterator[bytes]:
    """Endless messages of this many bytes; long ones come from cold memory."""
    cold = Cold(min(COLD_BYTES, COLD_MESSAGES * length))
    return itertools.cycle([bytes(cold.blocks(1, length)) for _ in range(min(COLD_BYTES // length, COLD_MESSAGES))])


async def _stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield _reply(request)


async def _push(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    total = 0
    async for request in requests:
        total += len(request)
    return struct.pack("<Q", total)


async def _pull(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    length, count = HEAD.unpack_from(request)
    for message in itertools.islice(cold_messages(length), count):
        yield message


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """On a raw socket each message follows its length (u4)."""
    while head := await reader.read(LENGTH.size):
        reply = _reply(await reader.readexactly(*LENGTH.unpack(head)))
        writer.write(LENGTH.pack(len(reply)) + reply)
    writer.close()


async def serve(address: str) -> None:
    """Serves until its standard input ends."""
    if address.startswith("unix:"):
        await asyncio.start_unix_server(_answer, address.removeprefix("unix:") + RAW)
    server = grpc.aio.server(options=OPTIONS)
    methods = {
        "stream": grpc.stream_stream_rpc_method_handler(_stream),
        "push": grpc.stream_unary_rpc_method_handler(_push),
        "pull": grpc.unary_stream_rpc_method_handler(_pull),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port(address)
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


class Echo:
    """A server in a separate process, and the caller's side of it. address: `unix:PATH`, or
    `127.0.0.1:0` for a free port."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tools.bench.echo", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        port = line_of(self._process, timeout_s=START_S)
        self._channel = grpc.insecure_channel(address.replace(":0", f":{port}"), options=OPTIONS)
        grpc.channel_ready_future(self._channel).result(START_S)
        self._push = self._channel.stream_unary(f"/{SERVICE}/push")
        self._pull = self._channel.unary_stream(f"/{SERVICE}/pull")
        self._raw: socket.socket | None = None
        if address.startswith("unix:"):
            self._raw = socket.socket(socket.AF_UNIX)
            self._raw.settimeout(CALL_S)
            self._raw.connect(address.removeprefix("unix:") + RAW)
        self._asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self._channel.stream_stream(f"/{SERVICE}/stream")(iter(self._asked.get, None))

    def stream(self, request: bytes) -> bytes:
        """One message to and fro on the open stream."""
        self._asked.put(request)
        answer: bytes = next(self._answers)
        return answer

    def raw(self, request: bytes) -> bytes:
        """One message to and fro on a raw socket."""
        assert self._raw is not None, "an echo over TCP has none"
        self._raw.sendall(LENGTH.pack(len(request)) + request)
        answer = self._raw.recv(1 << 20)
        while len(answer) < LENGTH.size + LENGTH.unpack_from(answer)[0]:
            answer += self._raw.recv(1 << 20)
        return answer

    def push(self, messages: Iterator[bytes]) -> int:
        """Sends a stream; returns the bytes that arrived."""
        return int(struct.unpack("<Q", self._push(messages, timeout=CALL_S))[0])

    def pull(self, length: int, count: int) -> int:
        """Receives a stream of `count` messages; returns the bytes that arrived."""
        return sum(map(len, self._pull(request_of(HEAD.size, reply=length, count=count), timeout=CALL_S)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.put(None)
        if self._raw is not None:
            self._raw.close()
        self._channel.close()
        self._process.communicate(timeout=START_S)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
