"""What a conversation leaves behind in the client: when its call fails, and in a fork."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

from tests.system.elsewhere import Elsewhere, Talk
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.client.conversation import Conversations
from tierd.errors import DeadlineExceeded
from tierd.testing import Daemon, chain

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096)
FORKS = 50


class Thing:
    """What a caller holds, such as a view."""


def test_a_failed_call_keeps_nothing_alive() -> None:
    """What the caller holds while a call fails goes when the caller lets go of it, not with the next collection: views are such things."""
    with Daemon() as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(SPEC)
        os.kill(daemon.pid, signal.SIGSTOP)

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


def test_no_stream_is_open_during_a_fork() -> None:
    """However fork and calls of other threads meet, no conversation is open when the process is copied: gRPC could not prepare for it."""
    with Daemon() as daemon, Elsewhere(forking, daemon.target) as other:
        assert other.hear() == [0] * FORKS


def forking(talk: Talk, target: str) -> None:
    """Threads that call without a pause, and forks meanwhile; each child says how many streams were open."""
    with Client(target) as client:
        namespace, over = client.open_namespace(SPEC), threading.Event()
        threads = [threading.Thread(target=calling, args=(client, namespace, over)) for _ in range(3)]
        for thread in threads:
            thread.start()
        link = client._connector.link
        assert link is not None and link.transport is not None
        found = [open_in_child(link.transport._conversations) for _ in range(FORKS)]  # type: ignore[attr-defined]
        over.set()
        for thread in threads:
            thread.join()
    talk.say(found)


def calling(client: Client, namespace: OpenedNamespace, over: threading.Event) -> None:
    """Calls until it is over."""
    while not over.is_set():
        client.lookup(namespace, chain(1, 1))


def open_in_child(streams: Conversations) -> int:
    """Of a child that is forked now: how many streams its copy of the client has open."""
    pid = os.fork()
    if not pid:
        os._exit(streams._open)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
