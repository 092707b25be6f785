"""Sessions over real sockets, with real processes at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument, NotFound, SessionLost, Unavailable
from tierd.linux.processes import find_start_time
from tierd.server.session import peers, session_connection, session_requests, session_socket
from tierd.server.session.identity import IdentityRules, Peer, identify
from tierd.server.session.session_socket import SessionSocket
from tierd.server.session.sessions import MappedFiles, SessionCalls, Sessions, SessionState

HELLO = {"op": "hello", "proto": 2, "format": 2, "sdk": "0.1.0", "name": "test", "credential": None}

CLIENT = """
import msgpack, os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(msgpack.packb({"op": "hello", "proto": 2, "format": 2, "sdk": "0.1.0", "name": "child", "credential": None}))
print(msgpack.unpackb(s.recv(8192))["session"], flush=True)
for line in sys.stdin:
    if line.strip() == "fork" and os.fork() == 0:
        os.set_blocking(0, True)
        print("forked", os.getpid(), flush=True)
        r, w = os.pipe()
        os.read(r, 1)
    if line.strip() == "close":
        s.close()
        print("closed", flush=True)
    if line.strip() == "forget":
        s.send(msgpack.packb({"op": "forget", "session": int(sys.argv[2])}))
        print(msgpack.unpackb(s.recv(8192)), flush=True)
"""


@dataclass
class Rig:
    """A listener whose calls are recorded."""

    sessions: Sessions
    socket: SessionSocket
    events: list = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, *event):
        self.events.append(event)
        self.changed.set()

    async def until(self, *event):
        """Waits until this event is recorded."""
        async with asyncio.timeout(5):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()

    async def ask(self, client, request):
        """Sends one message (a map, or raw bytes) and returns the reply; None is end of file."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, request if isinstance(request, bytes) else msgpack.packb(request))
        reply = await loop.sock_recv(client, 8192)
        return msgpack.unpackb(reply) if reply else None

    def session(self, session_id):
        return next(session for session in self.sessions.list() if session.id == session_id)

    def connect(self):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.setblocking(False)
        client.connect(self.socket.path)
        return client

    async def spawn(self, *args):
        """A process with its own session, and the session's id."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, self.socket.path, *args, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return process, int(await process.stdout.readline())


async def tell(process, line):
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()
    return (await process.stdout.readline()).decode()


def open_files(rig):
    def map_segment(session, tier, segment):
        rig.note("map", tier, segment)
        if segment == 9:
            raise NotFound("segment 9: not there; ask again")
        return MappedFiles(
            os.open("/dev/null", os.O_RDONLY), 4096, segment == 1, os.open("/dev/zero", os.O_RDONLY), 8192
        )

    return map_segment


@pytest.fixture
async def rig():
    directory = Path(tempfile.mkdtemp(prefix="tierd-"))
    rig = Rig(None, None)

    def opened(session):
        if session.name == "refused":
            raise Unavailable("daemon: draining; try again later")
        rig.note("open", session.id)

    def abort(session_id, reservation):
        if reservation == 9:
            raise NotFound("reservation 9")
        rig.note("abort", session_id, reservation)

    calls = SessionCalls(
        opened,
        lambda i: rig.note("stop", i),
        lambda i: rig.note("end", i),
        open_files(rig),
        lambda i, leases: rig.note("release", i, *leases),
        abort,
        on_join=lambda i, into: rig.note("join", i, into),
    )
    rig.sessions = Sessions(calls, session_limit=3)
    rules = IdentityRules(credentials={"ads": "0123456789abcdef"})
    rig.socket = SessionSocket(
        directory / "session.sock",
        sessions=rig.sessions,
        identify=lambda peer, credential: identify(peer, credential=credential, rules=rules, domain_of=lambda _: 1),
        greeting={"daemon": "0.1.0", "instance": "ab", "tiers": [{"name": "host.0", "kind": 1}]},
    )
    rig.socket.open()
    yield rig
    rig.socket.close()
    rig.sessions.close()
    shutil.rmtree(directory)


async def test_hello(rig):
    """Hello returns a session, a token that authenticates, and the daemon's description."""
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO)
        session = rig.sessions.authenticate(reply["token"])
        assert (session.id, session.peer.pid, session.identity.uid) == (reply["session"], os.getpid(), os.getuid())
        assert reply["tiers"] == [{"name": "host.0", "kind": 1}]
        assert len(reply["token"].partition(".")[2]) == 32


@pytest.mark.parametrize("engine", [["vllm"], {"engine": 32}, {"engine": "v" * 129}, {str(i): "" for i in range(17)}])
async def test_what_a_hello_says_of_its_engine(rig, engine):
    """Hello stores a few short texts about the engine; anything else is refused and opens no session."""
    said = {"engine": "vllm", "version": "0.32.0"}
    with rig.connect() as heard, rig.connect() as refused:
        assert (await rig.ask(heard, HELLO | {"engine": said}))["ok"]
        assert [session.engine for session in rig.sessions.list()] == [said]
        reply = await rig.ask(refused, HELLO | {"engine": engine})
        assert reply["error"] == "InvalidArgument" and "engine" in reply["message"]
    assert len(rig.sessions.list()) == 1


async def test_closed_clients_of_one_process_are_one(rig):
    """Of all sessions that a living process closed, the daemon keeps one, with all mapped segments."""
    ids = []
    for _ in range(20):
        with rig.connect() as client:
            ids.append((await rig.ask(client, HELLO))["session"])
            await rig.ask(client, {"op": "map", "tier": 0, "segment": 1})
            await rig.ask(client, {"op": "bye"})
    assert [event for event in rig.events if event[0] in ("join", "end")] == [("join", i, ids[0]) for i in ids[1:]]
    assert rig.sessions.list() == []


async def test_map_passes_descriptors(rig):
    """A map request returns the segment's two descriptors, and the daemon keeps neither."""
    with rig.connect() as client:
        await rig.ask(client, HELLO)
        before = len(os.listdir("/proc/self/fd"))
        client.send(msgpack.packb({"op": "map", "tier": 0, "segment": 1}))
        await rig.until("map", 0, 1)
        client.setblocking(True)
        data, fds, _, _ = socket.recv_fds(client, 4096, 2)
        assert msgpack.unpackb(data) == {"ok": True, "bytes": 4096, "writable": True, "catalogue_bytes": 8192}
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == ["/dev/null", "/dev/zero"]
        assert len(os.listdir("/proc/self/fd")) == before + len(fds)
        for fd in fds:
            os.close(fd)


async def test_a_refused_map_keeps_the_session(rig):
    """A refused map is an error reply; the session goes on."""
    with rig.connect() as client:
        await rig.ask(client, HELLO)
        assert (await rig.ask(client, {"op": "map", "tier": 0, "segment": 9}))["error"] == "NotFound"
        assert (await rig.ask(client, {"op": "ping"}))["ok"]


async def test_release(rig):
    """One message ends leases and reservations, with a reply only on request; a repetition is harmless."""
    with rig.connect() as client:
        session = (await rig.ask(client, HELLO))["session"]
        client.send(msgpack.packb({"op": "release", "leases": [5, 2**63], "reply": False}))
        await rig.until("release", session, 5, 2**63)
        assert await rig.ask(client, {"op": "release", "reservations": [9, 7], "reply": True}) == {"ok": True}
        assert ("abort", session, 7) in rig.events


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"x" * 5000,
        msgpack.packb([1, 2]),
        msgpack.packb({"op": "nonsense"}),
        msgpack.packb({"op": "map", "tier": "0", "segment": 1}),
        msgpack.packb({"op": "map", "tier": True, "segment": 1}),
        msgpack.packb({"op": "release", "leases": [-1], "reply": True}),
        msgpack.packb({"op": "release", "leases": 5, "reply": True}),
        msgpack.packb({"op": "release", "leases": [5]}),
        msgpack.packb({1: 2}),
        b"\x81\x91\x01\x02",
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
async def test_garbage(rig, message, greeted):
    """A malformed message gets one error reply and ends its connection; other clients are served."""
    with rig.connect() as client, rig.connect() as other:
        if greeted:
            await rig.ask(client, HELLO)
        assert (await rig.ask(client, message))["error"] == "InvalidArgument"
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b""
        assert (await rig.ask(other, HELLO))["ok"]


@given(
    st.binary(max_size=64)
    | st.recursive(
        st.none() | st.integers(-9, 9) | st.text(max_size=5),
        lambda x: st.dictionaries(st.sampled_from(["op", "tier", "proto", "name"]), x),
    ).map(msgpack.packb)
)
def test_any_bytes_are_a_map_or_refused(data):
    """Any bytes are a map or raise InvalidArgument, and no other error."""
    with contextlib.suppress(InvalidArgument):
        assert isinstance(session_requests.request_of(data), dict)


@pytest.mark.parametrize("change", [{"proto": 1}, {"format": 9}, {"proto": None}])
async def test_versions(rig, change):
    """Incompatible versions are refused in a message that names both sides."""
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO | change)
        assert reply["error"] == "VersionMismatch"
        for text in (str(next(iter(change.values()))), "protocol 2", "format 2", "SDK 0.1.0", "tierd 0.1.0"):
            assert text in reply["message"]
        assert rig.events == []


async def test_wrong_credential(rig):
    """A wrong credential is refused before a session opens; the right one names the tenant."""
    with rig.connect() as client, rig.connect() as other:
        assert (await rig.ask(client, HELLO | {"credential": "x"}))["error"] == "NotPermitted"
        reply = await rig.ask(other, HELLO | {"credential": "0123456789abcdef"})
        assert rig.sessions.authenticate(reply["token"]).identity.tenant == "ads"


async def test_refusal_by_the_daemon_leaves_nothing(rig):
    """A session that the daemon refuses gets the reason and is never stopped or ended."""
    before = len(os.listdir("/proc/self/fd"))
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO | {"name": "refused"})
        assert reply == {"ok": False, "error": "Unavailable", "message": "daemon: draining; try again later"}
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b""
    assert (rig.events, rig.sessions.list(), len(os.listdir("/proc/self/fd"))) == ([], [], before)


async def test_draining(rig):
    """A draining daemon refuses hello and serves its existing sessions."""
    with rig.connect() as client, rig.connect() as late:
        await rig.ask(client, HELLO)
        rig.socket.refuse_new()
        assert (await rig.ask(late, HELLO))["error"] == "Unavailable"
        assert (await rig.ask(client, {"op": "ping"}))["ok"]


async def test_too_many_sessions(rig):
    """A session above the limit is refused with the limit's name; a closed session frees a place."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(rig.connect()) for _ in range(4)]
        replies = [await rig.ask(client, HELLO) for client in clients]
        assert [reply["ok"] for reply in replies] == [True] * 3 + [False]
        assert replies[3]["error"] == "Overloaded"
        assert "server.session_limit" in replies[3]["message"]
        clients[0].close()
        await rig.until("stop", replies[0]["session"])
        assert (await rig.ask(stack.enter_context(rig.connect()), HELLO))["ok"]


async def test_closed_sessions_are_bounded(rig):
    """Closed sessions of a living process are kept, and count towards a bound."""
    for _ in range(12):
        with rig.connect() as client:
            reply = await rig.ask(client, HELLO)
        await rig.until("stop", reply["session"])
    with rig.connect() as client:
        assert (await rig.ask(client, HELLO))["error"] == "Overloaded"
    assert not any(event[0] == "end" for event in rig.events)


async def test_silent_connections_are_bounded(rig, monkeypatch):
    """Connections without a hello are bounded, and closed after a timeout."""
    monkeypatch.setattr(session_socket, "GREETING_LIMIT", 2)
    monkeypatch.setattr(session_connection, "HELLO_TIMEOUT_S", 0.05)
    with rig.connect() as one, rig.connect() as two, rig.connect() as three:
        loop = asyncio.get_running_loop()
        assert msgpack.unpackb(await loop.sock_recv(one, 8192))["error"] == "Overloaded"
        for client in (two, three):
            assert msgpack.unpackb(await loop.sock_recv(client, 8192))["error"] == "Unavailable"


async def test_end_of_file_stops_but_does_not_end(rig):
    """A closed socket invalidates the token at once; the session ends only with the process."""
    process, session_id = await rig.spawn()
    token = rig.session(session_id).token
    await tell(process, "close")
    await rig.until("stop", session_id)
    with pytest.raises(SessionLost):
        rig.sessions.authenticate(token)
    assert ("end", session_id) not in rig.events
    process.stdin.close()
    await rig.until("end", session_id)
    await process.wait()


async def test_sigkill(rig):
    """A killed client's session is stopped and then ended, each once, within a second."""
    process, session_id = await rig.spawn()
    process.kill()
    async with asyncio.timeout(1):
        await rig.until("end", session_id)
    assert rig.events == [("open", session_id), ("stop", session_id), ("end", session_id)]
    assert rig.sessions.list() == []
    await process.wait()


async def test_a_forked_child_cannot_keep_a_session(rig):
    """When the process is killed, its session ends although a forked child still holds the socket open."""
    process, session_id = await rig.spawn()
    child = int((await tell(process, "fork")).split()[1])
    process.kill()
    await rig.until("end", session_id)
    assert rig.events[-2:] == [("stop", session_id), ("end", session_id)]
    os.kill(child, signal.SIGKILL)
    await process.wait()


async def test_a_forked_child_does_not_end_a_session(rig):
    """The death of a forked child that shares the socket does not affect the session."""
    process, session_id = await rig.spawn()
    child = int((await tell(process, "fork")).split()[1])
    os.kill(child, signal.SIGKILL)
    with rig.connect() as client:  # the effects of the child's end are complete by then
        await rig.ask(client, HELLO)
    assert rig.session(session_id).state is SessionState.OPEN
    process.stdin.close()
    await rig.until("end", session_id)
    await process.wait()


async def test_tokens(rig):
    """Only the exact token of an open session authenticates."""
    with rig.connect() as client:
        token = (await rig.ask(client, HELLO))["token"]
        number, _, secret = token.partition(".")
        for wrong in (
            "",
            ".",
            secret,
            number,
            f"{number}.",
            f"1.{secret}",
            token + "0",
            f"x.{secret}",
            token[:-1] + "é",
        ):
            with pytest.raises(SessionLost):
                rig.sessions.authenticate(wrong)
        assert rig.sessions.authenticate(token).token == token
        assert secret not in repr(rig.sessions.list())


async def test_restored_session(rig):
    """A previous daemon's session ends when its process does, without a stop before."""
    process, session_id = await rig.spawn()
    peer = rig.session(session_id).peer
    assert rig.sessions.restore(77, peer=peer, identity=None)
    assert rig.session(77).state is SessionState.RESTORED
    with pytest.raises(SessionLost):
        rig.sessions.authenticate(rig.session(77).token)
    process.kill()
    await rig.until("end", 77)
    assert ("stop", 77) not in rig.events
    await process.wait()


async def test_restoring_for_another_process(rig):
    """A session is not restored for another process that has the same pid."""
    mine = find_start_time(os.getpid())
    assert not rig.sessions.restore(77, peer=Peer(os.getpid(), os.getuid(), mine + 1), identity=None)
    assert not rig.sessions.restore(78, peer=Peer(2**22 + 1, os.getuid(), mine), identity=None)
    assert rig.sessions.list() == []


async def test_forget(rig):
    """A process may forget its own restored session, once, and no other process's."""
    process, session_id = await rig.spawn("77")
    rig.sessions.restore(77, peer=rig.session(session_id).peer, identity=None)
    with rig.connect() as client:
        await rig.ask(client, HELLO)
        assert (await rig.ask(client, {"op": "forget", "session": 77}))["error"] == "NotPermitted"
        assert (await rig.ask(client, {"op": "forget", "session": session_id}))["error"] == "NotFound"
    assert "True" in await tell(process, "forget")
    assert "NotFound" in await tell(process, "forget")
    process.stdin.close()
    await rig.until("end", session_id)
    assert rig.events.count(("end", 77)) == 1
    await process.wait()


async def test_forgetting_before_the_end_is_heard(rig):
    """A forget before the daemon has seen the session's end is Unavailable; a later retry succeeds."""
    with rig.connect() as client:
        old = rig.connect()
        session_id = (await rig.ask(old, HELLO))["session"]
        await rig.ask(client, HELLO)
        forget = {"op": "forget", "session": session_id}
        assert (await rig.ask(client, forget))["error"] == "Unavailable"
        old.close()
        await rig.until("stop", session_id)
        assert (await rig.ask(client, forget))["ok"]


async def test_closing_ends_nobody(rig):
    """A daemon that closes stops its sessions and ends none: the next daemon keeps their leases."""
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO)
        rig.socket.close()
        rig.sessions.close()
        assert rig.events == [("open", reply["session"]), ("stop", reply["session"])]
        assert not os.path.exists(rig.socket.path)  # noqa: ASYNC240


async def test_kernels_without_peer_pidfd(rig, monkeypatch):
    """Without SO_PEERPIDFD the daemon opens the process by pid and checks it."""
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)
    process, session_id = await rig.spawn()
    process.kill()
    await rig.until("end", session_id)
    monkeypatch.setattr(peers, "_uid_of", lambda pid: os.getuid() + 1)
    with rig.connect() as client:
        assert (await rig.ask(client, HELLO))["error"] == "NotPermitted"
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO)
        assert (reply["error"], "seccomp" in reply["message"]) == ("Unsupported", True)
    await process.wait()


async def test_a_client_that_reads_nothing(rig):
    """A client that never reads its replies is cut off, and the daemon does not wait."""
    with rig.connect() as client:
        reply = await rig.ask(client, HELLO)
        ping = msgpack.packb({"op": "ping"})
        async with asyncio.timeout(20):
            while ("stop", reply["session"]) not in rig.events:
                with contextlib.suppress(OSError):
                    client.send(ping)
                await asyncio.sleep(0)


async def test_stale_socket_file(rig):
    """A dead daemon's socket file is replaced."""
    again = SessionSocket(rig.socket.path, sessions=rig.sessions, identify=rig.socket.identify, greeting={})
    again.open()
    with rig.connect() as client:
        assert (await rig.ask(client, HELLO))["ok"]
    again.close()
