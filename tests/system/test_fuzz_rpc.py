"""Every RPC with almost correct requests: a reply or a named error, no fault, stall or lost block.

`FUZZ_SEED=` runs the messages of another seed; a failure prints the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from tests.depth import count, percentile, report
from tests.system.blocks import BlockClient, check_bytes
from tests.system.inside import CONFIG, Inside, Refused, inside
from tests.system.live_session import BLOCK_BYTES, METHODS, TOKENS, LiveSession, stored_handles
from tests.system.mutation import Mutator, names
from tests.system.raw import put_blocks
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.checksum import record_checksum
from tierd.core.formats.model import EXTENT
from tierd.errors import ERROR_KEY
from tierd.testing import SMALL, chain, content_of, is_content

SEED = os.environ.get("FUZZ_SEED", "1")
MESSAGES = count(test=200, nightly=20_000, weekly=100_000)
OVER_A_SOCKET = count(test=20, nightly=1_000, weekly=10_000)
LIFE = 2_000
"""Messages to one daemon in the test's process. Then a new one starts."""
SHORT_LIFE = {"OpenNamespace": 250}
"""RPCs with state in the daemon that each later message writes again."""
OF_ITS_OWN = {"Drain", "Namespaces"}
"""RPCs that need their own daemon: one drains it, the other lists all earlier state."""
CHECK_EVERY = 250
CALL_S = {"Watch": 0.002, "Drain": 0.004, "Quiesce": 0.01, "Flush": 0.05, "Scrub": 0.01, "Commit": 0.02}
"""Timeouts of calls that could wait long. A Commit of unwritten pages waits for its writer."""
LONG_S = 1.0
"""A longer call is a stall. The test asserts ten times this, because machines are shared."""
MEMORY_BYTES = 256 << 20
"""Limit of a process's memory growth. A leak of 1 KiB a message exceeds it in a nightly run."""
REPLAY = CONFIG.replace("[server]", '[server]\nclock = "replay"')
KEPT = chain(77, 4)
LABELS = [method.full_name for method in METHODS]


def path_of(method: MethodDescriptor) -> str:
    """The method's path in a call."""
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass
class Tally:
    """The outcomes of one RPC's calls."""

    seconds: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    """The fault, and the first request that caused it."""

    def add(self, seconds: float, code: str) -> None:
        self.seconds.append(seconds)
        self.codes[code] += 1


class Fuzzer:
    """Makes one RPC's requests: good ones with a change, at times as raw bytes or with odd metadata."""

    def __init__(self, method: MethodDescriptor, *, part: object) -> None:
        self.method = method
        self.mutator = Mutator(f"{SEED}/{method.full_name}/{part}")
        self.live = LiveSession(self.mutator)

    def request(self) -> tuple[list[Message], list[bytes]]:
        """Messages, and the bytes to send for them."""
        made, chance = self.live.request(self.method), self.mutator.random
        if chance.random() < 0.92:
            self.mutator.message(chance.choice(made))
        if len(made) > 1 and chance.random() < 0.3:
            made = self._shuffled(made)
        raw = [message.SerializeToString() for message in made]
        if chance.random() < 0.05:
            at = chance.randrange(len(raw))
            raw[at] = self.mutator.data(raw[at])
        return made, raw

    def metadata(self, token: str) -> dict[str, str]:
        """Metadata of a call: the session's, at times with an odd entry."""
        chance, odd = self.mutator.random, {}
        if chance.random() < 0.1:
            name = chance.choice(("tierd-request", "tierd-time-ms", "tierd-session", "authorization", "tierd-x"))
            odd = {name: chance.choice(("", "1", "nan", "1e400", "-1", "x" * 500, token[:-1], "ffff." + "0" * 32))}
        return {"tierd-session": token} | odd

    def _shuffled(self, made: list[Message]) -> list[Message]:
        chance = self.mutator.random
        return chance.choice(
            (
                lambda: made[:-1] or made,
                lambda: made[:1] + chance.sample(made[1:], len(made) - 1),
                lambda: made + made[-1:],
                lambda: made[1:],
            )
        )()

    def unchanged(self, mutated: Counter[str]) -> set[str]:
        """Fields of the request that no message changed."""
        return names(self.method.input_type) - {name for name, times in mutated.items() if times}


# -- in the test's own process: most messages


class Within:
    """One life of a daemon in this process, with a session and blocks that must stay right."""

    def __init__(self, daemon: Inside, token: str) -> None:
        self.daemon, self.token = daemon, token
        self.kept = np.zeros(0, dtype=EXTENT)

    async def good(self, name: str, messages: list[Message], *, timeout_s: float = 10.0) -> Any:
        """The reply of a call that should succeed. Raises Refused."""
        method = next(each for each in METHODS if each.name == name)
        raw = [message.SerializeToString() for message in messages]
        metadata = {"tierd-session": self.token}
        replies = await self.daemon.call(path_of(method), raw, metadata=metadata, timeout_s=timeout_s)
        return method.output_type._concrete_class.FromString(replies[-1])

    async def keep(self) -> None:
        """Stores and leases blocks that no message names."""
        group = await self._namespace("kept")
        await self.good("Put", _put(group, KEPT))
        request = pb.AcquireRequest(groups=[pb.Group(namespace=group, hashes=KEPT.tobytes())], tier=pb.TIER_KIND_HOST)
        handles = stored_handles(await self.good("Acquire", [request]))
        self.kept = np.zeros(len(handles), dtype=EXTENT)
        for name in ("tier", "segment", "slot", "length", "offset", "generation"):
            self.kept[name] = handles[name]
        self.check()
        assert len(self.kept) == len(KEPT)

    def check(self) -> None:
        """Checks the kept blocks byte for byte."""
        for extent, name in zip(self.kept, KEPT, strict=True):
            tier: Any = self.daemon.daemon.tiers[int(extent["tier"])]
            assert is_content(tier.view(extent)[: int(extent["length"])], name)

    async def check_service(self, turn: int) -> None:
        """Good calls still work: a new block is stored and read again, every byte right."""
        self.check()
        assert (await self.good("Status", [apb.StatusRequest()])).pid == os.getpid()
        if self.daemon.daemon.cache.is_draining:
            return
        await self.good("Unpin", [apb.PinRequest()])
        namespace, name = await self._namespace("asked"), chain(10_000 + turn, 1)
        reply = await self.good("Put", _put(namespace, name))
        if reply.statuses in (b"\1\0", b"\3\0"):
            got = await self.good_chunks(pb.GetRequest(group=pb.Group(namespace=namespace, hashes=name.tobytes())))
            assert is_content(np.frombuffer(got, dtype=np.uint8), name[0])
        else:
            assert int.from_bytes(reply.statuses, "little") == pb.BLOCK_STATUS_NO_ROOM

    async def good_chunks(self, request: pb.GetRequest) -> bytes:
        """The bytes of a Get."""
        metadata = {"tierd-session": self.token}
        raw = await self.daemon.call(
            "/tierd.v1.Cache/Get", [request.SerializeToString()], metadata=metadata, timeout_s=10.0
        )
        return b"".join(pb.GetChunk.FromString(each).data for each in raw)

    async def _namespace(self, model: str) -> int:
        request = pb.OpenNamespaceRequest(model=model, tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
        return int((await self.good("OpenNamespace", [request])).namespace)


def _put(namespace: int, hashes: np.ndarray) -> list[Message]:
    chunks: list[Message] = []
    for index, name in enumerate(hashes):
        data = content_of(name, BLOCK_BYTES).tobytes()
        chunks.append(pb.PutChunk(index=index, data=data, checksum=record_checksum(data)))
    chunks[0].group.CopyFrom(pb.PutGroup(namespace=namespace, blocks=put_blocks(hashes).tobytes()))  # type: ignore[attr-defined]
    return chunks


@contextlib.asynccontextmanager
async def life() -> AsyncIterator[Within]:
    """A daemon with a session and kept blocks. First collects the former life, so that only one exists."""
    gc.collect()
    async with inside() as daemon:
        with daemon.connect() as client:
            within = Within(daemon, (await daemon.session(client))["token"])
            await within.keep()
            yield within


async def test_a_daemon_that_ended_runs_no_more() -> None:
    """A daemon's end stops all of its tasks, which would keep the daemon in memory."""
    async with life():
        pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def fuzz_within(within: Within, fuzzer: Fuzzer, messages: int, tally: Tally) -> None:
    """Sends `messages` messages to one daemon."""
    path, name = path_of(fuzzer.method), fuzzer.method.name
    for turn in range(messages):
        for needed, request in fuzzer.live.needs(name):
            with contextlib.suppress(Refused):
                fuzzer.live.learn(needed, request[0], await within.good(needed, request))
        made, raw = fuzzer.request()
        begun, code = time.perf_counter(), "OK"
        try:
            metadata = fuzzer.metadata(within.token)
            replies = await within.daemon.call(path, raw, metadata=metadata, timeout_s=CALL_S.get(name, 0.5))
            if replies:
                fuzzer.live.learn(name, made[0], fuzzer.method.output_type._concrete_class.FromString(replies[-1]))
        except Refused as refused:
            if refused.fault:
                tally.faults.setdefault("\n".join(refused.fault.splitlines()[-4:]), f"{made} {raw}")
            fuzzer.live.failed(name, made[0])
            code = refused.code.name
        tally.add(time.perf_counter() - begun, code)
        assert not within.daemon.faults, f"{path} {made} {raw}: {within.daemon.faults}"
        if turn % CHECK_EVERY == CHECK_EVERY - 1:
            await within.check_service(turn)
    await within.check_service(messages)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS, ids=LABELS)
async def test_within(method: MethodDescriptor) -> None:
    """Almost correct requests change every field, mostly reach the handler, and cause no fault or loss."""
    tally, reached, mutated, before = Tally(), 0, Counter[str](), _memory_of(os.getpid())
    life_messages = SHORT_LIFE.get(method.name, LIFE)
    for part in range(-(-MESSAGES // life_messages)):
        fuzzer = Fuzzer(method, part=part)
        async with life() as within:
            within.daemon.reached.clear()
            await fuzz_within(within, fuzzer, min(life_messages, MESSAGES - part * life_messages), tally)
            reached += min(within.daemon.reached[path_of(method)], MESSAGES)
            mutated += fuzzer.mutator.mutated
    assert tally.faults == {}
    assert fuzzer.unchanged(mutated) == set()
    _report("fuzz rpc", method, tally, reached=reached / MESSAGES, memory=_memory_of(os.getpid()) - before)
    assert reached >= 0.6 * MESSAGES, f"{reached} of {MESSAGES} came to the handler"


@pytest.mark.parametrize("number", [math.nan, -1.0, -math.inf])
@pytest.mark.parametrize("verb", ["Drain", "Flush", "Quiesce"])
async def test_deadlines_that_are_none(verb: str, number: float) -> None:
    """A deadline that is no number of seconds is refused, before the event loop's timer gets it."""
    async with life() as within:
        request = getattr(apb, f"{verb}Request")(deadline_s=number)
        with pytest.raises(Refused) as refused:
            await within.good(verb, [request])
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "x", ""])
async def test_times_that_are_none(number: str) -> None:
    """An invalid time of a replayed call is refused, and the clock does not change."""
    async with inside(REPLAY) as daemon:
        with daemon.connect() as client:
            metadata = {"tierd-session": (await daemon.session(client))["token"], "tierd-time-ms": number}
            with pytest.raises(Refused) as refused:
                await daemon.call("/tierd.v1.Admin/Status", [b""], metadata=metadata, timeout_s=10.0)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert daemon.daemon.cache.clock.now() == 0.0


# -- another process's daemon, over its unix socket


@pytest.fixture(scope="module")
def daemon() -> Any:
    """The daemon of all messages over a socket, except those that need their own."""
    with Daemon(SMALL) as running:
        yield running


class Over:
    """A session over a real socket, with kept blocks."""

    def __init__(self, client: BlockClient) -> None:
        self.client = client
        namespace = client.open_namespace(model="kept")
        client.put(namespace, KEPT)
        self.kept = client.acquire(namespace, KEPT)
        assert len(self.kept.pages) == len(KEPT)

    def check(self, turn: int) -> None:
        """Checks that the kept blocks are right and the next good call works."""
        check_bytes(self.kept, KEPT)
        if self.client.status().state == "serving":
            namespace, name = self.client.open_namespace(model="asked"), chain(20_000 + turn, 1)
            self.client.read(namespace, name[: self.client.put(namespace, name)])

    def call(
        self, method: MethodDescriptor, raw: list[bytes], *, timeout_s: float, metadata: Any = None
    ) -> list[bytes]:
        """The replies. Raises grpc.RpcError."""
        path, channel = path_of(method), self.client._channel
        given = {"metadata": metadata or self.client.metadata, "timeout": timeout_s}
        if method.server_streaming and method.client_streaming:
            return list(channel.stream_stream(path)(iter(raw), **given))
        if method.server_streaming:
            return list(channel.unary_stream(path)(raw[0], **given))
        if method.client_streaming:
            return [channel.stream_unary(path)(iter(raw), **given)]
        return [channel.unary_unary(path)(raw[0], **given)]

    def learn(self, fuzzer: Fuzzer, name: str, request: list[Message]) -> None:
        """Makes a good call and learns from its reply."""
        method = next(each for each in METHODS if each.name == name)
        with contextlib.suppress(grpc.RpcError):
            replies = self.call(method, [message.SerializeToString() for message in request], timeout_s=10.0)
            fuzzer.live.learn(name, request[0], method.output_type._concrete_class.FromString(replies[-1]))


def fuzz_over(over: Over, fuzzer: Fuzzer, messages: int, tally: Tally) -> None:
    """Sends `messages` messages to a daemon."""
    name = fuzzer.method.name
    for turn in range(messages):
        for needed, request in fuzzer.live.needs(name):
            over.learn(fuzzer, needed, request)
        made, raw = fuzzer.request()
        begun, code = time.perf_counter(), "OK"
        try:
            over.call(fuzzer.method, raw, timeout_s=10 * CALL_S.get(name, 1.0), metadata=_sendable(fuzzer, over))
        except grpc.RpcError as error:
            code = error.code().name
            if code != "DEADLINE_EXCEEDED" and ERROR_KEY not in dict(error.trailing_metadata() or ()):
                tally.faults.setdefault(f"{code} {error.details()}"[:200], f"{made} {raw}"[:2000])
        tally.add(time.perf_counter() - begun, code)
        if turn % CHECK_EVERY == CHECK_EVERY - 1:
            over.check(turn)
    over.check(messages)


def _sendable(fuzzer: Fuzzer, over: Over) -> Any:
    return tuple(fuzzer.metadata(dict(over.client.metadata)["tierd-session"]).items())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS, ids=LABELS)
def test_over_a_socket(method: MethodDescriptor, daemon: Daemon) -> None:
    """A daemon over its socket answers no INTERNAL or UNKNOWN, logs no traceback and serves on."""
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(Daemon(SMALL)) if method.name in OF_ITS_OWN else daemon
        before, pid = _memory_of(used.pid), used.pid
        tally, fuzzer = Tally(), Fuzzer(method, part="socket")
        with BlockClient(used.target) as client:
            fuzz_over(Over(client), fuzzer, OVER_A_SOCKET, tally)
        assert tally.faults == {}
        _report("fuzz rpc over a socket", method, tally, memory=_memory_of(used.pid) - before)
        assert used.pid == pid and "Traceback" not in used.log and "call failed" not in used.log, used.log[-8000:]


def test_error_of_a_long_request(daemon: Daemon) -> None:
    """An error that quotes a very long request still has its name."""
    with BlockClient(daemon.target) as client:
        assert (
            client.error_of(client.admin.Inspect, apb.InspectRequest(hash="\N{GRINNING FACE}" * 50_000))
            == "InvalidArgument"
        )


def _report(what: str, method: MethodDescriptor, tally: Tally, *, memory: int, **figures: float) -> None:
    slowest = max(tally.seconds)
    report(
        what,
        rpc=method.full_name,
        seed=SEED,
        messages=len(tally.seconds),
        **{name: round(value, 3) for name, value in figures.items()},
        p99_ms=round(percentile(tally.seconds, 0.99) * 1e3, 2),
        slowest_ms=round(slowest * 1e3, 1),
        over_1_s=sum(each > LONG_S for each in tally.seconds),
        gained_mib=memory >> 20,
        codes=dict(tally.codes),
    )
    assert slowest < 10 * LONG_S
    assert memory < MEMORY_BYTES


def _memory_of(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
