"""Lines on the daemon's own sockets: messages get the checks of calls, and a line's end ends its call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest

from tests.unit.cache.world import SOON_S
from tests.unit.server.grpc.test_guard import MANY, SECRET, Rig, filled, own_namespace, put_start, rigged, until
from tierd._proto import cache_pb2 as pb
from tierd.core.formats.model import HANDLE, BlockStatus
from tierd.server.local_rpc.calls import LINES_BORNE
from tierd.server.local_rpc.line import MESSAGE_MAX_BYTES
from tierd.testing import chain


class Talk:
    """The client's end of one line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    async def ask(self, method: str, message: Any, **fields: Any) -> pb.Answer:
        """Sends a call and returns the answer."""
        await self.say(method, message, **fields)
        answer = await self.hear()
        assert answer is not None
        return answer

    async def say(self, method: str, message: Any, **fields: Any) -> None:
        """Sends a call."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.send(pb.Ask(method=method, message=data, **fields).SerializeToString())

    async def send(self, data: bytes) -> None:
        """Sends a message."""
        await asyncio.get_running_loop().sock_sendall(self.connection, struct.pack("<I", len(data)) + data)

    async def hear(self) -> pb.Answer | None:
        """The next answer; None at the end of the line."""
        async with asyncio.timeout(SOON_S):
            head = await self._bytes(4)
            return pb.Answer.FromString(await self._bytes(*struct.unpack("<I", head))) if head else None

    async def _bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = await asyncio.get_running_loop().sock_recv(self.connection, count - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                return b""
            data += more
        return data


async def line_of(rig: Rig, client: socket.socket | None = None) -> Talk | str:
    """A new line of a session, by default the latest session, or the error's name."""
    client = client or rig.sockets[-1]
    await asyncio.get_running_loop().sock_sendall(client, msgpack.packb({"op": "line"}))
    for _ in range(1000):
        with contextlib.suppress(BlockingIOError):
            data, told, _, _ = client.recvmsg(8192, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            reply = msgpack.unpackb(data)
            if not reply["ok"]:
                return str(reply["error"])
            (fd,) = struct.unpack("i", told[0][2])
            connection = socket.socket(fileno=fd)
            connection.setblocking(False)
            rig.sockets.insert(0, connection)  # to be closed at the end
            return Talk(connection)
        await asyncio.sleep(0.01)
    raise TimeoutError("no answer to `line`")


async def talk_of(rig: Rig, **changed: Any) -> Talk:
    """A line of a new session."""
    await rig.session(**changed)
    talk = await line_of(rig)
    assert isinstance(talk, Talk)
    return talk


@contextlib.asynccontextmanager
async def talking(**server: object) -> AsyncIterator[tuple[Rig, Any, Talk]]:
    """A rig, its stub, and a line of a session of the daemon's own user."""
    async with rigged(**server) as rig, rig.stubs() as (cache, _):
        talk = await talk_of(rig)
        yield rig, cache, talk
        talk.connection.close()
        await rig.quiet()


@contextlib.asynccontextmanager
async def hung(rig: Rig, cache: Any) -> AsyncIterator[tuple[pb.ReserveRequest, asyncio.Event]]:
    """A Reserve that hangs until the event."""
    namespace, hang = await own_namespace(cache, await rig.session()), asyncio.Event()
    group = pb.PutGroup(namespace=namespace, blocks=rig.world.put_query(chain(2, 2)).blocks.tobytes())
    rig.world.cache.flights.prepared = lambda _segments: hang.wait()  # type: ignore[method-assign,assignment]
    yield pb.ReserveRequest(groups=[group], tier=1), hang


async def test_a_line_answers_as_gRPC_does() -> None:  # noqa: N802 - its name
    """A line gives the same reply to a message as gRPC."""
    async with talking() as (rig, cache, talk):
        request = pb.LookupRequest(groups=[await filled(rig, cache)])
        alone = await cache.Lookup(request, metadata=await rig.session())
        answer = await talk.ask("Lookup", request)
        assert (answer.status, pb.LookupReply.FromString(answer.message)) == ("", alone)
        assert alone.tokens == 16 * len(MANY)
        given = pb.AcquireReply.FromString(
            (await talk.ask("Acquire", pb.AcquireRequest(groups=request.groups, tier=1))).message
        )
        assert rig.world.pins
        assert (await talk.ask("Release", pb.ReleaseRequest(leases=[given.lease]))).status == ""
        assert not rig.world.pins


async def put_on(rig: Rig, talk: Talk, seed: int, **fields: Any) -> pb.Answer:
    """The answer to a Commit of blocks that were reserved, but not written."""
    group = pb.PutGroup(namespace=rig.world.namespace.id, blocks=rig.world.put_query(chain(seed, 2)).blocks.tobytes())
    given = await talk.ask("Reserve", pb.ReserveRequest(groups=[group], tier=1))
    return await talk.ask(
        "Commit",
        pb.CommitRequest(reservation=pb.ReserveReply.FromString(given.message).reservation),
        request="given up",
        **fields,
    )


async def test_a_commit_that_ends_after_its_deadline_says_nothing_more() -> None:
    """A commit that ends after its deadline sends no answer, since another call may use the line by then."""
    async with talking() as (rig, cache, talk):
        rig.world.namespace = rig.world.cache.registry.get(await own_namespace(cache, await rig.session()))
        mover, go = rig.world.cache.parts.mover, asyncio.Event()
        inner = mover.hash_pages

        async def hash_late(*pages: Any) -> Any:
            await go.wait()
            return await inner(*pages)

        mover.hash_pages = hash_late  # type: ignore[method-assign]
        assert (await put_on(rig, talk, 5, timeout_us=50_000)).error == "DeadlineExceeded"
        go.set()
        await until(lambda: not rig.world.cache._commits)
        looked = pb.Group(namespace=rig.world.namespace.id, hashes=chain(5, 2).tobytes())
        answer = await talk.ask("Lookup", pb.LookupRequest(groups=[looked]))
        assert pb.LookupReply.FromString(answer.message).tokens == 32


async def unwritten(rig: Rig, talk: Talk, seed: int, **fields: Any) -> int:
    """Asks to commit blocks that are reserved and not yet written; returns their reservation."""
    group = pb.PutGroup(namespace=rig.world.namespace.id, blocks=rig.world.put_query(chain(seed, 2)).blocks.tobytes())
    given = pb.ReserveReply.FromString((await talk.ask("Reserve", pb.ReserveRequest(groups=[group], tier=1))).message)
    await talk.say("Commit", pb.CommitRequest(reservation=given.reservation, unwritten=True), more=True, **fields)
    return given.reservation


async def say_written(talk: Talk, sums: bytes = b"") -> None:
    await talk.send(pb.Written(sums=sums).SerializeToString())


async def test_a_commit_is_answered_when_its_second_message_has_come() -> None:
    """A commit with a second message is answered only after that, and the line accepts the next call."""
    async with talking() as (rig, cache, talk):
        rig.world.namespace = rig.world.cache.registry.get(await own_namespace(cache, await rig.session()))
        await unwritten(rig, talk, 5)
        await until(lambda: rig.running == 1)
        await asyncio.sleep(0.05)
        assert not rig.world.cache.core.stats().blocks
        await say_written(talk)
        answer = await talk.hear()
        assert answer is not None
        handles = np.frombuffer(pb.CommitReply.FromString(answer.message).handles, HANDLE)
        assert handles["status"].tolist() == [BlockStatus.READY] * 2
        assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.CommitRequest(reservation=7, unwritten=True), "NotFound"),
        (b"\xff\xff", "InvalidArgument"),
    ],
)
async def test_what_follows_a_call_that_was_refused_is_thrown_away(request_: Any, error: str) -> None:
    """A second message belongs to its call even if refused: the message after it is the next call."""
    async with talking() as (_, _cache, talk):
        answer = await talk.ask("Commit", request_, more=True)
        assert answer.error == error
        await say_written(talk)
        assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""


@pytest.mark.parametrize("how", ["closes the line", "says nothing", "says nonsense", "ends its session"])
async def test_a_writer_that_does_not_come_to_its_end(how: str) -> None:
    """A commit whose writer never finishes ends at its deadline; no block is published, and the
    reservation keeps its pages."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        its_socket, talk = rig.sockets[-1], await line_of(rig)
        assert isinstance(talk, Talk)
        rig.world.namespace = rig.world.cache.registry.get(await own_namespace(cache, metadata))
        reservation = await unwritten(rig, talk, 5, timeout_us=200_000 if how == "says nothing" else 0)
        await until(lambda: bool(rig.lines._awaiting))
        if how == "closes the line":
            talk.connection.close()
        elif how == "ends its session":
            its_socket.close()
        else:
            if how == "says nonsense":
                await talk.send(b"\xff\xff")
            answer = await talk.hear()
            assert answer is not None
            assert answer.error == ("InvalidArgument" if how == "says nonsense" else "DeadlineExceeded")
        await until(lambda: not rig.running)
        assert not rig.world.cache.core.stats().blocks
        if how != "ends its session":
            await cache.Abort(pb.AbortRequest(reservation=reservation), metadata=metadata)
            await rig.quiet()
        rig.world.cache.core.check()


async def test_over_grpc_nothing_can_follow() -> None:
    """Over gRPC a commit of blocks that are not yet written is refused by name."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        with pytest.raises(grpc.aio.AioRpcError, match="no message can follow this call"):
            await cache.Commit(pb.CommitRequest(reservation=1, unwritten=True), metadata=metadata)


async def test_faults_are_answers_and_the_line_goes_on() -> None:
    """A faulty message is answered with error name, status and text, and the next message is answered."""
    async with talking() as (_, _cache, talk):
        for method, message, error in (
            ("Lookup", pb.LookupRequest(), "InvalidArgument"),
            ("Lookup", b"\xff\xff\xff", "InvalidArgument"),
            ("Nonsense", b"", "InvalidArgument"),
            ("Put", b"", "InvalidArgument"),
            ("Watch", b"", "InvalidArgument"),
            ("Status", b"", "InvalidArgument"),
            ("Lookup", pb.LookupRequest(groups=[pb.Group(namespace=999)]), "NotFound"),
            ("Commit", pb.CommitRequest(reservation=7), "NotFound"),
        ):
            answer = await talk.ask(method, message)
            assert (answer.error, bool(answer.status), bool(answer.details)) == (error, True, True), method
        assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""


async def test_bytes_that_are_no_ask() -> None:
    """Malformed and empty messages, in any pieces, are answered, and the daemon logs no fault of its own."""
    async with talking() as (_, _cache, talk):
        await talk.send(b"\xff\xff\xff")
        await talk.send(b"")
        for part in (b"\x03", b"\x00\x00\x00\xff", b"\xff\xff"):
            await asyncio.get_running_loop().sock_sendall(talk.connection, part)
        assert [answer and answer.error for answer in [await talk.hear() for _ in range(3)]] == ["InvalidArgument"] * 3


async def test_a_message_that_is_too_long_ends_its_line() -> None:
    """A message above the limit closes its line at once, and the session goes on."""
    async with talking() as (rig, _, talk):
        await asyncio.get_running_loop().sock_sendall(talk.connection, struct.pack("<I", MESSAGE_MAX_BYTES + 1))
        assert await talk.hear() is None
        assert isinstance(await line_of(rig), Talk)


async def test_a_line_ends_with_its_session() -> None:
    """A session's end closes idle lines at once, and a line in a call after that call."""
    async with rigged() as rig, rig.stubs() as (cache, _), hung(rig, cache) as (request, hang):
        resting = await talk_of(rig)
        client = rig.sockets[-1]
        busy = await line_of(rig, client)
        assert isinstance(busy, Talk)
        await busy.say("Reserve", request)
        await until(lambda: rig.running == 1)
        client.close()
        assert await resting.hear() is None
        assert rig.running == 1
        hang.set()
        answer = await busy.hear()
        assert answer is not None and answer.error in ("SessionLost", "NotPermitted")
        assert await busy.hear() is None
        await rig.quiet()


async def test_another_tenants_namespace_on_a_line() -> None:
    """A namespace of another tenant is refused, although its number is valid."""
    async with talking() as (rig, cache, _):
        group = await filled(rig, cache)
        guest = await talk_of(rig, credential=SECRET)
        assert (await guest.ask("Lookup", pb.LookupRequest(groups=[group]))).error == "NotPermitted"
        guest.connection.close()


async def test_lines_are_counted_and_hold_no_place() -> None:
    """A session's lines are bounded, idle lines take no place, and a full queue refuses calls with a hint."""
    async with rigged(queue_limit=1) as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        client, start = rig.sockets[-1], await put_start(rig, cache)
        talks = [await line_of(rig, client) for _ in range(LINES_BORNE)]
        assert await line_of(rig, client) == "Overloaded"
        first = talks[0]
        assert isinstance(first, Talk) and (await first.ask("Release", pb.ReleaseRequest())).status == ""
        assert rig.running == 0
        put = cache.Put(metadata=metadata)
        await put.write(start)
        await until(lambda: rig.running == 1)
        answer = await first.ask("Lookup", pb.LookupRequest())
        assert (answer.error, answer.retry_ms > 0) == ("Overloaded", True)
        assert (await first.ask("Release", pb.ReleaseRequest())).status == ""
        put.cancel()
        first.connection.close()
        await until(lambda: len(rig.lines._tasks) < LINES_BORNE)
        assert isinstance(await line_of(rig, client), Talk)
        await rig.quiet()


async def test_a_message_has_a_deadline() -> None:
    """A call that exceeds its deadline is DeadlineExceeded and releases all; the line stays usable."""
    async with talking() as (rig, cache, talk), hung(rig, cache) as (request, _hang):
        answer = await talk.ask("Reserve", request, timeout_us=50_000)
        assert (answer.error, answer.status) == ("DeadlineExceeded", "DEADLINE_EXCEEDED")
        assert not rig.world.cache.parts.holds.count
        del rig.world.cache.flights.prepared
        answer = await talk.ask("Reserve", request)
        reservation = pb.ReserveReply.FromString(answer.message).reservation
        assert reservation
        assert (await talk.ask("Abort", pb.AbortRequest(reservation=reservation))).status == ""


async def test_a_line_that_is_closed_leaves_nothing() -> None:
    """The end of the line ends its call, which releases all that it held."""
    async with talking() as (rig, cache, talk), hung(rig, cache) as (request, _hang):
        await talk.say("Reserve", request)
        await until(lambda: rig.running == 1)
        talk.connection.close()
        await rig.quiet()
        assert not rig.world.cache.parts.holds.count


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """A client that never reads its answers uses the daemon's memory at most for a call's timeout."""
    async with talking(call_timeout='"0.3 s"') as (rig, cache, talk):
        request = pb.LookupRequest(groups=[await filled(rig, cache)] * 64)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(SOON_S):
                while True:
                    await talk.say("Lookup", request)
        await until(lambda: not rig.lines._tasks)


async def test_a_client_that_sends_ahead_is_not_read_from() -> None:
    """During a call the daemon reads little ahead; afterwards it answers the messages in order."""
    async with talking() as (rig, cache, talk), hung(rig, cache) as (request, hang):
        client = rig.sockets[-2]  # the last one is `hung`'s
        await talk.say("Reserve", request)
        await until(lambda: rig.running == 1)
        data, sent = pb.Ask(method="x" * 60_000).SerializeToString(), 0
        with contextlib.suppress(BlockingIOError):
            while sent < 64 << 20:
                sent += talk.connection.send(struct.pack("<I", len(data)) + data)
                await asyncio.sleep(0)
        assert sent < 8 << 20
        hang.set()
        first, second = await talk.hear(), await talk.hear()
        assert first is not None and second is not None and second.error == "InvalidArgument"
        other = await line_of(rig, client)
        assert isinstance(other, Talk)
        reserved = pb.ReserveReply.FromString(first.message)
        assert (await other.ask("Abort", pb.AbortRequest(reservation=reserved.reservation))).status == ""


async def test_a_message_that_does_not_end_is_not_kept() -> None:
    """A line with an incomplete message ends after a call's timeout; an idle line stays open."""
    async with talking(call_timeout='"0.3 s"') as (rig, _, resting):
        broken_off = await line_of(rig)
        assert isinstance(broken_off, Talk)
        await asyncio.get_running_loop().sock_sendall(broken_off.connection, struct.pack("<I", 1 << 20) + bytes(1000))
        assert await broken_off.hear() is None
        assert (await resting.ask("Release", pb.ReleaseRequest())).status == ""


async def test_lines_keep_no_more_than_the_daemon_gives_them() -> None:
    """If unfinished messages exceed their limit, the slowest line ends; whole messages are answered."""
    async with talking() as (rig, cache, talk):
        rig.lines._backlog._limit = (3 << 20) + 4096
        group = await filled(rig, cache)
        others = [await talk_of(rig) for _ in range(4)]
        for number, other in enumerate(others):
            await asyncio.get_running_loop().sock_sendall(other.connection, struct.pack("<I", 8 << 20) + bytes(1 << 20))
            await until(lambda: len(rig.lines._backlog._bytes) == min(number + 1, 3))  # noqa: B023
        assert await others[0].hear() is None
        answer = await talk.ask("Lookup", pb.LookupRequest(groups=[group]))
        assert pb.LookupReply.FromString(answer.message).tokens == 16 * len(MANY)
        await talk.ask("Lookup", bytes(2 << 20))  # this needs the room of all the others
        for other in others[1:]:
            if other is not others[-1]:
                assert await other.hear() is None
            other.connection.close()
        await until(lambda: not rig.lines._backlog._bytes and not rig.lines._backlog._total)


async def test_a_client_that_sends_ahead_is_one_of_many() -> None:
    """The loop turns after each message, even if many arrived at once."""
    count, turns = 100, 0
    async with talking() as (_, _cache, talk):
        await asyncio.get_running_loop().sock_sendall(talk.connection, bytes(4 * count))

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        turning = asyncio.create_task(turn())
        for _ in range(count):
            assert await talk.hear() is not None
        turning.cancel()
        assert turns >= count


async def test_an_end_waits_for_calls_and_not_for_rest() -> None:
    """When the daemon ends, idle lines end at once, and busy lines after their call is answered."""
    async with rigged() as rig, rig.stubs() as (cache, _), hung(rig, cache) as (request, hang):
        resting, busy = await talk_of(rig), await talk_of(rig)
        await busy.say("Reserve", request)
        await until(lambda: rig.running == 1)
        end = asyncio.create_task(rig.lines.finish(timeout_s=SOON_S))
        assert await resting.hear() is None
        assert rig.running == 1
        hang.set()
        answer = await busy.hear()
        assert answer is not None and pb.ReserveReply.FromString(answer.message).reservation
        assert await busy.hear() is None
        await end


async def test_an_end_does_not_wait_for_ever() -> None:
    """A call that exceeds the time of the daemon's end is cut off and releases all that it held."""
    async with rigged() as rig, rig.stubs() as (cache, _), hung(rig, cache) as (request, _hang):
        talk = await talk_of(rig)
        await talk.say("Reserve", request)
        await until(lambda: rig.running == 1)
        await rig.lines.finish(timeout_s=0.05)
        assert await talk.hear() is None
        await rig.quiet()
        assert not rig.world.cache.parts.holds.count


async def test_without_descriptors_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without free descriptors replies Overloaded, and the session goes on."""

    def refuse(*_: object) -> Any:
        raise OSError(24, os.strerror(24))

    async with rigged() as rig:
        await rig.session()
        with monkeypatch.context() as lack:
            lack.setattr(socket, "socketpair", refuse)
            assert await line_of(rig) == "Overloaded"
        assert isinstance(await line_of(rig), Talk)
