"""The checks of every call on the daemon's own sockets: callers, deadlines, room, errors by name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.depth import count, report
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, World, directories, opened
from tierd._proto import admin_pb2 as apb
from tierd._proto import admin_pb2_grpc, cache_pb2_grpc
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.core.formats.model import BlockStatus
from tierd.errors import ERROR_KEY
from tierd.server.grpc.call_errors import unless_over
from tierd.server.grpc.credits import PATIENCE
from tierd.server.grpc.guard import Guard
from tierd.server.grpc.servers import GRPC_LOG
from tierd.server.listeners import Listeners
from tierd.server.local_rpc.calls import LocalRpcServer
from tierd.testing import chain

SECRET = "a-credential-of-enough-characters"
MANY = chain(1, 128)
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
"""With these a client that does not read soon receives nothing more."""


@dataclass
class Rig:
    """A daemon's parts with its sockets. faults: reports to the event loop's exception handler."""

    world: World
    target: Path
    port: int
    guard: Guard
    lines: LocalRpcServer
    faults: list[dict[str, Any]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    async def session(self, **changed: Any) -> tuple[tuple[str, str], ...]:
        """Metadata of a new session."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets.append(client)
        client.setblocking(False)
        client.connect(str(self.target / "session.sock"))
        hello = {"op": "hello", "proto": 2, "format": 2, "sdk": "0", "name": "t", "credential": None} | changed
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, msgpack.packb(hello))
        return (("tierd-session", msgpack.unpackb(await loop.sock_recv(client, 8192))["token"]),)

    @contextlib.asynccontextmanager
    async def stubs(self, *, remote: bool = False) -> AsyncIterator[tuple[Any, Any]]:
        """Stubs of Cache and Admin."""
        address = f"127.0.0.1:{self.port}" if remote else f"unix:{self.target}/tierd.sock"
        async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
            yield cache_pb2_grpc.CacheStub(channel), admin_pb2_grpc.AdminStub(channel)

    async def quiet(self) -> None:
        """Waits until no page is pinned and no call runs; the event loop has no faults then."""
        async with asyncio.timeout(SOON_S):
            while self.world.pins or self.running:  # noqa: ASYNC110  # the end of calls rings no bell
                await asyncio.sleep(0.01)
        assert self.faults == []

    @property
    def running(self) -> int:
        """Calls in progress."""
        return self.guard.running


@contextlib.asynccontextmanager
async def rigged(**server: object) -> AsyncIterator[Rig]:
    """server: keys of [server] and their values, as TOML."""
    with directories() as places, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        for name in ("remote", "tenants"):
            path = Path(places["root"]) / name
            path.write_text(SECRET if name == "remote" else f"guest {SECRET}")
            path.chmod(0o600)
        keys = {"tcp_listen": f'"127.0.0.1:{port}"', "tcp_credential_file": '"{root}/remote"'} | server
        lines = "\n".join(f"{key} = {value}" for key, value in keys.items())
        config = CONFIG.replace("[server]", f'[identity]\ncredential_file = "{{root}}/tenants"\n[server]\n{lines}')
        async with opened(config, places=places) as world, Listeners(world.daemon) as listeners:
            await listeners.open()
            rig = Rig(world, Path(places["root"]) / "run", port, listeners._rpc.guard, listeners._lines)
            asyncio.get_running_loop().set_exception_handler(lambda _, context: rig.faults.append(context))
            yield rig
            for client in rig.sockets:
                client.close()


async def error_of(call: Any) -> str:
    """The error's class name from the metadata, or "" for success."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return dict(error.trailing_metadata() or ()).get(ERROR_KEY) or f"unnamed {error.code()}: {error.details()}"
    return ""


def group() -> pb.Group:
    return pb.Group(namespace=1, hashes=MANY.tobytes())


async def test_nobody_gets_in_without_a_name() -> None:
    """A made-up token is SessionLost; no token or a wrong credential is NotPermitted."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        for token in ("1.00", "x", ""):
            made_up = (("tierd-session", token),)
            assert await error_of(cache.Lookup(pb.LookupRequest(), metadata=made_up)) == "SessionLost"
        for metadata in ((), (("authorization", "Bearer x"),)):
            assert await error_of(cache.Lookup(pb.LookupRequest(), metadata=metadata)) == "NotPermitted"


async def test_operators_only() -> None:
    """The Admin service serves the daemon's own user, and no credential."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        assert await error_of(admin.Status(apb.StatusRequest(), metadata=await rig.session())) == ""
        guest = await rig.session(credential=SECRET)
        assert await error_of(admin.Status(apb.StatusRequest(), metadata=guest)) == "NotPermitted"
        bearer = (("authorization", f"Bearer {SECRET}"),)
        assert await error_of(admin.Status(apb.StatusRequest(), metadata=bearer)) == "NotPermitted"


async def test_another_tenants_namespace() -> None:
    """A namespace of another tenant is refused, although its number is valid."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        guest = await rig.session(credential=SECRET)
        assert await error_of(cache.Lookup(pb.LookupRequest(groups=[group()]), metadata=guest)) == "NotPermitted"


@pytest.mark.parametrize("remote", [False, True])
async def test_a_number_that_means_another_namespace(remote: bool) -> None:
    """A call whose digest does not fit its namespace's number is SessionLost, and no block is stored."""
    async with rigged() as rig, rig.stubs(remote=remote) as (cache, _):
        metadata = (("authorization", f"Bearer {SECRET}"),) if remote else await rig.session()
        spaces = [
            await cache.OpenNamespace(
                pb.OpenNamespaceRequest(model=name, tokens_per_block=16, block_bytes=BLOCK_BYTES), metadata=metadata
            )
            for name in ("one", "two")
        ]

        async def errors(number: int, digest: bytes) -> set[str]:
            asked = pb.Group(namespace=number, hashes=MANY[:1].tobytes(), digest=digest)
            start = pb.PutGroup(
                namespace=number, blocks=rig.world.put_query(chain(2, 1)).blocks.tobytes(), digest=digest
            )
            return {
                await error_of(cache.Lookup(pb.LookupRequest(groups=[asked]), metadata=metadata)),
                await error_of(cache.Prefetch(pb.PrefetchRequest(groups=[asked]), metadata=metadata)),
                await error_of(cache.Get(pb.GetRequest(group=asked), metadata=metadata).read()),
                await error_of(
                    cache.Put(iter([pb.PutChunk(group=start, checksum=record_checksum(b""))]), metadata=metadata)
                ),
            }

        one, two = ((space.namespace, space.digest) for space in spaces)
        assert one[0] > 1, "1 is another tenant's, or another model's"
        for number in (1, one[0], 99):
            assert await errors(number, two[1]) == {"SessionLost"}
        assert "SessionLost" not in await errors(*two)
        await rig.quiet()


async def test_handles_stay_on_this_machine() -> None:
    """Over TCP no lease or reservation is possible: a lost client's would never end."""
    async with rigged() as rig, rig.stubs(remote=True) as (cache, _):
        bearer = (("authorization", f"Bearer {SECRET}"),)
        calls = {
            "Acquire": pb.AcquireRequest(),
            "Reserve": pb.ReserveRequest(),
            "Commit": pb.CommitRequest(),
            "Release": pb.ReleaseRequest(),
            "Abort": pb.AbortRequest(),
            "ReportAttention": pb.ReportAttentionRequest(),
        }
        for method, message in calls.items():
            assert await error_of(getattr(cache, method)(message, metadata=bearer)) == "Unsupported"
        space = pb.OpenNamespaceRequest(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        assert await error_of(cache.OpenNamespace(space, metadata=bearer)) == ""


async def test_too_many_calls() -> None:
    """A call beyond the queue limit is refused with a retry time."""
    async with rigged(queue_limit=1) as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        start, first = await put_start(rig, cache), cache.Put(metadata=metadata)
        await first.write(start)
        await until(lambda: rig.running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cache.Lookup(pb.LookupRequest(), metadata=metadata)
        trailing = dict(caught.value.trailing_metadata())
        assert trailing[ERROR_KEY] == "Overloaded"
        assert int(trailing["tierd-retry-ms"]) > 0
        first.cancel()
        await rig.quiet()


async def two_puts(rig: Rig, cache: Any, metadata: Any) -> list[Any]:
    """Two streams of one session that have started and then stall."""
    start = await put_start(rig, cache)
    puts = [cache.Put(metadata=metadata) for _ in range(2)]
    for put in puts:
        await put.write(start)
    await until(lambda: rig.running == 2)
    return puts


async def test_one_session_leaves_room_for_others() -> None:
    """A session with many open calls is refused more, while others are served."""
    async with rigged(queue_limit=4) as rig, rig.stubs() as (cache, _):
        greedy, other = await rig.session(), await rig.session()
        puts = await two_puts(rig, cache, greedy)
        assert await error_of(cache.Acquire(pb.AcquireRequest(), metadata=greedy)) == "Overloaded"
        assert await error_of(cache.Acquire(pb.AcquireRequest(), metadata=other)) != "Overloaded"
        for put in puts:
            put.cancel()
        await rig.quiet()


async def test_who_goes_on_beyond_its_credits_is_cut_off() -> None:
    """A client far beyond its credits loses its session; until then releases and others are served."""
    async with rigged(session_credits=2) as rig, rig.stubs() as (cache, _):
        greedy, other = await rig.session(), await rig.session()
        puts = await two_puts(rig, cache, greedy)
        errors = [await error_of(cache.Lookup(pb.LookupRequest(), metadata=greedy)) for _ in range(2 * PATIENCE)]
        assert set(errors) == {"Overloaded"}
        assert await error_of(cache.Release(pb.ReleaseRequest(leases=[7]), metadata=greedy)) == ""
        async with asyncio.timeout(SOON_S):
            while (error := await error_of(cache.Lookup(pb.LookupRequest(), metadata=greedy))) == "Overloaded":
                pass
            told = msgpack.unpackb(await asyncio.get_running_loop().sock_recv(rig.sockets[0], 8192))
        assert error == "SessionLost"
        assert (told["ok"], told["error"]) == (False, "Overloaded")
        assert "credits" in told["message"]
        assert await error_of(cache.Release(pb.ReleaseRequest(), metadata=other)) == ""
        for put in puts:
            put.cancel()
        await rig.quiet()


async def test_a_call_that_never_runs_gives_its_place_back() -> None:
    """A call without a message holds a place only until it is cancelled."""
    async with rigged(session_credits=2) as rig:
        metadata = await rig.session()
        async with grpc.aio.insecure_channel(f"unix:{rig.target}/tierd.sock") as channel:
            call = channel.stream_unary("/tierd.v1.Cache/Lookup")(metadata=metadata)
            await call.wait_for_connection()
            await until(lambda: rig.running == 1)
            call.cancel()
            await rig.quiet()


async def test_a_call_whose_message_never_comes_is_ended() -> None:
    """A call whose message never arrives ends with DeadlineExceeded, and its partial message is dropped."""
    async with rigged(call_timeout='"1 s"') as rig:
        metadata = await rig.session()
        async with grpc.aio.insecure_channel(f"unix:{rig.target}/tierd.sock") as channel:
            call = channel.stream_unary("/tierd.v1.Cache/Lookup")(metadata=metadata)
            await call.wait_for_connection()
            await until(lambda: rig.running == 1)
            async with asyncio.timeout(SOON_S):
                assert await error_of(call) == "DeadlineExceeded"
            await rig.quiet()


async def test_a_call_that_is_gone_when_its_time_is_up() -> None:
    """The timer of a call that was cancelled before its message has no effect."""
    async with rigged(call_timeout='"0.2 s"') as rig:
        metadata, clock = await rig.session(), asyncio.get_running_loop().time
        async with grpc.aio.insecure_channel(f"unix:{rig.target}/tierd.sock") as channel:
            call = channel.stream_unary("/tierd.v1.Cache/Lookup")(metadata=metadata)
            await call.wait_for_connection()
            await until(lambda: rig.running == 1)
            call.cancel()
            await rig.quiet()
            late = clock() + 0.4
            await until(lambda: clock() > late)
            await rig.quiet()


async def test_health_needs_no_name_and_unknown_calls_have_none() -> None:
    """A health check needs no session; an unknown method is UNIMPLEMENTED and takes no place."""
    async with rigged(session_credits=2) as rig:
        async with grpc.aio.insecure_channel(f"unix:{rig.target}/tierd.sock") as channel:
            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert checked.status in (
                health_pb2.HealthCheckResponse.SERVING,
                health_pb2.HealthCheckResponse.NOT_SERVING,
            )
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await channel.unary_unary("/tierd.v1.Cache/Nonsense")(b"")
                assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await rig.quiet()


async def test_a_replayed_call_brings_its_time() -> None:
    """With a replayed clock, a call's own milliseconds set the daemon's clock."""
    async with rigged(clock='"replay"') as rig, rig.stubs() as (_, admin):
        metadata = await rig.session()
        await admin.Status(apb.StatusRequest(), metadata=(*metadata, ("tierd-time-ms", "5250")))
        assert rig.world.cache.clock.now() == 5.25


async def test_silent_put_ends() -> None:
    """A Put that stalls ends at the daemon's own deadline, and its pages are released."""
    async with rigged(call_timeout='"1 s"') as rig, rig.stubs() as (cache, _):
        call = cache.Put(metadata=await rig.session())
        await call.write(await put_start(rig, cache))
        assert await error_of(call) == "DeadlineExceeded"
        await rig.quiet()


async def test_unread_get_ends() -> None:
    """A Get whose client does not read ends at its deadline, and its lease is released."""
    async with rigged(call_timeout='"1 s"') as rig, rig.stubs() as (cache, _):
        namespace = await filled(rig, cache)
        call = cache.Get(pb.GetRequest(group=namespace), metadata=await rig.session())
        await call.initial_metadata()
        assert rig.world.pins
        await rig.quiet()


async def test_a_deadline_at_both_ends_of_a_call_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A call whose deadline passes in gRPC and in the daemon at once logs no traceback and holds nothing."""
    together = 100
    async with rigged(session_credits=together, queue_limit=16 * together) as rig, rig.stubs() as (cache, _):
        # In the header alone: the client's own timer would end the call before.
        metadata, ends = (*await rig.session(), ("grpc-timeout", "60m")), Counter[str]()
        for _ in range(count(test=1_000, nightly=20_000, weekly=100_000) // together):
            ends.update(await asyncio.gather(*(error_of(cache.Put(metadata=metadata)) for _ in range(together))))
            await rig.quiet()
    report("deadlines at both ends of a call", calls=ends.total(), by_the_daemon=ends.pop("DeadlineExceeded", 0))
    assert any("DEADLINE_EXCEEDED" in end for end in ends)
    assert "Traceback" not in caplog.text


async def test_a_deadline_in_the_midst_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A Get that gRPC times out while its client does not read logs no traceback and releases its lease."""
    async with rigged(session_credits=64, queue_limit=1024) as rig, rig.stubs() as (cache, _):
        query = pb.GetRequest(group=await filled(rig, cache))
        metadata = (*await rig.session(), ("grpc-timeout", "100m"))
        for _ in range(count(test=10, nightly=200, weekly=1_000)):
            calls = [cache.Get(query, metadata=metadata) for _ in range(32)]
            await asyncio.gather(*(call.initial_metadata() for call in calls))
            await rig.quiet()
            for call in calls:
                call.cancel()
    assert "Traceback" not in caplog.text


def test_a_call_that_is_used_wrongly_is_no_end() -> None:
    """Only errors of late sends are suppressed; any other error of grpc.aio is raised."""
    with pytest.raises(grpc.aio.InternalError), unless_over():
        raise grpc.aio.InternalError(
            "Failed grpc_call_start_batch: 10 with grpc_call_error value: 'GRPC_CALL_ERROR_INVALID_METADATA'"
        )


@pytest.mark.parametrize(
    "said", ['Failed "execute_batch": (SendMessageOperation,)', "Failed grpc_call_start_batch: 10"]
)
async def test_a_reply_that_comes_too_late_is_no_line(caplog: pytest.LogCaptureFixture, said: str) -> None:
    """grpc.aio logs no traceback for a unary reply after the call's end, but does for other errors."""
    async with rigged():
        try:
            raise grpc.aio.InternalError(said)
        except grpc.aio.InternalError:
            logging.getLogger(GRPC_LOG).exception("ExecuteBatchError raised in core by servicer method")
    told = [record for record in caplog.records if record.name == GRPC_LOG]
    assert bool(told) is ("execute_batch" not in said)


async def test_cancelled_streams_leave_nothing() -> None:
    """A cancelled Get, Put or Watch holds nothing and raises no fault."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        namespace, metadata = await filled(rig, cache), await rig.session()
        get, watch, put = (
            cache.Get(pb.GetRequest(group=namespace), metadata=metadata),
            cache.Watch(pb.WatchRequest(), metadata=metadata),
            cache.Put(metadata=metadata),
        )
        await put.write(await put_start(rig, cache))
        assert (await get.read()).tokens
        await until(lambda: rig.running == 2)
        for call in (get, watch, put):
            call.cancel()
        await rig.quiet()


async def test_watchers_are_counted() -> None:
    """The watches of a session are bounded."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        watches = [cache.Watch(pb.WatchRequest(after=1), metadata=metadata) for _ in range(9)]
        errors = {await first_error(watches), ""}
        assert errors == {"Overloaded", ""}
        for watch in watches:
            watch.cancel()
        await rig.quiet()


async def first_error(calls: list[Any]) -> str:
    """The error of the first call that ends."""
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(error_of(call.read())) for call in calls],
        timeout=SOON_S,
        return_when=asyncio.FIRST_COMPLETED,
    )
    return done.pop().result()


async def filled(rig: Rig, cache: Any) -> pb.Group:
    """The group of 128 blocks that the daemon's own user has stored."""
    metadata = await rig.session()
    namespace = await own_namespace(cache, metadata)

    async def chunks() -> AsyncIterator[pb.PutChunk]:
        blocks = rig.world.put_query(MANY).blocks.tobytes()
        yield pb.PutChunk(group=pb.PutGroup(namespace=namespace, blocks=blocks), checksum=record_checksum(b""))
        data = bytes(BLOCK_BYTES)
        for i in range(len(MANY)):
            yield pb.PutChunk(index=i, data=data, checksum=record_checksum(data))

    reply = await cache.Put(chunks(), metadata=metadata)
    assert set(reply.statuses[::2]) == {BlockStatus.READY}
    return pb.Group(namespace=namespace, hashes=MANY.tobytes())


async def put_start(rig: Rig, cache: Any) -> pb.PutChunk:
    """A Put's first chunk, into a namespace of the daemon's own user."""
    blocks = rig.world.put_query(chain(2, 2)).blocks.tobytes()
    group = pb.PutGroup(namespace=await own_namespace(cache, await rig.session()), blocks=blocks)
    return pb.PutChunk(group=group, checksum=record_checksum(b""))


async def own_namespace(cache: Any, metadata: Any) -> int:
    request = pb.OpenNamespaceRequest(model="own", tokens_per_block=16, block_bytes=BLOCK_BYTES)
    return int((await cache.OpenNamespace(request, metadata=metadata)).namespace)


async def until(condition: Any) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
