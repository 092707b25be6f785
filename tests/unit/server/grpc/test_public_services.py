"""Public calls, and clients that read no replies: neither takes the room of others."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.cache.world import BLOCK_BYTES, SOON_S
from tests.unit.server.grpc.test_guard import SECRET, Rig, error_of, rigged, until
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.server.grpc import public_services, servers
from tierd.server.grpc.servers import GRPC_LOG

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING
SETTINGS, HEADERS, DATA = 4, 1, 0
WINDOW = 4
"""The setting for how many bytes of a stream its reader accepts."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def beginning() -> bytes:
    """The first bytes of a connection whose client accepts no byte of any reply."""
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, struct.pack(">HI", WINDOW, 0))


def call(stream: int, path: str, message: bytes = b"") -> bytes:
    """A call with its message."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "t", "te": "trailers"}
    fields |= {"content-type": "application/grpc", "authorization": f"Bearer {SECRET}"}
    plain = (bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in fields.items())
    return frame(HEADERS, 4, stream, b"".join(plain)) + frame(
        DATA, 1, stream, struct.pack(">BI", 0, len(message)) + message
    )


async def healthy(rig: Rig) -> bool:
    """Whether health checks and an operator get their replies."""
    async with rig.stubs() as (_, admin), grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        told = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return (
            told.status == SERVING
            and await error_of(admin.Status(apb.StatusRequest(), metadata=await rig.session())) == ""
        )


@pytest.mark.parametrize("method", [CHECK, WATCH, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"])
async def test_a_message_that_does_not_come(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A public call whose message does not arrive ends with DeadlineExceeded, and its bytes are dropped."""
    monkeypatch.setattr(public_services, "SILENCE_S", 0.2)
    async with rigged() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        silent = channel.stream_unary(method)()
        await silent.wait_for_connection()
        async with asyncio.timeout(SOON_S):
            assert await error_of(silent) == "DeadlineExceeded"
        assert await healthy(rig)


async def test_watches_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Excess health watches that no client reads take no room of health checks and operators."""
    monkeypatch.setattr(servers, "SPARE", 24)
    async with rigged(queue_limit=1) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(beginning() + b"".join(call(2 * i + 1, WATCH) for i in range(128)))
        await writer.drain()
        for _ in range(10):
            assert await healthy(rig)
        writer.close()


async def test_too_many_watches() -> None:
    """A watch beyond the limit is Overloaded, until another has ended."""
    async with rigged() as rig, grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(public_services.WATCHES)]
        for one in watches:
            assert (await one.read()).status == SERVING
        assert await error_of(watch(health_pb2.HealthCheckRequest()).read()) == "Overloaded"
        watches[0].cancel()
        async with asyncio.timeout(SOON_S):
            while await error_of(watch(health_pb2.HealthCheckRequest()).read()) == "Overloaded":
                pass
        for one in watches:
            one.cancel()


async def test_replies_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP replies that no client reads, up to a server's limit, do not block operators on the unix socket."""
    monkeypatch.setattr(servers, "SPARE", 4)
    space = pb.OpenNamespaceRequest(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES).SerializeToString()
    async with rigged(queue_limit=2) as rig, rig.stubs() as (_, admin):
        ended = Counter[str]()
        monkeypatch.setattr(rig.guard, "count", lambda method, outcome, **_: ended.update([f"{method} {outcome}"]))
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(beginning())
        room = 2 * servers.BACKLOG + servers.SPARE
        for i in range(room):
            writer.write(call(2 * i + 1, "/tierd.v1.Cache/OpenNamespace", space))
            await until(lambda: ended["OpenNamespace ok"] > i)  # noqa: B023  # read before the next turn
        assert await error_of(admin.Status(apb.StatusRequest(), metadata=await rig.session())) == ""
        writer.close()


async def test_a_header_that_is_no_text_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """A header that is not UTF-8, which needs no credential, logs no traceback."""
    async with rigged() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(beginning() + call(1, CHECK).replace(SECRET.encode(), SECRET[1:].encode() + b"\xff"))
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b"application/grpc")
        writer.close()
    assert [record for record in caplog.records if record.name == GRPC_LOG] == []
