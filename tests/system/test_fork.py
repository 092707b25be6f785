"""A fork with a client, in every order: the child starts anew, the parent and all pages are
unaffected."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import await_true
from tests.system.early import first_in_child
from tests.system.elsewhere import Child, Elsewhere, Talk
from tests.system.sdk import (
    BIG,
    HOST,
    HOST_BYTES,
    MIB,
    SMALL,
    await_nothing_held,
    churn,
    empty,
    held,
    put,
    right,
    session_names,
)
from tests.system.warm import Daemon
from tierd.client import Client, Lease, OpenedNamespace, PutGroup, Reservation
from tierd.errors import TierdError
from tierd.testing import chain

COUNT = 3
SEGFAULT = -signal.SIGSEGV


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """Host memory only."""
    with Daemon(HOST) as running:
        yield running


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The same daemon for each test. At a test's end nothing is held."""
    yield shared_daemon
    empty(shared_daemon, "the test's processes")


class Holding:
    """A client in every state that a fork can meet: session, lease, views, a half-written reservation."""

    def __init__(self, target: str) -> None:
        self.client = Client(target, name=f"pid-{os.getpid()}")
        self.namespace: OpenedNamespace = self.client.open_namespace(BIG)
        assert put(self.client, self.namespace, 1, COUNT)
        self.lease: Lease = self.client.acquire(self.namespace, chain(1, COUNT))
        self.views = self.lease.views()
        self.pages: Reservation = self.client.reserve(PutGroup(self.namespace, chain(2, 1)))
        self.page = self.pages.buffer(0)
        self.page[:MIB] = 7

    def uses(self) -> dict[str, Callable[[], Any]]:
        """Every use of a handle."""
        return {
            "view": lambda: self.lease.view(0),
            "views": self.lease.views,
            "copy_into": lambda: self.lease.copy_into(np.empty((COUNT, BIG.block_bytes), np.uint8)),
            "check": self.lease.check,
            "release": self.lease.release,
            "report_attention": lambda: self.client.report_attention(self.lease, np.ones((1, COUNT))),
            "buffer": lambda: self.pages.buffer(0),
            "buffers": self.pages.buffers,
            "commit": self.pages.commit,
            "abort": self.pages.abort,
        }

    def is_whole(self) -> bool:
        """Whether all held bytes are unchanged."""
        return right(self.views, 1) == COUNT and bool((self.page[:MIB] == 7).all())


def use_client(client: Client, seed: int) -> list[int]:
    """A client's whole work: the number of stored blocks, and of right ones in a get."""
    namespace = client.open_namespace(SMALL)
    stored = put(client, namespace, seed, 2).stored
    return [stored, right(client.get(namespace, chain(seed, 2)).views, seed)]


# -- before the first call, and with an open session


@pytest.mark.parametrize("when", ["before the first call", "with an open session"])
def test_early_fork(daemon: Daemon, when: str) -> None:
    """A client forked before its first call, or idle, serves parent, child and grandchild in own sessions."""
    with Elsewhere(early, daemon.target, is_open=when == "with an open session") as other:
        assert other.hear() == [[2, 2]] * 3
        assert other.hear() == [2, 2]
        assert session_names(daemon) >= {"early"}


def early(talk: Talk, target: str, *, is_open: bool) -> None:
    """Forks a child, which forks one; says the results of both, then of the parent."""
    client = Client(target, name="early")
    if is_open:
        use_client(client, 1)

    def child() -> list[list[int]]:
        mine = use_client(client, 2)
        grandchild = Child(lambda: use_client(client, 3))
        found = grandchild.result()
        grandchild.end()
        return [mine, found, use_client(client, 4)]

    forked = Child(child)
    talk.say(forked.result())
    forked.end()
    talk.say(use_client(client, 5))
    talk.hear()


# -- with handles


def test_handles_in_the_child(daemon: Daemon) -> None:
    """In the child every use of a former lease or reservation raises ForkedClient and reaches no daemon."""
    with Elsewhere(handles, daemon.target) as other:
        raised, status = other.hear()
        assert set(raised.values()) == {"ForkedClient"}, raised
        assert status == 0
        assert held(daemon)[:2] == (1, 1)
        assert other.ask() == {"whole": True, "committed": 1}
        assert other.ask() == "released"
        await_nothing_held(daemon, "the parent's release")


def handles(talk: Talk, target: str) -> None:
    """A child tries and drops every handle and collects; then the parent continues with its own."""
    mine = Holding(target)

    def child() -> dict[str, str]:
        raised = {}
        for name, use in mine.uses().items():
            try:
                use()
                raised[name] = "nothing"
            except TierdError as error:
                raised[name] = type(error).__name__
        mine.__dict__.clear()
        gc.collect()
        return raised

    forked = Child(child)
    talk.say([forked.result(), forked.end()])
    talk.hear()
    whole, committed = mine.is_whole(), mine.pages.commit().statuses.tolist()
    talk.say({"whole": whole, "committed": committed[0]})
    talk.hear()
    mine.views.clear()
    mine.page = None
    mine.lease.release()
    talk.say("released")
    talk.hear()


@pytest.mark.parametrize("order", ["child first", "child uses it", "child closes it", "churn"])
def test_parent_notices_nothing(daemon: Daemon, order: str) -> None:
    """No use of the client in the child changes the parent's views or half-written pages."""
    with Elsewhere(parent, daemon.target, order=order) as other:
        other.hear()
        with Client(daemon.target) as client:
            assert churn(client, seed=9) > 0
        assert other.ask() is True
        assert held(daemon)[:2] == (1, 1)


def parent(talk: Talk, target: str, *, order: str) -> None:
    """Forks a child that does its work; says whether all bytes are unchanged after the test's churn."""
    mine = Holding(target)
    work = {
        "child first": lambda: None,
        "child uses it": lambda: use_client(mine.client, 5),
        "child closes it": lambda: (use_client(mine.client, 5), mine.client.close()),
        "churn": lambda: churn(mine.client, seed=5, total=2 * HOST_BYTES),
    }[order]
    forked = Child(work)
    talk.say(forked.result())
    forked.end()
    talk.hear()
    talk.say(mine.is_whole())
    talk.hear()


# -- memory


def test_child_reads_and_does_not_write_what_its_parent_writes(daemon: Daemon) -> None:
    """A child can read and drop views of its parent's pages. A write there kills it and changes no byte."""
    with Elsewhere(touching, daemon.target) as other:
        for _ in range(2):
            assert other.hear() == [[COUNT, 7, True], 0]
            assert other.hear() == [None, SEGFAULT]
        assert other.hear() is True


def touching(talk: Talk, target: str) -> None:
    """Children read, drop or write the parent's pages: at once, and after calls of their own."""
    mine = Holding(target)
    taken: list[mmap.mmap] = []

    def take() -> None:
        taken.extend(mmap.mmap(-1, 4 * MIB) for _ in range(32))  # addresses near the old mappings

    def read() -> list[Any]:
        found = [right(mine.views, 1), int(mine.page[0])]
        whole = mine.is_whole()
        mine.__dict__.clear()
        gc.collect()
        return [*found, whole]

    def write() -> None:
        ctypes.memset(mine.page.ctypes.data, 0xFF, 16)

    first_in_child.append(take)
    for is_late in (False, True):
        for work in (read, write):

            def child(work: Callable[[], Any] = work, *, is_late: bool = is_late) -> Any:
                if is_late:
                    use_client(mine.client, 5)
                    take()
                return work()

            forked = Child(child)
            talk.say([forked.result(), forked.end()])
    talk.say(mine.is_whole())
    talk.hear()


def test_child_reads_pages_of_others(daemon: Daemon) -> None:
    """Views of other processes' pages are right in the child too, while the parent lives."""
    with Client(daemon.target) as client:
        assert put(client, client.open_namespace(BIG), 1, COUNT)
        with Elsewhere(reading, daemon.target) as other:
            other.hear()
            assert churn(client, seed=3) > 0
            assert other.ask() == [COUNT, COUNT]


def reading(talk: Talk, target: str) -> None:
    """Parent and child read the same views after the test's churn."""
    client = Client(target)
    views = client.get(client.open_namespace(BIG), chain(1, COUNT)).views
    ours, theirs = os.pipe()

    def child() -> int:
        os.read(ours, 1)
        return right(views, 1)

    forked = Child(child)
    talk.say()
    talk.hear()
    os.write(theirs, b"x")
    talk.say([forked.result(), right(views, 1)])
    forked.end()
    talk.hear()


# -- order of deaths


@pytest.mark.parametrize("way", ["python", "raw"])
@pytest.mark.parametrize("end", ["killed", "exits"])
def test_parent_goes_first(daemon: Daemon, end: str, way: str) -> None:
    """A parent's death or exit frees all its holds, even if its child has every inherited descriptor."""
    with Elsewhere(dying, daemon.target, way=way) as other:
        child = other.hear()
        try:
            assert held(daemon)[:2] == (1, 1)
            if end == "killed":
                other.kill()
            else:
                assert other.finish() == 0
            took = await_nothing_held(daemon, f"a parent that was {end}")
            print(f"{way} fork, parent {end}: everything came back after {took * 1000:.1f} ms")
            os.kill(child, 0)
            with Client(daemon.target) as client:
                namespace = client.open_namespace(BIG)
                assert sum(put(client, namespace, 400 + i, 4).stored for i in range(4)) == HOST_BYTES // BIG.block_bytes
        finally:
            os.kill(child, signal.SIGKILL)


def dying(talk: Talk, target: str, *, way: str) -> None:
    """Forks a child that only lives, by Python's fork or by a raw one."""
    mine = Holding(target)
    talk.say(_idle_child(raw=way == "raw"))
    sys.stdin.readline()
    assert mine.is_whole()


def _idle_child(*, raw: bool) -> int:
    """A child that waits for its SIGKILL."""
    fork = ctypes.PyDLL(None).fork if raw else os.fork
    child = int(fork())
    if not child:
        while True:
            signal.pause()
    return child


def test_pages_are_not_reused_while_the_parent_lives(daemon: Daemon) -> None:
    """A child's end keeps its parent's holds: half of a tier is unchanged while others fill the rest."""
    with Elsewhere(holding_half, daemon.target) as other, Client(daemon.target) as client:
        count = other.hear()
        assert held(daemon)[2] == count
        assert churn(client, seed=6) > 0
        assert other.ask() == count
        other.kill()
        await_nothing_held(daemon, "the parent's end")


def holding_half(talk: Talk, target: str) -> None:
    """Leases a session's limit, forks children with different ends, and checks again."""
    client = Client(target)
    namespace = client.open_namespace(BIG)
    count = HOST_BYTES // 2 // BIG.block_bytes
    assert put(client, namespace, 1, count)
    views = client.get(namespace, chain(1, count)).views
    for work in (lambda: None, client.close, lambda: use_client(client, 2), lambda: os.kill(os.getpid(), 9)):
        Child(work).end()
    talk.say(len(views))
    talk.hear()
    talk.say(right(views, 1))
    talk.hear()


def test_child_after_its_parent(daemon: Daemon) -> None:
    """A child whose parent has ended works as an ordinary client."""
    with Elsewhere(orphaning, daemon.target) as other:
        child = other.hear()
        other.kill()
        await_nothing_held(daemon, "the parent")
        try:
            os.kill(child, signal.SIGUSR1)
            await_true(lambda: f"orphan-{child}" in session_names(daemon), "the orphan's session")
        finally:
            os.kill(child, signal.SIGKILL)


def orphaning(talk: Talk, target: str) -> None:
    """Forks a child that waits for a signal, then works and lives on."""
    mine = Holding(target)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    child = os.fork()
    if not child:
        signal.sigwait({signal.SIGUSR1})
        other = Client(target, name=f"orphan-{os.getpid()}")
        assert use_client(mine.client, 6) == use_client(other, 6) == [2, 2]
        while True:
            signal.pause()
    talk.say(child)
    time.sleep(60)
