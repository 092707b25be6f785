"""Almost correct session messages: a reply, a named refusal or a closed connection; the daemon
serves on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from typing import Any

import msgpack
import pytest

from tests.depth import percentile, report
from tests.system.live_session import BLOCK_BYTES, TOKENS
from tests.system.mutation import Mutator
from tests.system.raw import hello
from tests.system.test_fuzz_rpc import CHECK_EVERY, LIFE, LONG_S, MESSAGES, SEED, Within, life
from tierd._proto import cache_pb2 as pb
from tierd.server.session.session_requests import MESSAGE_MAX_BYTES
from tierd.testing import chain

SOON_S = 10.0
MARK = {"op": "map", "tier": 999, "segment": 0}
"""Sent after each message. Its refusal shows that the daemon has handled the message."""
UNREACHED = ("not a msgpack map", "instead of a map", "unknown op", "before hello", "a message above")
"""Refusals of messages that reach no handler."""
MESSAGE: dict[str, dict[str, Any]] = {
    "hello": hello(engine={"engine": "vllm"}),
    "map": {"op": "map", "tier": 0, "segment": 1},
    "release": {"op": "release", "leases": [1], "reservations": [1], "reply": True},
    "forget": {"op": "forget", "session": 1},
    "revoke": {"op": "revoke", "request": "abc"},
    "bye": {"op": "bye"},
    "ping": {"op": "ping"},
    "line": {"op": "line"},
}


class Speaker:
    """A client of the session socket that reconnects after the daemon closes its connection."""

    def __init__(self, within: Within) -> None:
        self.within = within
        self.session: dict[str, Any] = {}
        self.namespace = 0
        self._socket: socket.socket | None = None

    async def greet(self) -> None:
        """Opens a session if there is none, and forgets ended ones."""
        if self._socket is None:
            self._socket = self.within.daemon.connect()
        if not self.session:
            before = self.within.daemon.listeners.sessions.list()
            self._socket.send(msgpack.packb(hello()))
            self.session = await self._hear() or {}
            assert self.session.get("ok"), self.session
            for left in before:
                if left.state.value == "ended":
                    assert (await self.exchange(msgpack.packb({"op": "forget", "session": left.id})))[0]["ok"]

    async def exchange(self, message: bytes) -> list[dict[str, Any]]:
        """The daemon's replies to a message. A final empty map means that it closed the connection."""
        if self._socket is None:
            self._socket = self.within.daemon.connect()
        said: list[dict[str, Any]] = []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(message)
            self._socket.send(msgpack.packb(MARK))
        while (reply := await self._hear()) is not None:
            if "of tier 999" in str(reply.get("message")):
                return said
            said.append(reply)
        self.close()
        return [*said, {}]

    def close(self) -> None:
        """Closes the socket."""
        self.session = {}
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _hear(self) -> dict[str, Any] | None:
        assert self._socket is not None
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 65536, 4)
            except (
                BlockingIOError,
                ConnectionResetError,
            ):  # ConnectionResetError comes once, before the last reply: the mark was unread
                await asyncio.sleep(0)
                continue
            for fd in fds:
                os.close(fd)
            return msgpack.unpackb(data) if data else None
        raise AssertionError(f"the session socket said nothing for {SOON_S:g} s")

    async def known(self, op: str) -> dict[str, Any]:
        """The message, with numbers that exist in this session."""
        message, core = dict(MESSAGE[op]), self.within.daemon.daemon.cache.core
        if op == "map":
            message["segment"] = next((s.segment for s in core.segments(0)), 1)
        elif op == "forget":
            message["session"] = next(iter(self.within.daemon.listeners.sessions.list())).id
        elif op == "release":
            message["leases"] = [await self._lease()]
        return message

    async def _lease(self) -> int:
        token, self.within.token = self.within.token, self.session["token"]
        try:
            opened = pb.OpenNamespaceRequest(model="kept", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
            namespace = (await self.within.good("OpenNamespace", [opened])).namespace
            wanted = pb.Group(namespace=namespace, hashes=chain(77, 4).tobytes())
            request = pb.AcquireRequest(groups=[wanted], tier=pb.TIER_KIND_HOST)
            return int((await self.within.good("Acquire", [request])).lease)
        finally:
            self.within.token = token


async def fuzz(speaker: Speaker, op: str, mutator: Mutator, messages: int, seconds: list[float]) -> int:
    """Sends `messages` messages; the number that reached a handler."""
    reached = 0
    for turn in range(messages):
        if op != "hello":
            await speaker.greet()
        elif speaker.session:
            await speaker.exchange(msgpack.packb({"op": "bye"}))
        message = await speaker.known(op)
        changed = mutator.mapping(message) if mutator.random.random() < 0.9 else message
        packed = msgpack.packb(changed)
        if mutator.random.random() < 0.05:
            packed = mutator.data(packed) or b"\xc0"
        begun = time.perf_counter()
        said = await speaker.exchange(packed)
        seconds.append(time.perf_counter() - begun)
        reached += not any(part in str(reply.get("message")) for reply in said for part in UNREACHED)
        speaker.session = said[0] if op == "hello" and said[0].get("ok") else speaker.session
        assert not any("internal fault" in str(reply.get("message")) for reply in said), f"{changed} {packed}: {said}"
        assert not speaker.within.daemon.faults, f"{changed} {packed}: {speaker.within.daemon.faults}"
        if turn % CHECK_EVERY == CHECK_EVERY - 1:
            await speaker.within.check_service(turn)
    await speaker.within.check_service(messages)
    return reached


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("op", MESSAGE)
async def test_message(op: str) -> None:
    """Almost correct messages of each kind mostly reach a handler and harm no other session or block."""
    seconds, reached, mutated = list[float](), 0, Counter[str]()
    for part in range(-(-MESSAGES // LIFE)):
        mutator = Mutator(f"{SEED}/{op}/{part}")
        async with life() as within:
            speaker = Speaker(within)
            reached += await fuzz(speaker, op, mutator, min(LIFE, MESSAGES - part * LIFE), seconds)
            speaker.close()
        mutated += mutator.mutated
    report(
        "fuzz session message",
        op=op,
        seed=SEED,
        messages=len(seconds),
        reached=round(reached / MESSAGES, 3),
        p99_ms=round(percentile(seconds, 0.99) * 1e3, 2),
        slowest_ms=round(max(seconds) * 1e3, 1),
    )
    assert {f"{op}.{name}" for name in MESSAGE[op]} <= set(mutated)
    assert reached >= 0.6 * MESSAGES, f"{reached} of {MESSAGES} came to a handler"
    assert max(seconds) < 10 * LONG_S


async def test_every_message_is_known_here() -> None:
    """The fuzzer covers every op that the daemon knows."""
    async with life() as within:
        speaker = Speaker(within)
        await speaker.greet()
        said = await speaker.exchange(msgpack.packb({"op": "?"}))
        assert set(said[0]["message"].partition("known are ")[2].split(", ")) == set(MESSAGE)


async def test_message_limit() -> None:
    """A message may have exactly the maximum number of bytes."""
    async with life() as within:
        speaker = Speaker(within)
        await speaker.greet()
        for size, refused in ((MESSAGE_MAX_BYTES, ""), (MESSAGE_MAX_BYTES + 1, "a message above")):
            message = {"op": "ping", "pad": "x" * 3000}
            message["pad"] += "x" * (size - len(msgpack.packb(message)))
            assert len(msgpack.packb(message)) == size
            said = await speaker.exchange(msgpack.packb(message))
            assert refused in str(said[0].get("message")) if refused else said == [{"ok": True}]


@pytest.mark.parametrize("maps", [False, True])
async def test_goodbyes_leave_nothing(maps: bool) -> None:
    """After repeated hellos and goodbyes the daemon keeps a process only for its mapped memory."""
    async with life() as within:
        speaker, core = Speaker(within), within.daemon.daemon.cache.core
        before = core.stats().sessions
        for _ in range(20):
            await speaker.greet()
            if maps:
                assert (await speaker.exchange(msgpack.packb(await speaker.known("map"))))[0]["ok"]
            assert await speaker.exchange(msgpack.packb({"op": "bye"})) == [{}]
        assert core.stats().sessions - before == (1 if maps else 0)
