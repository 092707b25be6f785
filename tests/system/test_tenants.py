"""Other users of the machine: isolation of one uid's blocks from another, and two uids of one tenant."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.system.elsewhere import Elsewhere, Talk
from tests.system.raw import RawClient, ask, connect, hello
from tests.system.sdk import BIG, HOST, SMALL, arena_files, await_nothing_held, churn, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, Event
from tierd.errors import TierdError
from tierd.testing import chain

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")

FIRST_UID, SECOND_UID, GROUP = 54321, 54322, 54320
COUNT = 4


@pytest.fixture
def open_daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon whose sockets belong to a group, as with a unit file. The parameter adds configuration."""
    running = Daemon(HOST + getattr(request, "param", ""))
    running.root.chmod(0o755)
    Path(running.target).mkdir()
    os.chown(running.target, 0, GROUP)
    Path(running.target).chmod(0o2750)  # files made in it belong to the group
    with running:
        yield running


def _user(function: Any, daemon: Daemon, uid: int, **given: Any) -> Elsewhere:
    return Elsewhere(function, daemon.target, uid=uid, gid=GROUP, **given)


# -- functions that run as another user


def owner(talk: Talk, target: str) -> None:
    """Stores blocks, leases one, and reports everything that another user could try."""
    client = Client(target, name="owner")
    namespace = client.open_namespace(BIG)
    assert put(client, namespace, 1, COUNT)
    lease = client.acquire(namespace, chain(1, COUNT))
    view = lease.view(0)
    segments = [[int(handle["tier"]), int(handle["segment"])] for handle in lease.handles]
    talk.say({"namespace": namespace.id, "segments": segments})
    talk.hear()
    talk.say(put(client, namespace, 5, COUNT).stored)
    talk.hear()
    talk.say([right([view], 1), client.lookup(namespace, chain(1, COUNT)).tokens])
    talk.hear()


def stranger(talk: Talk, target: str, *, files: list[str], daemon_pid: int) -> None:
    """Tries everything with the numbers that the owner and root know; reports the results."""
    known = talk.hear()
    with RawClient(target) as raw, Client(target) as client:
        mapped = [place for place in _everywhere(known["segments"]) if _granted(raw, *place)]
        foreign = pb.Group(namespace=known["namespace"], hashes=chain(1, COUNT).tobytes())
        guessed = client.open_namespace(BIG)
        found: dict[str, Any] = {
            "mapped": mapped,
            "opened": [path for path in [*files, *_proc_paths(daemon_pid)] if _opens(path)],
            "acquire": raw.error_of(raw.cache.Acquire, pb.AcquireRequest(groups=[foreign], tier=pb.TIER_KIND_HOST)),
            "lookup": raw.error_of(raw.cache.Lookup, pb.LookupRequest(groups=[foreign])),
            "get": raw.error_of(raw.cache.Prefetch, pb.PrefetchRequest(groups=[foreign], tier=pb.TIER_KIND_HOST)),
            "admin": raw.error_of(raw.admin.Blocks, apb.BlocksRequest()),
            "namespaces": raw.error_of(raw.admin.Namespaces, apb.NamespacesRequest()),
            "tokens": client.lookup(guessed, chain(1, COUNT)).tokens,
            "views": len(client.get(guessed, chain(1, COUNT)).views),
        }
        talk.say(found)
        events = _Events(client)
        while not events.are_coming.wait(0.05):
            put(client, guessed, next(_SEEDS), 1)
        talk.hear()
        talk.say("watching")
        talk.hear()
        assert put(client, guessed, 3, 1)
        talk.say([events.until(chain(3, 1).tobytes()) == {guessed.id}])
        talk.hear()


_SEEDS = itertools.count(100)


class _Events:
    """The events of a watch. are_coming: set at the first event."""

    def __init__(self, client: Client) -> None:
        self.are_coming = threading.Event()
        self._namespaces: set[int] = set()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        threading.Thread(target=self._watch, args=(client,), daemon=True).start()

    def until(self, block_hash: bytes) -> set[int]:
        """The namespaces of all events up to the one that reports this block as stored."""
        while True:
            event = self._events.get(timeout=30)
            self._namespaces.add(event.namespace)
            if event.hashes.tobytes() == block_hash:
                return self._namespaces

    def _watch(self, client: Client) -> None:
        with contextlib.suppress(TierdError):
            for event in client.watch():
                self._events.put(event)
                self.are_coming.set()


def _everywhere(segments: list[list[int]]) -> list[tuple[int, int]]:
    """The known segments, and every number near them."""
    return sorted({(tier, segment) for tier in (0, 1) for segment in range(128)} | {(t, s) for t, s in segments})


def _granted(raw: RawClient, tier: int, segment: int) -> bool:
    reply, fds = ask(raw.socket, {"op": "map", "tier": tier, "segment": segment})
    for fd in fds:
        os.close(fd)
    return bool(reply.get("ok") or fds)


def _opens(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb"):
        return True
    return False


def _proc_paths(pid: int) -> list[str]:
    """Other paths to a process's files and memory."""
    return [f"/proc/{pid}/mem", *(f"/proc/{pid}/fd/{fd}" for fd in range(64))]


def member(talk: Talk, target: str, *, writes: bool) -> None:
    """One of two users of a tenant."""
    client = Client(target)
    namespace = client.open_namespace(SMALL)
    if writes:
        talk.say(put(client, namespace, 1, COUNT).stored)
    else:
        views = client.get(namespace, chain(1, COUNT)).views
        talk.say([len(views), right(views, 1)])
    talk.hear()


# -- promises


def test_stranger_gets_nothing(open_daemon: Daemon) -> None:
    """Another uid maps no segment of the owner, opens no arena file and sees no block, namespace or event."""
    with (
        _user(owner, open_daemon, FIRST_UID) as first,
        _user(
            stranger,
            open_daemon,
            SECOND_UID,
            files=[str(path) for path in arena_files(open_daemon)],
            daemon_pid=open_daemon.pid,
        ) as second,
    ):
        found = second.ask(first.hear())
        refused = "NotPermitted"
        assert found == {
            "mapped": [],
            "opened": [],
            **dict.fromkeys(("acquire", "lookup", "get", "admin", "namespaces"), refused),
            "tokens": 0,
            "views": 0,
        }
        assert second.ask() == "watching"
        assert first.ask() == COUNT
        assert second.ask() == [True]
        assert first.ask() == [1, 16 * COUNT]


def test_outside_the_group(open_daemon: Daemon) -> None:
    """A user outside the daemon's group cannot connect."""
    with Elsewhere(outsider, open_daemon.target, uid=FIRST_UID, gid=FIRST_UID) as other:
        assert other.hear() == ["NotPermitted", "PermissionError"]


def outsider(talk: Talk, target: str) -> None:
    """Tries both sockets."""
    said = []
    try:
        Client(target).open_namespace(SMALL)
    except TierdError as error:
        said.append(type(error).__name__)
    with socket.socket(socket.AF_UNIX) as rpc:
        try:
            rpc.connect(f"{target}/tierd.sock")
        except OSError as error:
            said.append(type(error).__name__)
    talk.say(said)


@pytest.mark.parametrize(
    "open_daemon", [f'\n[identity]\ntenants = {{"{FIRST_UID}" = "team", "{SECOND_UID}" = "team"}}\n'], indirect=True
)
def test_two_uids_of_one_tenant(open_daemon: Daemon) -> None:
    """Two uids that the configuration maps to one tenant read each other's blocks."""
    with _user(member, open_daemon, FIRST_UID, writes=True) as first:
        assert first.hear() == COUNT
        with _user(member, open_daemon, SECOND_UID, writes=False) as second:
            assert second.hear() == [COUNT, COUNT]


def test_token_of_another_session(open_daemon: Daemon) -> None:
    """A session's number without its secret is refused."""
    with RawClient(open_daemon.target) as raw, contextlib.closing(connect(open_daemon.target)) as other:
        token = ask(other, hello())[0]["token"].partition(".")[0]
        for guess in (token, f"{token}.", f"{token}.{'0' * 32}", ""):
            raw.metadata = (("tierd-session", guess),)
            assert raw.error_of(raw.cache.Lookup, pb.LookupRequest()) == "SessionLost"


@pytest.mark.parametrize("then", ["stays", "says goodbye", "daemon restarts"])
def test_memory_that_changes_hands(open_daemon: Daemon, then: str) -> None:
    """A process that keeps a tenant's old mappings never sees another tenant's later blocks in them."""
    leaves = then == "says goodbye"
    with (
        _user(hoarder, open_daemon, FIRST_UID, leaves=leaves) as first,
        _user(filler, open_daemon, SECOND_UID) as second,
    ):
        assert first.hear() > 0
        if then == "daemon restarts":
            open_daemon.restart()
        assert second.ask() > 0
        assert first.ask() == 0
    await_nothing_held(open_daemon, "both")


def hoarder(talk: Talk, target: str, *, leaves: bool) -> None:
    """Keeps whole segments mapped without a lease; reports the number of pages with the other's bytes."""
    client = Client(target)
    assert churn(client, seed=1)
    with RawClient(target) as raw:
        memory = []
        for tier, segment in _everywhere([]):
            reply, fds = ask(raw.socket, {"op": "map", "tier": tier, "segment": segment})
            if reply.get("ok"):
                memory.append(mmap.mmap(fds[0], reply["bytes"], prot=mmap.PROT_READ))
            for fd in fds:
                os.close(fd)
        client.close()
        if leaves:
            raw.socket.send(msgpack.packb({"op": "bye"}))
            assert not raw.socket.recv(1)
        talk.say(len(memory))
        talk.hear()
        talk.say(
            sum(segment[at : at + 64] == b"\xdd" * 64 for segment in memory for at in range(0, len(segment), 4096))
        )
        talk.hear()


def filler(talk: Talk, target: str) -> None:
    """Fills the tier with its own byte."""
    talk.hear()
    with Client(target) as client:
        talk.say(churn(client, seed=2, byte=0xDD))
        talk.hear()
