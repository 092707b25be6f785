"""Puts with wait=False against a real daemon: the fate of their blocks, and its report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import cache_pb2 as pb
from tierd.client import AsyncClient, Client, NamespaceSpec, OpenedNamespace
from tierd.client.blocks.background_puts import BackgroundPuts
from tierd.client.blocks.writing import Copy
from tierd.client.transport.local import Sent
from tierd.core.formats.model import BlockStatus
from tierd.errors import DeadlineExceeded, TierdError
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=64 << 10)
LONG = NamespaceSpec(model="long", tokens_per_block=16, block_bytes=2 << 20)
PENDING, READY = BlockStatus.PENDING, BlockStatus.READY
SOON_S = 30.0


def put(client: Client, space: OpenedNamespace, number: int, *, count: int = 4, wait: bool = False) -> list[int]:
    """Puts a sequence; the status of each block."""
    names = chain(number, count)
    blocks = [content_of(name, SPEC.block_bytes) for name in names]
    return client.put(space, names, blocks, wait=wait).statuses.tolist()


@contextlib.contextmanager
def still(daemon: Daemon) -> Iterator[None]:
    """Stops the daemon during the block and continues it afterwards."""
    stand_still(daemon.pid)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def is_right(client: Client, space: OpenedNamespace, number: int, *, count: int = 4) -> bool:
    """Whether the daemon holds a sequence, byte for byte."""
    names, out = chain(number, count), np.zeros((count, SPEC.block_bytes), np.uint8)
    got = client.get(space, names, out=out)
    return got.blocks == count and all(
        np.array_equal(page, content_of(name, SPEC.block_bytes)) for page, name in zip(out, names, strict=True)
    )


def warmed(client: Client) -> OpenedNamespace:
    """A namespace with reserved pages in stock for its puts."""
    space = client.open_namespace(SPEC)
    for number in range(1000, 1004):
        put(client, space, number, wait=True)
    deadline = time.monotonic() + SOON_S
    link = client._connector.link
    assert link is not None
    assert link.page_grants is not None
    while link.page_grants._order is not None:  # the putting thread reads its answer
        link.page_grants._receive(deadline)
        assert time.monotonic() < deadline
    return space


FULL = """
nvme = []
[server]
queue_limit = 4
[[host]]
capacity = '64 MiB'
segment = '8 MiB'
"""
"""A daemon that runs at most three slow calls at once, two of one client."""


@contextlib.contextmanager
def full(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Fills the daemon's slow calls until the event is set: other clients' commits with copies under way."""
    begun, go, run, mine = threading.Semaphore(0), threading.Event(), Copy.run, threading.get_ident()

    def slowly(self: Copy) -> None:
        if threading.get_ident() != mine:
            begun.release()
            assert go.wait(SOON_S)
        run(self)

    def work(client: Client, number: int) -> None:
        space = client.open_namespace(LONG)
        (name,) = chain(number, 1)
        with contextlib.suppress(TierdError):  # the daemon may be killed meanwhile
            client.put(space, name[None], [content_of(name, LONG.block_bytes)])

    monkeypatch.setattr(Copy, "run", slowly)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon.target, timeout_s=SOON_S)) for _ in range(3)]
        threads = [threading.Thread(target=work, args=(client, 500 + n)) for n, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        assert all(begun.acquire(timeout=SOON_S) for _ in threads)
        try:
            with RawClient(daemon.target) as raw:
                refusal = partial(raw.error_of, raw.cache.Acquire, pb.AcquireRequest())
                await_true(lambda: refusal() == "Overloaded", "their commits under way")
            yield go
        finally:
            go.set()
            for thread in threads:
                thread.join(SOON_S)


def test_its_own_client_finds_what_it_has_put() -> None:
    """A get or lookup right after a put with wait=False serves all of it; no block is lost."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        for number in range(100):
            assert put(client, space, number) == [PENDING] * 4
            assert client.lookup(space, chain(number, 4)).tokens == 64
            assert is_right(client, space, number)
        assert client.flush() == 0


def test_it_returns_while_the_daemon_stands_still() -> None:
    """With pages in stock, such a put needs no answer of a stopped daemon, which stores it later."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S, best_effort=True) as client:
        space = warmed(client)
        with still(daemon):
            assert put(client, space, 1) == [PENDING] * 4
            assert client.lookup(space, chain(2, 1), timeout_s=0.05).tokens == 0
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_a_call_that_has_no_time_for_it_leaves_it_alone() -> None:
    """A call that times out behind such a put fails alone; the daemon still stores the put."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S, best_effort=True) as client:
        space = warmed(client)
        with still(daemon):
            assert put(client, space, 1) == [PENDING] * 4
            assert client.flush(timeout_s=0.05) == 0
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_blocks_that_were_lost_are_counted_once() -> None:
    """Blocks of a put lost with a killed daemon are counted once, by flush."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S, best_effort=True) as client:
        space = warmed(client)
        stand_still(daemon.pid)
        assert put(client, space, 1, count=3) == [PENDING] * 3
        os.kill(daemon.pid, signal.SIGKILL)
        assert client.flush() == 3
        assert client.flush() == 0


def test_close_waits_for_it() -> None:
    """A client's close waits for its puts, and other clients hit them."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as other:
        client = Client(daemon.target, timeout_s=SOON_S)
        space, theirs = warmed(client), other.open_namespace(SPEC)
        closing = threading.Thread(target=client.close)
        with still(daemon):
            assert put(client, space, 1) == [PENDING] * 4
            closing.start()
            closing.join(0.2)
            assert closing.is_alive()
        closing.join(SOON_S)
        assert not closing.is_alive()
        assert is_right(other, theirs, 1)


def test_threads_that_share_a_client() -> None:
    """Each thread hits its own puts, whichever thread reads the answers."""
    wrong = list[int]()

    def work(client: Client, space: OpenedNamespace, first: int) -> None:
        for number in range(first, first + 50):
            put(client, space, number)
            if not is_right(client, space, number):
                wrong.append(number)

    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        threads = [threading.Thread(target=work, args=(client, space, 100 * n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
        assert not wrong
        assert client.flush() == 0


def test_blocks_that_exist_are_not_lost() -> None:
    """A second put of a sequence loses nothing, with or without pages in stock."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        for _ in range(3):
            put(client, space, 1)
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_a_long_put_goes_in_parts() -> None:
    """A sequence longer than a call's limit goes in parts, and no part waits for its answer."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        small = client.open_namespace(NamespaceSpec(model="small", tokens_per_block=16, block_bytes=4096))
        names = chain(1, 2500)
        result = client.put(small, names, [content_of(name, 4096) for name in names], wait=False)
        assert result.stored == 2500
        assert client.flush() == 0
        assert client.lookup(small, names).tokens == 2500 * 16


def test_a_durable_put_waits() -> None:
    """durable=True waits until NVMe holds the blocks, despite wait=False."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space, names = client.open_namespace(SPEC), chain(1, 1)
        assert client.put(space, names, [content_of(names[0], SPEC.block_bytes)], durable=True, wait=False)
        assert client.put(space, names, [bytes(SPEC.block_bytes)]).statuses.tolist() == [BlockStatus.EXISTS]


def test_a_child_owes_nothing_of_its_parents() -> None:
    """After a fork the child's flush covers only its own puts; the daemon stores the parent's."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        stand_still(daemon.pid)
        assert put(client, space, 1) == [PENDING] * 4
        child = os.fork()
        if not child:
            os._exit(len(client._verbs.background_puts._sent) + client._verbs.background_puts.lost())
        os.kill(daemon.pid, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_flush_reads_answers_that_came_long_ago() -> None:
    """Flush counts an answer that has arrived, even after its put's deadline."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space, names = warmed(client), chain(1, 4)
        blocks = [content_of(name, SPEC.block_bytes) for name in names]
        assert client.put(space, names, blocks, wait=False, timeout_s=0.5)
        (sent,) = client._verbs.background_puts._sent
        assert sent.call.comes(SOON_S)
        while time.monotonic() < sent.deadline:
            time.sleep(0.01)
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_flush_raises_while_answers_are_to_come() -> None:
    """Flush raises while answers are missing; the next flush counts the losses."""
    with Daemon() as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        stand_still(daemon.pid)
        try:
            assert put(client, space, 1, count=3) == [PENDING] * 3
            with pytest.raises(DeadlineExceeded, match="1 puts are not answered"):
                client.flush(timeout_s=0.05)
        finally:
            os.kill(daemon.pid, signal.SIGKILL)
        assert client.flush() == 3


def test_puts_under_way_leave_a_turn_to_other_calls() -> None:
    """With few credits, such puts never hold the last one."""
    config = "nvme = []\n[server]\nsession_credits = 3\n[[host]]\ncapacity = '64 MiB'\nsegment = '8 MiB'\n"
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        for number in range(12):
            assert put(client, space, number) == [PENDING] * 4
            assert len(client._verbs.background_puts) <= 2
            client.open_namespace(NamespaceSpec(model=f"m{number}", tokens_per_block=16, block_bytes=4096))
        assert client.flush() == 0


@pytest.mark.parametrize("is_refused", [False, True])
async def test_who_cancels_a_verb_takes_no_answer_from_a_put(
    monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """A get cancelled while it reads a put's answer keeps that answer for flush."""
    begun, go, inner, plain = threading.Event(), threading.Event(), Sent.reply, BackgroundPuts.send

    def reply(self: Sent, **how: Any) -> Any:
        if self._method == "Commit":
            begun.set()
            assert go.wait(SOON_S)
        return inner(self, **how)

    def send(self: BackgroundPuts, hold: Any, request: Any, **how: Any) -> bool:
        hold.link.session.abort([hold.reservation], timeout_s=SOON_S)
        return plain(self, hold, request, **how)

    with Daemon() as daemon:
        async with AsyncClient(daemon.target, timeout_s=SOON_S) as client:
            space, names = await client.open_namespace(SPEC), chain(1, 4)
            blocks = [content_of(name, SPEC.block_bytes) for name in names]
            if is_refused:
                monkeypatch.setattr(BackgroundPuts, "send", send)
            assert (await client.put(space, names, blocks, wait=False)).statuses.tolist() == [PENDING] * 4
            monkeypatch.setattr(Sent, "reply", reply)
            views = asyncio.ensure_future(client.get(space, names))
            assert await asyncio.to_thread(begun.wait, SOON_S)
            views.cancel()
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await views
            monkeypatch.setattr(Sent, "reply", inner)
            assert await client.flush() == 4 * is_refused
            assert (await client.lookup(space, names)).tokens == 64 * (not is_refused)


async def test_the_asynchronous_client_has_it_too() -> None:
    """AsyncClient puts without waiting, hits and flushes like Client."""
    with Daemon() as daemon:
        async with AsyncClient(daemon.target, timeout_s=SOON_S) as client:
            space, names = await client.open_namespace(SPEC), chain(1, 4)
            blocks = [content_of(name, SPEC.block_bytes) for name in names]
            result = await client.put(space, names, blocks, wait=False)
            assert result.statuses.tolist() == [PENDING] * 4
            assert await client.flush() == 0
            assert (await client.lookup(space, names)).tokens == 64


def test_a_put_that_is_refused_for_want_of_room_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client retries a put refused as overloaded from its filled pages, without reading its
    source again."""
    with Daemon(FULL) as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space, names = warmed(client), chain(1, 4)
        blocks = [content_of(name, SPEC.block_bytes) for name in names]
        with full(daemon, monkeypatch) as go:
            assert client.put(space, names, blocks, wait=False).statuses.tolist() == [PENDING] * 4
            for block in blocks:
                block[:] = 0
            (sent,) = client._verbs.background_puts._sent
            assert sent.call.comes(SOON_S)
            with pytest.raises(DeadlineExceeded, match="1 puts are not answered"):
                client.flush(timeout_s=0.1)
            go.set()
        assert client.flush() == 0
        assert is_right(client, space, 1)


def test_flush_says_why_blocks_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush reports the number of lost blocks and, per kind of failure, the daemon's message."""
    with Daemon(FULL) as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        with full(daemon, monkeypatch):
            names = chain(1, 4)
            blocks = [content_of(name, SPEC.block_bytes) for name in names]
            assert client.put(space, names, blocks, wait=False, timeout_s=0.3)
            lost = client.flush()
            assert lost == 4
            (why,) = lost.reasons
            assert re.match("4 blocks: Overloaded: .*server.queue_limit 4", why)
        stand_still(daemon.pid)
        assert put(client, space, 2, count=3) == [PENDING] * 3
        os.kill(daemon.pid, signal.SIGKILL)
        lost = client.flush()
        assert lost == 3
        assert re.match("3 blocks: Unavailable: ", lost.reasons[0])
        assert client.flush().reasons == ()


def test_a_refused_put_whose_daemon_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused put is lost with its daemon: flush does not wait for another daemon."""
    with Daemon(FULL) as daemon, Client(daemon.target, timeout_s=SOON_S) as client:
        space = warmed(client)
        with full(daemon, monkeypatch):
            assert put(client, space, 1) == [PENDING] * 4
            with pytest.raises(DeadlineExceeded):
                client.flush(timeout_s=0.1)
            daemon.kill()
            lost = client.flush()
            assert lost == 4 and re.match("4 blocks: (Unavailable|SessionLost): ", lost.reasons[0])
