"""Leases that clients of a real daemon release by mailbox, without waking it and without loss."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.sdk import await_nothing_held, held
from tests.system.warm import Daemon
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.client.session.notices import IDS_PER_MESSAGE
from tierd.client.session.session import Session
from tierd.client.transport.local_rpc import Line
from tierd.errors import Overloaded
from tierd.server.session.notice_polling import KEPT_S, LOOK_S
from tierd.server.session.notices import NOTICE_BUFFER_BYTES
from tierd.testing import chain

MIB = 1 << 20
SPEC = NamespaceSpec(model="mailboxes", tokens_per_block=16, block_bytes=MIB)
BLOCKS = 8
CONFIG = 'nvme = []\n[[host]]\ncapacity = "16 MiB"\nsegment = "4 MiB"\neviction = "lru"\n'
"""Room for two batches only."""
ROUNDS = 20
SOON_S = 10.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(CONFIG) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as one:
        yield one


def opened(client: Client) -> OpenedNamespace:
    return client.open_namespace(SPEC)


def put(client: Client, seed: int, blocks: int = BLOCKS) -> int:
    """Returns the number of blocks stored."""
    return client.put(opened(client), chain(seed, blocks), [np.full(MIB, seed % 251, np.uint8)] * blocks).stored


def get(client: Client, seed: int, blocks: int = BLOCKS) -> int:
    """Gets copies. Returns their number."""
    out = np.zeros((blocks, MIB), np.uint8)
    found = client.get(opened(client), chain(seed, blocks), out=list(out)).blocks
    assert (out[:found] == seed % 251).all()
    return found


def leased(client: Client, seed: int) -> int:
    """Acquires blocks and releases them by mailbox. Returns their number."""
    lease = client.acquire(opened(client), chain(seed, BLOCKS))
    lease.detach()
    return len(lease)


def session_of(client: Client) -> Session:
    link = client._connector.link
    assert link is not None and link.session is not None and link.session.notices.socket is not None
    return link.session


def mailbox_of(client: Client) -> socket.socket:
    mailbox = session_of(client).notices.socket
    assert mailbox is not None
    return mailbox


def await_last_look() -> None:
    """Waits until the daemon reads no mailbox before the next answer."""
    begun_s = time.monotonic()
    await_true(lambda: time.monotonic() - begun_s > KEPT_S + 4 * LOOK_S, "the last look")


def refuse_descriptors(_fds: object, _count: int, *, what: str) -> None:
    """Simulates a process that has the maximum number of open files."""
    raise Overloaded(f"{what}: its descriptors did not come")


def leases_of(daemon: Daemon) -> int:
    return held(daemon)[0]


def test_a_lease_ends_without_another_call(daemon: Daemon, client: Client) -> None:
    """A lease that a get releases by mailbox ends without another call of the client."""
    assert put(client, 1) == get(client, 1) == BLOCKS
    await_nothing_held(daemon, "a get")


def test_a_mailbox_that_did_not_arrive_is_given_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without descriptors for its mailbox gets another with its next line, and the daemon
    reads it."""
    with monkeypatch.context() as short, Client(daemon.target) as client:
        short.setattr("tierd.client.session.session.check_came", refuse_descriptors)
        assert not client.lookup(opened(client), chain(1, BLOCKS)).tokens
        link = client._connector.link
        assert link is not None and link.session is not None and link.session.notices.socket is None
        short.undo()
        assert put(client, 1) == get(client, 1) == BLOCKS
        assert session_of(client).notices.post([1 << 40]), "of no lease"
        await_nothing_held(daemon, "a get")


def test_another_mailbox_takes_the_place_of_the_first(daemon: Daemon, client: Client) -> None:
    """A client that asks for another mailbox gets one; the daemon reads the first and closes it."""
    put(client, 1)
    lease, session, first = client.acquire(opened(client), chain(1, BLOCKS)), session_of(client), mailbox_of(client)
    first.send(struct.pack("<Q", lease.id))
    session.notices.socket = None
    session.line(timeout_s=SOON_S).close()
    assert mailbox_of(client) is not first
    await_nothing_held(daemon, "the first mailbox")
    with pytest.raises(BrokenPipeError):
        first.send(b"", socket.MSG_NOSIGNAL)


def test_a_lease_that_is_kept_for_longer_ends_too(daemon: Daemon, client: Client) -> None:
    """A lease released after the daemon stops reading the mailbox is released by a call that wakes it."""
    put(client, 1)
    lease = client.acquire(opened(client), chain(1, BLOCKS))
    await_last_look()
    assert leases_of(daemon) == 1
    del lease
    await_nothing_held(daemon, "a get")


def test_an_answer_that_is_read_late_is_no_recent_one(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without processor time when its answer came releases the lease by a call that wakes."""
    put(client, 1)
    receive = Line.receive

    def receive_late(line: Line, **options: Any) -> bytes:
        answer = receive(line, **options)
        await_last_look()
        return answer

    monkeypatch.setattr(Line, "receive", receive_late)
    client.acquire(opened(client), chain(1, BLOCKS)).detach()
    monkeypatch.undo()
    await_nothing_held(daemon, "a get")


def test_a_lease_that_comes_late_into_the_mailbox_is_told_again(daemon: Daemon, client: Client) -> None:
    """A client without processor time during its release by mailbox wakes the daemon too."""
    put(client, 1)
    session, mailbox = session_of(client), mailbox_of(client)

    class Slow:
        def send(self, data: bytes, flags: int) -> int:
            await_last_look()
            return mailbox.send(data, flags)

    session.notices.socket = Slow()  # type: ignore[assignment]
    client.acquire(opened(client), chain(1, BLOCKS)).detach()
    session.notices.socket = mailbox
    await_nothing_held(daemon, "a get")


def test_what_was_given_back_is_room_for_another(daemon: Daemon, client: Client) -> None:
    """A put can use the room of leases that other clients just released by mailbox."""
    with Client(daemon.target) as writer, Client(daemon.target) as other:
        put(writer, 0)
        put(writer, 1)
        for turn in range(ROUNDS):
            assert leased(client, turn) == leased(other, turn + 1) == BLOCKS
            assert put(writer, turn + 2) == BLOCKS


def test_a_full_mailbox_loses_no_lease(daemon: Daemon, client: Client) -> None:
    """A client whose mailbox is full or closed releases leases by a call that wakes the daemon."""
    put(client, 1)
    session = session_of(client)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                ours.send(bytes(8))
        session.notices.socket = ours
        assert get(client, 1) == BLOCKS
        await_nothing_held(daemon, "a get")
        theirs.close()
        assert get(client, 1) == BLOCKS
        await_nothing_held(daemon, "a get")


def test_a_mailbox_holds_no_more_than_one_look_takes(daemon: Daemon, client: Client) -> None:
    """The daemon reads a bounded amount at a time, and leases that did not fit in the mailbox end too."""
    put(client, 1)
    get(client, 1)
    await_last_look()
    mailbox, sent = mailbox_of(client), 0
    with pytest.raises(BlockingIOError):
        while sent < 64 * NOTICE_BUFFER_BYTES:
            sent += mailbox.send(bytes(8 * IDS_PER_MESSAGE))
    assert sent <= 2 * NOTICE_BUFFER_BYTES
    assert get(client, 1) == BLOCKS
    await_nothing_held(daemon, "a get")


def test_nonsense_in_a_mailbox_harms_nobody(daemon: Daemon, client: Client) -> None:
    """Malformed bytes, invalid numbers and other clients' leases in a mailbox end nothing."""
    put(client, 1)
    with Client(daemon.target) as other:
        lease = other.acquire(opened(other), chain(1, BLOCKS))
        theirs = np.arange(1 << 12, dtype="<u8").tobytes()
        for noise in (b"\1", b"\1" * 9, *(theirs[at : at + 4096] for at in range(0, len(theirs), 4096)), bytes(9000)):
            mailbox_of(client).send(noise)
            assert get(client, 1) == BLOCKS  # for its answer the daemon reads the mailbox
        await_true(lambda: leases_of(daemon) == 1, "the other's lease alone")
        assert [int(page[0]) for page in lease.views()] == [1] * BLOCKS
        mailbox_of(client).close()
        assert get(client, 1) == BLOCKS and put(other, 1) == BLOCKS


def test_a_client_that_ends_leaves_no_lease(daemon: Daemon) -> None:
    """When a client ends, its leases have ended, whether it released them by mailbox or not."""
    with Client(daemon.target) as one:
        put(one, 1)
        for _ in range(ROUNDS):
            get(one, 1)
        lease = one.acquire(opened(one), chain(1, BLOCKS))
        assert len(lease.handles) == BLOCKS
    await_nothing_held(daemon, "a get")


def test_a_lease_that_is_given_back_while_the_daemon_stops(daemon: Daemon) -> None:
    """After a restart the daemon holds no page for a client that released its lease while it stopped."""
    with Client(daemon.target) as one:
        put(one, 1)
        lease = one.acquire(opened(one), chain(1, BLOCKS))
        stand_still(daemon.pid)
        lease.detach()
        daemon.terminate()
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.await_end()
        daemon.start()
        assert held(daemon) == (0, 0, 0, 0)
