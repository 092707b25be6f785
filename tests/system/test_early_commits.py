"""Puts with a commit under way during their copy, by writers that stop, die or fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.sdk import BIG, HOST, NOTHING, SMALL, await_nothing_held, churn, held, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import AsyncClient, Client, PutGroup
from tierd.client.blocks import reservation, writing
from tierd.client.transport.local import LocalTransport
from tierd.errors import DeadlineExceeded, Overloaded
from tierd.testing import chain, content_of

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 4
TIMEOUT_S, SHUTDOWN_S, LONG_S = 1, 20, 10.0
WRITER = f"""
import sys
import numpy as np
from tierd.client import Client
from tierd.client.blocks import copying
from tierd.client.blocks import writing
from tierd.errors import TierdError
from tests.system.sdk import BIG
from tierd.testing import chain

inner = copying._do

def do(blocks, sums, is_over):
    inner(blocks[:1], sums, is_over)
    print("half", flush=True)
    sys.stdin.readline()
    inner(blocks[1:], sums[copying.slices_of(BIG.block_bytes, 0):], is_over)

copying._do = do
copying._SECOND_THREAD._is_of_use = False
writing.EARLY_BYTES = 0
with Client(sys.argv[1]) as client:
    space, blocks = client.open_namespace(BIG), [np.full(BIG.block_bytes, 0xAB, np.uint8)] * {BLOCKS}
    try:
        print(client.put(space, chain(9, {BLOCKS}), blocks, timeout_s=float(sys.argv[2])).stored)
    except TierdError as error:
        print(type(error).__name__)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put of this process commits early, as large ones do."""
    monkeypatch.setattr(writing, "EARLY_BYTES", 0)


@contextmanager
def writer(daemon: Daemon, timeout_s: int = TIMEOUT_S) -> Iterator[subprocess.Popen[str]]:
    """A process that has written a put's first blocks and waits for a line before it writes the others."""
    command = [sys.executable, "-c", WRITER, daemon.target, str(timeout_s)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> str:
    """Lets the writer continue; its next line."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def commits(daemon: Daemon) -> int:
    """The number of ended commits."""
    with RawClient(daemon.target) as client:
        counters = client.call(client.admin.Status, apb.StatusRequest()).counters
    return sum(count for name, count in counters.items() if "Commit" in name)


def test_a_writer_that_stops_for_longer_than_its_call() -> None:
    """Late writes of a timed-out put reach no other block: its pages stay its own until it releases them."""
    with Daemon("nvme = []\n" + HOST) as daemon, Client(daemon.target) as client, writer(daemon) as process:
        space = client.open_namespace(BIG)
        assert held(daemon) == (0, 1, 0, BLOCKS)
        stand_still(process.pid)
        await_true(lambda: commits(daemon) == 1, "the commit is given up")
        churn(client, seed=1)
        mine = put(client, space, 2, 8).stored
        assert mine
        assert held(daemon) == (0, 1, 0, BLOCKS)
        os.kill(process.pid, signal.SIGCONT)
        said = go_on(process)
        while said == "half":
            said = go_on(process)
        assert said == "DeadlineExceeded"
        assert right(client.get(space, chain(2, 8)).views, 2) == mine
        await_nothing_held(daemon, "a put that came too late")
        assert not client.get(space, chain(9, BLOCKS)).blocks


def test_a_writer_that_dies_while_it_writes() -> None:
    """A writer killed during its copy stores nothing, and its pages are freed."""
    with Daemon("nvme = []\n" + HOST) as daemon, Client(daemon.target) as client, writer(daemon) as process:
        process.kill()
        await_nothing_held(daemon, "the end of a writer")
        assert not client.get(client.open_namespace(BIG), chain(9, BLOCKS)).blocks


def test_a_daemon_ends_in_order_under_a_put_that_is_written() -> None:
    """SIGTERM waits briefly for an unfinished writer, not until its deadline, and saves time for
    transfers."""
    with Daemon(f"nvme = []\n[server]\nshutdown_deadline = '{SHUTDOWN_S} s'\n" + HOST) as daemon, writer(daemon, 60):
        begun = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - begun < SHUTDOWN_S / 2


def test_a_put_whose_last_word_the_daemon_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon stopped during a put's copy makes the put time out; it frees the pages when it continues."""
    with Daemon("nvme = []\n" + HOST) as daemon, Client(daemon.target) as client:
        space, run = client.open_namespace(BIG), writing.Copy.run
        assert put(client, space, 1, BLOCKS).stored == BLOCKS
        monkeypatch.setattr(writing.Copy, "run", lambda copy: (stand_still(daemon.pid), run(copy)))
        try:
            with pytest.raises(DeadlineExceeded):
                client.put(space, chain(2, BLOCKS), [np.zeros(BIG.block_bytes, np.uint8)] * BLOCKS, timeout_s=0.3)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        await_true(lambda: held(daemon) == NOTHING, "its pages went back")


def test_a_durable_put_has_its_time_after_the_copy() -> None:
    """A put that spends most of its time on the copy has the rest of it for the disk."""
    with Daemon() as daemon, Client(daemon.target) as client:
        space, inner = client.open_namespace(SMALL), writing.Copy.run
        with pytest.MonkeyPatch.context() as slow:
            slow.setattr(writing.Copy, "run", lambda copy: (time.sleep(0.9 * LONG_S), inner(copy)))
            blocks = [np.zeros(SMALL.block_bytes, np.uint8)] * BLOCKS
            assert client.put(space, chain(1, BLOCKS), blocks, durable=True, timeout_s=LONG_S).stored == BLOCKS


EARLY, LATE = ["Reserve", "Commit unwritten", "copy"], ["Reserve", "copy", "Commit"]


@pytest.mark.parametrize(
    ("least", "lines", "order"),
    [(0, 8, EARLY), (0, 0, LATE[:1] + EARLY[1:]), (writing.EARLY_BYTES, 8, LATE)],
    ids=["a long put", "without lines", "a small put"],
)
def test_who_is_asked_first(least: int, lines: int, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A large put commits before its copy, with or without a line; a small one after it."""
    monkeypatch.setattr(writing, "EARLY_BYTES", least)
    with Daemon("nvme = []\n" + HOST) as daemon, Client(daemon.target) as client:
        space, said = client.open_namespace(SMALL), list[str]()
        client._verbs.connector.link.session.lines = lines
        send, sum_and_copy = LocalTransport._send, writing.copying.sum_and_copy

        def sent(self: LocalTransport, method: str, request: Any, **given: Any) -> Any:
            said.append(f"{method} unwritten" if getattr(request, "unwritten", False) else method)
            return send(self, method, request, **given)

        def copied(*what: Any, **how: Any) -> bytes:
            said.append("copy")
            return sum_and_copy(*what, **how)

        monkeypatch.setattr(LocalTransport, "_send", sent)
        monkeypatch.setattr(writing.copying, "sum_and_copy", copied)
        assert put(client, space, 1, BLOCKS).stored == BLOCKS
        assert said == order
        assert right(client.get(space, chain(1, BLOCKS)).views, 1) == BLOCKS


def test_a_commit_that_is_made_again_finds_its_pages_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit refused as overloaded and retried copies its pages once."""
    with Daemon("nvme = []\n" + HOST) as daemon, Client(daemon.target) as client:
        space, call, calls, copies = client.open_namespace(SMALL), LocalTransport.call, list[str](), list[Any]()
        sum_and_copy = writing.copying.sum_and_copy

        def copied(*what: Any, **how: Any) -> bytes:
            copies.append(what)
            return sum_and_copy(*what, **how)

        def refused_once(self: LocalTransport, method: str, request: Any, **given: Any) -> Any:
            calls.append(method)
            if calls.count("Commit") == 1 and method == "Commit":
                given["meanwhile"].run()
                refusal = Overloaded("calls: all in use; come again")
                refusal.retry_after_s = 0.01
                raise refusal
            return call(self, method, request, **given)

        monkeypatch.setattr(LocalTransport, "call", refused_once)
        monkeypatch.setattr(writing.copying, "sum_and_copy", copied)
        assert put(client, space, 1, BLOCKS).stored == BLOCKS
        assert (calls.count("Commit"), len(copies)) == (2, 1)
        assert right(client.get(space, chain(1, BLOCKS)).views, 1) == BLOCKS


def test_a_put_that_is_cancelled_writes_to_nobodys_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled put's pages stay its own while its thread may write, and are freed after that."""
    at, go, inner = threading.Event(), threading.Event(), reservation._populate

    def held_up(*what: Any) -> None:
        if not at.is_set():
            at.set()
            go.wait(LONG_S)
        inner(*what)

    async def run(target: str) -> None:
        async with AsyncClient(target) as client:
            space, mine = await client.open_namespace(SMALL), chain(2, BLOCKS)
            blocks = [np.full(SMALL.block_bytes, 0xAB, np.uint8)] * BLOCKS
            monkeypatch.setattr(reservation, "_populate", held_up)
            late = asyncio.ensure_future(client.put(space, chain(1, BLOCKS), blocks))
            await asyncio.to_thread(at.wait, LONG_S)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            assert held(daemon) == (0, 1, 0, BLOCKS)
            async with await client.reserve(PutGroup(space, mine)) as pages:
                for page, name in zip(pages.buffers(), mine, strict=True):
                    page[:] = content_of(name, SMALL.block_bytes)
                go.set()
                await asyncio.to_thread(await_true, lambda: held(daemon) == (0, 1, 0, BLOCKS), "its pages went back")
                await pages.commit()

    with Daemon("nvme = []\n" + HOST) as daemon:
        asyncio.run(run(daemon.target))
        with Client(daemon.target) as client:
            assert right(client.get(client.open_namespace(SMALL), chain(2, BLOCKS)).views, 2) == BLOCKS
