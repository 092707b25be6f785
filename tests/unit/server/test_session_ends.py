"""The session socket without free descriptors, and rare ends of sessions."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import struct
import subprocess
import sys
from dataclasses import replace

import msgpack
import pytest

from tests.unit.server.grpc.test_guard import until
from tests.unit.server.session.test_sessions import HELLO, rig  # noqa: F401  # a fixture
from tierd.errors import Overloaded, SessionLost
from tierd.server.session import session_socket

LEAVER = """
import msgpack, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(msgpack.packb({"op": "hello", "proto": 2, "format": 2, "sdk": "0.1.0", "name": "child", "credential": None}))
print(msgpack.unpackb(s.recv(8192))["session"], flush=True)
s.send(msgpack.packb({"op": "map", "tier": 0, "segment": 1}))
s.recv(8192)
s.send(msgpack.packb({"op": "bye"}))
sys.stdin.read()
"""


@pytest.fixture
def no_descriptors():
    """Two functions: the first takes all descriptors, the second restores them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def restore():
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1])), restore
    restore()


async def test_descriptors_that_run_out_are_waited_for(rig, monkeypatch, no_descriptors):  # noqa: F811
    """A connection waits until descriptors are free again, and the loop does not spin meanwhile."""
    monkeypatch.setattr(session_socket, "ACCEPT_PAUSE_S", 0.01)
    tries, pause = [], rig.socket._pause
    monkeypatch.setattr(rig.socket, "_pause", lambda error: (tries.append(error), pause(error)))
    take, restore = no_descriptors
    with rig.connect() as client:
        take()
        begun = asyncio.get_running_loop().time()
        await until(lambda: len(tries) >= 3)
        assert asyncio.get_running_loop().time() - begun >= 0.015
        restore()
        assert (await rig.ask(client, HELLO))["ok"]


async def test_a_socket_that_is_closed_while_it_waits(rig, no_descriptors):  # noqa: F811
    """A listener that is closed while it waits for descriptors does not listen again."""
    loop, faults = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    take, restore = no_descriptors
    with rig.connect():
        take()
        await until(lambda: rig.socket._resume)
        restore()
        rig.socket.close()
    assert rig.socket._resume.cancelled()
    assert not os.path.exists(rig.socket.path)  # noqa: ASYNC240
    assert faults == []


async def test_a_release_that_is_refused(rig):  # noqa: F811
    """A refused release is reported only to a client that asked for a reply; the session goes on."""

    def lost(session_id, leases):
        rig.note("lost", session_id, *leases)
        raise SessionLost("session: it has ended")

    rig.sessions._calls = replace(rig.sessions._calls, on_release=lost)
    with rig.connect() as client:
        session = (await rig.ask(client, HELLO))["session"]
        assert (await rig.ask(client, {"op": "release", "leases": [5], "reply": True}))["error"] == "SessionLost"
        client.send(msgpack.packb({"op": "release", "leases": [6], "reply": False}))
        await rig.until("lost", session, 6)
        assert await rig.ask(client, {"op": "ping"}) == {"ok": True}


async def test_a_release_by_mailbox_that_fails(rig):  # noqa: F811
    """A release that fails by mailbox does not disturb the reader, and later releases are processed."""

    def fail(session_id, leases):
        rig.note("released", session_id, *leases)
        assert 5 not in leases, "a fault of ours"

    rig.sessions._calls = replace(rig.sessions._calls, on_release=fail)
    with rig.connect() as client:
        session = (await rig.ask(client, HELLO))["session"]
        theirs = rig.sessions._connections[session]._new_notices()
        for lease in (5, 6):
            theirs.send(struct.pack("<Q", lease))
        rig.sessions.read_notices(session)
        await rig.until("released", session, 6)
        theirs.close()


async def test_who_has_left_ends_with_its_process(rig):  # noqa: F811
    """The segments of a client that said goodbye stay noted until its process ends; then it ends once."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEAVER, rig.socket.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    session = int(await process.stdout.readline())
    await rig.until("stop", session)
    with rig.connect() as other:  # the effects of the goodbye are complete by then
        await rig.ask(other, HELLO)
    assert ("end", session) not in rig.events
    process.kill()
    await rig.until("end", session)
    assert rig.events.count(("end", session)) == 1
    await process.wait()


async def test_cutting_off_a_session_that_is_gone(rig):  # noqa: F811
    """A cut-off of an unknown session sends nothing, and existing sessions go on."""
    with rig.connect() as client:
        session = (await rig.ask(client, HELLO))["session"]
        rig.sessions.cut_off(session + 1, Overloaded("session: too many calls; wait"))
        assert await rig.ask(client, {"op": "ping"}) == {"ok": True}


async def test_a_new_id_is_nobodys(rig, monkeypatch):  # noqa: F811
    """A new session id is neither 0, which means none, nor that of an existing session."""
    with rig.connect() as client:
        taken = (await rig.ask(client, HELLO))["session"]
        drawn = [0, taken, 42]
        monkeypatch.setattr(secrets, "randbits", lambda _bits: drawn.pop(0))
        assert rig.sessions.new_id() == 42
