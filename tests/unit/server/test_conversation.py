"""Conversations on the daemon's own sockets: each message passes what a call passes, and the stream's end is the call's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.unit.cache.world import SOON_S
from tests.unit.server.test_guard import MANY, SECRET, Rig, error_of, filled, own_namespace, put_start, rigged, until
from tierd._proto import cache_pb2 as pb
from tierd.server.credits import CONVERSATIONS_BORNE
from tierd.testing import chain


class Talk:
    """One stream, and what one asks on it."""

    def __init__(self, cache: Any, metadata: Any) -> None:
        self.stream = cache.Converse(metadata=metadata)

    async def ask(self, method: str, message: Any, **fields: Any) -> pb.Answer:
        """The answer."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.stream.write(pb.Ask(method=method, message=data, **fields))
        answer: pb.Answer = await self.stream.read()
        return answer


@contextlib.asynccontextmanager
async def talking(**server: object) -> AsyncIterator[tuple[Rig, Any, Talk]]:
    """A rig, its stub, and a conversation of a session of the daemon's own user."""
    async with rigged(**server) as rig, rig.stubs() as (cache, _):
        talk = Talk(cache, await rig.session())
        yield rig, cache, talk
        talk.stream.cancel()
        await rig.quiet()


async def test_a_conversation_answers_as_calls_do() -> None:
    """Reply for reply, what a message on the stream gets is what a call of its own gets."""
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


async def test_faults_are_answers_and_the_stream_goes_on() -> None:
    """Whatever is wrong with a message is said by name, status and text, as of a call; the next message is answered."""
    async with talking() as (_, _cache, talk):
        for method, message, error in (
            ("Lookup", pb.LookupRequest(), "InvalidArgument"),
            ("Lookup", b"\xff\xff\xff", "InvalidArgument"),
            ("Nonsense", b"", "InvalidArgument"),
            ("Put", b"", "InvalidArgument"),
            ("Watch", b"", "InvalidArgument"),
            ("Converse", b"", "InvalidArgument"),
            ("Status", b"", "InvalidArgument"),
            ("Lookup", pb.LookupRequest(groups=[pb.Group(namespace=999)]), "NotFound"),
            ("Commit", pb.CommitRequest(reservation=7), "NotFound"),
        ):
            answer = await talk.ask(method, message)
            assert (answer.error, bool(answer.status), bool(answer.details)) == (error, True, True), method
        assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""


async def test_bytes_that_are_no_ask() -> None:
    """Bytes that are no message at all are an answer too, and nothing is logged as a fault of ours."""
    async with rigged() as rig, grpc.aio.insecure_channel(f"unix:{rig.target}/tierd.sock") as channel:
        stream = channel.stream_stream("/tierd.v1.Cache/Converse")(metadata=await rig.session())
        await stream.write(b"\xff\xff\xff")
        assert pb.Answer.FromString(await stream.read()).error == "InvalidArgument"
        stream.cancel()
        await rig.quiet()


async def test_every_message_needs_an_open_session() -> None:
    """Nobody opens a conversation without a token or over TCP; once the session has ended, its conversation ends too, by name."""
    async with rigged() as rig, rig.stubs() as (cache, _), rig.stubs(remote=True) as (far, _admin):
        assert await error_of(cache.Converse(metadata=(("tierd-session", "1.00"),)).read()) == "SessionLost"
        bearer = (("authorization", f"Bearer {SECRET}"),)
        assert await error_of(far.Converse(metadata=bearer).read()) == "Unsupported"
        talk = Talk(cache, await rig.session())
        assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""
        rig.sockets[-1].close()
        async with asyncio.timeout(SOON_S):
            assert await error_of(talk.stream.read()) == "SessionLost"
        await rig.quiet()


async def test_a_session_that_ends_in_the_middle_of_a_call() -> None:
    """A conversation whose session ends while it is in a call ends after that call."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        metadata, hang = await rig.session(), asyncio.Event()
        talk, namespace = Talk(cache, metadata), await own_namespace(cache, metadata)
        group = pb.PutGroup(namespace=namespace, blocks=rig.world.put_query(chain(2, 2)).blocks.tobytes())
        rig.world.cache.flights.prepared = lambda _segments: hang.wait()  # type: ignore[method-assign,assignment]
        asked = asyncio.create_task(talk.ask("Reserve", pb.ReserveRequest(groups=[group], tier=1)))
        await until(lambda: rig.running == 1)
        tenants = rig.world.cache._tenants
        count = len(tenants)
        rig.sockets[-1].close()
        await until(lambda: len(tenants) < count)
        hang.set()
        assert (await asked).error == "SessionLost"
        async with asyncio.timeout(SOON_S):
            assert await error_of(talk.stream.read()) == "SessionLost"
        await rig.quiet()


async def test_another_tenants_namespace_in_a_conversation() -> None:
    """A namespace of another tenant can be named, and is refused."""
    async with talking() as (rig, cache, _):
        group = await filled(rig, cache)
        guest = Talk(cache, await rig.session(credential=SECRET))
        assert (await guest.ask("Lookup", pb.LookupRequest(groups=[group]))).error == "NotPermitted"
        guest.stream.cancel()


async def test_conversations_are_counted_and_hold_no_place() -> None:
    """So many a session may open, not one more; those that rest take no place among the calls in progress; a full queue refuses their calls with a hint."""
    async with rigged(queue_limit=1) as rig, rig.stubs() as (cache, _):
        metadata, start = await rig.session(), await put_start(rig, cache)
        talks = [Talk(cache, metadata) for _ in range(CONVERSATIONS_BORNE)]
        for talk in talks:
            assert (await talk.ask("Release", pb.ReleaseRequest())).status == ""
        assert rig.running == 0
        assert await error_of(cache.Converse(metadata=metadata).read()) == "Overloaded"
        first = cache.Put(metadata=await rig.session())
        await first.write(start)
        await until(lambda: rig.running == 1)
        answer = await talks[0].ask("Lookup", pb.LookupRequest())
        assert (answer.error, answer.retry_ms > 0) == ("Overloaded", True)
        assert (await talks[0].ask("Release", pb.ReleaseRequest())).status == ""
        first.cancel()
        for talk in talks:
            talk.stream.cancel()
        await rig.quiet()


async def test_a_message_has_a_deadline() -> None:
    """A call of a conversation that is not done in its time is DeadlineExceeded, gives back what it took, and the stream goes on."""
    async with talking() as (rig, cache, talk):
        namespace = await own_namespace(cache, await rig.session())
        group = pb.PutGroup(namespace=namespace, blocks=rig.world.put_query(chain(2, 2)).blocks.tobytes())
        hang = asyncio.Event()
        rig.world.cache.flights.prepared = lambda _segments: hang.wait()  # type: ignore[method-assign,assignment]
        answer = await talk.ask("Reserve", pb.ReserveRequest(groups=[group], tier=1), timeout_us=50_000)
        assert (answer.error, answer.status) == ("DeadlineExceeded", "DEADLINE_EXCEEDED")
        assert not rig.world.cache.parts.holds.count
        del rig.world.cache.flights.prepared
        answer = await talk.ask("Reserve", pb.ReserveRequest(groups=[group], tier=1))
        reservation = pb.ReserveReply.FromString(answer.message).reservation
        assert reservation
        assert (await talk.ask("Abort", pb.AbortRequest(reservation=reservation))).status == ""


async def test_a_conversation_that_is_cancelled_leaves_nothing() -> None:
    """The end of the stream is the end of its call: what that took comes back."""
    async with talking() as (rig, cache, talk):
        namespace = await own_namespace(cache, await rig.session())
        group = pb.PutGroup(namespace=namespace, blocks=rig.world.put_query(chain(2, 2)).blocks.tobytes())
        hang = asyncio.Event()
        rig.world.cache.flights.prepared = lambda _segments: hang.wait()  # type: ignore[method-assign,assignment]
        await talk.stream.write(
            pb.Ask(method="Reserve", message=pb.ReserveRequest(groups=[group], tier=1).SerializeToString())
        )
        await until(lambda: rig.running == 1)
        talk.stream.cancel()
        await rig.quiet()
        assert not rig.world.cache.parts.holds.count


async def test_an_end_waits_for_calls_and_not_for_rest() -> None:
    """When the daemon ends, conversations that rest end at once, as UNAVAILABLE, and one in the midst of a call when that is answered."""
    async with rigged() as rig, rig.stubs() as (cache, _):
        metadata = await rig.session()
        namespace = await own_namespace(cache, metadata)
        group = pb.PutGroup(namespace=namespace, blocks=rig.world.put_query(chain(2, 2)).blocks.tobytes())
        resting, busy = Talk(cache, metadata), Talk(cache, metadata)
        assert (await resting.ask("Release", pb.ReleaseRequest())).status == ""
        hang = asyncio.Event()
        rig.world.cache.flights.prepared = lambda _segments: hang.wait()  # type: ignore[method-assign,assignment]
        await busy.stream.write(
            pb.Ask(method="Reserve", message=pb.ReserveRequest(groups=[group], tier=1).SerializeToString())
        )
        await until(lambda: rig.running == 1)
        rig.conversations.end()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await resting.stream.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert rig.running == 1
        hang.set()
        assert pb.ReserveReply.FromString((await busy.stream.read()).message).reservation
        assert "UNAVAILABLE" in await error_of(busy.stream.read())
