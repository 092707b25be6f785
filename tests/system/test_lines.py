"""Lines of a real daemon: noise on them, and client state after failed calls and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import threading
import time
import weakref

import pytest
from google.protobuf.message import DecodeError

from tests.depth import count
from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.live_session import LiveSession
from tests.system.mutation import Mutator
from tests.system.warm import Daemon
from tierd._proto import admin_pb2
from tierd._proto import cache_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.client.transport.local_rpc import Line
from tierd.errors import DeadlineExceeded, TierdError
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096)
FORKS = 50
ASKS = count(test=600, nightly=20_000, weekly=100_000)
SOON_S = 30.0


class Thing:
    """An object that a caller holds, such as a view."""


def test_noise_on_lines() -> None:
    """Malformed asks and random bytes get a named error or end their line; the daemon keeps its blocks."""
    live = LiveSession(Mutator("lines"))
    chance = live.mutator.random
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space, kept = client.open_namespace(SPEC), chain(78, 4)
        data = [content_of(name, SPEC.block_bytes) for name in kept]
        assert client.put(space, kept, data).stored == 4
        link = client._connector.link
        assert link is not None and link.session is not None
        open_line, line = link.session.line, None
        for _ in range(ASKS):
            line = line or Line(open_line(timeout_s=SOON_S))
            ask = live._Ask()
            if chance.random() < 0.9:
                live.mutator.message(ask)
            raw = ask.SerializeToString()
            if chance.random() < 0.05:
                raw = live.mutator.data(raw)
            if chance.random() < 0.02:
                with contextlib.suppress(OSError):
                    line._socket.send(chance.randbytes(chance.randrange(1, 64)))
                line.close()
                line = None
                continue
            deadline = time.monotonic() + SOON_S
            line.send(raw, deadline=deadline)
            with contextlib.suppress(DecodeError):
                if pb.Ask.FromString(raw).more:
                    line.send(b"", deadline=deadline)
            answer = pb.Answer.FromString(line.receive(deadline=deadline))
            assert answer.status != "INTERNAL", (ask, answer)
        assert client.lookup(space, kept).tokens == 4 * SPEC.tokens_per_block
        views = client.get(space, kept).views
        assert all((view == one).all() for view, one in zip(views, data, strict=True))


def test_a_failed_call_keeps_nothing_alive() -> None:
    """A failed call keeps no object of its caller alive; the last reference frees it without a collection."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(SPEC)
        stand_still(daemon.pid)

        def call() -> weakref.ref[Thing]:
            thing = Thing()
            try:
                client.lookup(namespace, chain(1, 1), timeout_s=0.3)
            except DeadlineExceeded:
                return weakref.ref(thing)
            raise AssertionError("a daemon that was stopped has answered")

        gc.disable()
        try:
            assert call()() is None
        finally:
            gc.enable()
            os.kill(daemon.pid, signal.SIGCONT)


def test_a_stopped_daemon_costs_deadlines_and_no_session() -> None:
    """While the daemon stands still, each thread's call ends at its own deadline; leases stay valid."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace, held = client.open_namespace(SPEC), chain(1, 2)
        client.put(namespace, held, [content_of(name, SPEC.block_bytes) for name in held])
        lease, order = client.acquire(namespace, held), list[float]()

        def call(timeout_s: float) -> None:
            with contextlib.suppress(DeadlineExceeded):
                client.lookup(namespace, chain(2, 2), timeout_s=timeout_s)  # not near, so the client asks
            order.append(timeout_s)

        stand_still(daemon.pid)
        try:
            threads = [threading.Thread(target=call, args=(timeout_s,)) for timeout_s in (4.0, 3.0, 0.2)]
            for thread in threads:
                thread.start()
            threads[-1].join()
            assert order == [0.2]
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert lease.check() == 2
        assert client.lookup(namespace, held).tokens == 32
        lease.release()


def test_a_hello_that_is_answered_too_late() -> None:
    """Clients that do not wait for a hello's answer occupy no session; the number of sessions is limited."""
    with Daemon() as daemon, connect(daemon.target) as operator:
        stand_still(daemon.pid)
        try:
            for _ in range(5):
                with Client(daemon.target, timeout_s=0.02) as client, pytest.raises(DeadlineExceeded):
                    client.open_namespace(SPEC)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        await_true(lambda: daemon.log.count("session open") == 5, "late answers")  # an operator's session has no line
        await_true(
            lambda: len(operator.ask(admin_pb2.SessionsRequest()).sessions) == 1, "no session but the operator's"
        )


def test_forks_in_the_middle_of_calls() -> None:
    """When forks coincide with calls of other threads, calls succeed and children use their own lines."""
    with Daemon() as daemon, Elsewhere(forking, daemon.target) as other:
        assert other.hear() == [0] * FORKS


def forking(talk: Talk, target: str) -> None:
    """Threads call without a pause while the process forks; each child calls too."""
    with Client(target) as client:
        namespace, over = client.open_namespace(SPEC), threading.Event()
        held = chain(1, 8)
        client.put(namespace, held, [content_of(name, SPEC.block_bytes) for name in held])
        threads = [threading.Thread(target=calling, args=(client, namespace, over)) for _ in range(3)]
        for thread in threads:
            thread.start()
        found = [calls_in_child(client, namespace) for _ in range(FORKS)]
        over.set()
        for thread in threads:
            thread.join()
    talk.say(found)


def calling(client: Client, namespace: OpenedNamespace, over: threading.Event) -> None:
    """Calls until `over` is set; each call must get its own answer."""
    number = threading.get_ident() % 7 + 1
    while not over.is_set():
        if client.lookup(namespace, chain(1, number)).tokens != 16 * number:
            os._exit(1)


def calls_in_child(client: Client, namespace: OpenedNamespace) -> int:
    """The exit status of a child that is forked now and calls."""
    pid = os.fork()
    if not pid:
        found = client.lookup(namespace, chain(1, 8)).tokens
        os._exit(0 if found == 16 * 8 else 2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("count_of_lines", [0, 1])
def test_calls_without_a_line(count_of_lines: int) -> None:
    """If no line is free or a message is too long, calls use gRPC and give the same answers."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(SPEC)
        link = client._connector.link
        assert link is not None and link.session is not None and link.transport is not None
        lines = link.transport._lines  # type: ignore[attr-defined]
        link.session.lines = count_of_lines
        taken = [lines.take(timeout_s=SOON_S) for _ in range(count_of_lines)]
        held = chain(1, 4)
        assert client.put(namespace, held, [content_of(name, SPEC.block_bytes) for name in held]).stored == 4
        assert client.lookup(namespace, held).tokens == 64
        assert len(client.get(namespace, held).views) == 4
        for line in taken:
            lines.rest(line)


@pytest.mark.parametrize("count_of_lines", [1, 3])
def test_lines_that_were_closed(count_of_lines: int) -> None:
    """Idle lines that were closed fail no call and do not end the session; its lease stays valid."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace, held = client.open_namespace(SPEC), chain(1, 2)
        client.put(namespace, held, [content_of(name, SPEC.block_bytes) for name in held])
        lease, link = client.acquire(namespace, held), client._connector.link
        assert link is not None and link.transport is not None
        lines = link.transport._lines  # type: ignore[attr-defined]
        for line in [lines.take(timeout_s=SOON_S) for _ in range(count_of_lines)]:
            lines.rest(line)
        for line in lines._resting:
            line._socket.shutdown(socket.SHUT_RDWR)
        assert client.lookup(namespace, held).tokens == 32
        assert client._connector.link is link
        assert lease.check() == 2
        lease.release()
        assert len(client.get(namespace, held).views) == 2


def test_a_client_without_descriptors() -> None:
    """Without descriptors for lines, calls use gRPC; a get that needs a segment is refused as Overloaded."""
    with Daemon() as daemon, Elsewhere(out_of_descriptors, daemon.target) as other:
        assert other.hear() == [32, "Overloaded", 2]


def out_of_descriptors(talk: Talk, target: str) -> None:
    """Calls that need a line or a segment, without and with free descriptors."""
    with Client(target) as client, Client(target) as writer:
        namespace, held = client.open_namespace(SPEC), chain(1, 2)
        writer.put(writer.open_namespace(SPEC), held, [content_of(name, SPEC.block_bytes) for name in held])
        link = client._connector.link
        assert link is not None and link.session is not None and link.transport is not None
        taken = link.transport._lines.take(timeout_s=SOON_S)  # type: ignore[attr-defined]
        lines, link.session.lines = link.session.lines, 0
        client.lookup(namespace, chain(2, 2))  # over gRPC, which needs descriptors of its own
        link.session.lines = lines
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(set(range(4096)) - _open_descriptors()), hard))
        found: list[object] = [client.lookup(namespace, held).tokens]
        try:
            client.get(namespace, held)
        except TierdError as error:
            found.append(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found.append(len(client.get(namespace, held).views))
        link.transport._lines.rest(taken)  # type: ignore[attr-defined]
    talk.say(found)


def _open_descriptors() -> set[int]:
    """Descriptors that are still open when they are listed."""
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
