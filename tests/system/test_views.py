"""Views of memory that a client reads in place: their address, their lifetime and their visibility."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import signal
import stat
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.blocks import await_true
from tests.system.elsewhere import Elsewhere, Talk, mapping_of
from tests.system.raw import RawClient
from tests.system.relay import LocalRelay, Relay
from tests.system.sdk import (
    BIG,
    HOST,
    HOST_BYTES,
    SMALL,
    arena_files,
    await_nothing_held,
    churn,
    empty,
    held,
    leases_of,
    put,
    right,
    session_names,
)
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd.client import BlockStatus, Client, PutGroup
from tierd.core.formats.layout import generation_offset
from tierd.errors import DeadlineExceeded, ViewsAlive
from tierd.testing import chain, content_of, is_content

BLOCKS = 4
CONSUMERS: dict[str, Callable[[np.ndarray], Any]] = {
    "view": lambda view: view,
    "slice": lambda view: view[4096:8192],
    "reshape": lambda view: view.reshape(-1, 4096)[3].view(np.uint16),
    "dlpack": np.from_dlpack,
    "memoryview": memoryview,
}
WHERE = {"slice": slice(4096, 8192), "reshape": slice(3 * 4096, 4 * 4096)}
"""The bytes of the block that a consumer keeps, if not all."""


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """A daemon with host memory alone."""
    with Daemon(HOST) as running:
        yield running


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The shared daemon, emptied after each test."""
    yield shared_daemon
    empty(shared_daemon, "the test")


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """A daemon for tests that kill it or change its files."""
    with Daemon(HOST) as running:
        yield running


def unread_bytes() -> int:
    """Bytes that this process has sent over sockets and no receiver has read."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                total += struct.unpack("i", fcntl.ioctl(int(name), termios.TIOCOUTQ, bytes(4)))[0]
    return total


# -- no byte through gRPC


def test_bytes_on_the_wire(tmp_path: Path) -> None:
    """A local put and get of 16 MiB move less than 16 KiB through gRPC; TCP moves all bytes twice."""
    port, total = free_port(), 8 * BIG.block_bytes
    with Daemon(remote_config(tmp_path, port)) as daemon:
        with LocalRelay(daemon.target) as relay, Client(relay.target) as client:
            namespace = client.open_namespace(BIG)
            assert put(client, namespace, 1, 8)
            assert right(client.get(namespace, chain(1, 8)).views, 1) == 8
            local = relay.passed
        with (
            Relay(("127.0.0.1", 0), ("127.0.0.1", port)) as relay,
            Client(f"127.0.0.1:{relay.port}", credential_file=str(tmp_path / "secret")) as client,
        ):
            namespace = client.open_namespace(BIG)
            assert put(client, namespace, 2, 8)
            assert right(client.get(namespace, chain(2, 8)).views, 2) == 8
            remote = relay.passed
    print(f"gRPC bytes for {total} put and got: {local} locally, {remote} over TCP")
    assert local < 16 * 1024
    assert remote > 2 * total


# -- in place


def test_same_memory(daemon: Daemon) -> None:
    """A get's arrays are read-only views into a mapping of the arena's file, at the handle's offset."""
    with Client(daemon.target) as writer, Client(daemon.target) as reader:
        assert put(writer, writer.open_namespace(BIG), 1, BLOCKS)
        lease = reader.acquire(reader.open_namespace(BIG), chain(1, BLOCKS))
        for view, handle, name in zip(lease.views(), lease.handles, chain(1, BLOCKS), strict=True):
            path, rights, offset = mapping_of(view)
            assert Path(path) in arena_files(daemon)
            assert (rights[:2], offset) == ("r-", int(handle["offset"]))
            with open(path, "rb") as file:
                file.seek(offset)
                assert file.read(len(view)) == view.tobytes()
            assert is_content(view, name)


def test_same_memory_both_ways(own_daemon: Daemon) -> None:
    """A change in the arena's file shows in the array, so the get copied nothing."""
    with Client(own_daemon.target) as client:
        namespace = client.open_namespace(SMALL)
        assert put(client, namespace, 1, 1)
        view = client.get(namespace, chain(1, 1)).views[0]
        path, _, offset = mapping_of(view)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\x5a" * 16)
        assert view[:16].tobytes() == b"\x5a" * 16


@pytest.mark.parametrize("is_own", [True, False])
def test_views_refuse_writes(daemon: Daemon, *, is_own: bool) -> None:
    """numpy cannot write to a view, whether the block is the client's own or another's."""
    with Client(daemon.target) as writer, Client(daemon.target) as other:
        assert put(writer, writer.open_namespace(SMALL), 1, 1)
        client = writer if is_own else other
        view = client.get(client.open_namespace(SMALL), chain(1, 1)).views[0]
        for array in (view, view[1:], view.reshape(2, -1), np.asarray(view), np.from_dlpack(view)):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
        with pytest.raises(TypeError):
            memoryview(view)[0] = 0
        assert right([view], 1) == 1


# -- past the lease


def test_kept_arrays_outlive_churn(daemon: Daemon) -> None:
    """Arrays made from a view keep its bytes during churn; when all are collected, its pages are free."""
    with Client(daemon.target) as client, Elsewhere(churning, daemon.target) as other:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, BLOCKS)
        whole = content_of(chain(1, BLOCKS)[2], BIG.block_bytes)
        wanted = {kind: whole[WHERE.get(kind, slice(None))].tobytes() for kind in CONSUMERS}
        kept = {kind: make(client.acquire(namespace, chain(1, BLOCKS)).view(2)) for kind, make in CONSUMERS.items()}
        other.say(1)
        for turn in range(10):
            assert churn(client, seed=2 + turn, total=HOST_BYTES)
            assert {kind: array.tobytes() for kind, array in kept.items()} == wanted
        assert other.hear() > 0
        assert {kind: array.tobytes() for kind, array in kept.items()} == wanted
        for left in reversed(range(len(kept))):
            kept.popitem()
            gc.collect()
            with RawClient(daemon.target) as raw:
                await_true(lambda left=left: leases_of(raw) == left, "the lease of an array that is gone")
        await_nothing_held(daemon, "the last array")


def churning(talk: Talk, target: str) -> None:
    """Another process: pushes ten times the host tier through, at each request."""
    client = Client(target)
    while True:
        talk.say(churn(client, seed=talk.hear() + 50))


def test_view_of_one_block_keeps_its_page(daemon: Daemon) -> None:
    """Arrays of a lease hold it together: the last one ends it, and an earlier close raises ViewsAlive."""
    with Client(daemon.target) as client:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, BLOCKS)
        lease = client.acquire(namespace, chain(1, BLOCKS))
        views = lease.views()
        part = views[3][:1]
        del views
        with pytest.raises(ViewsAlive):
            lease.close()
        assert right([lease.view(i) for i in range(BLOCKS)], 1) == BLOCKS
        del part
        gc.collect()
        lease.close()
        assert held(daemon)[0] == 0


def test_copy_rechecks_generations(own_daemon: Daemon) -> None:
    """A copy does not count a block whose generation word changed, nor any after it."""
    with Client(own_daemon.target) as client:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, BLOCKS)
        lease = client.acquire(namespace, chain(1, BLOCKS))
        out = np.zeros((BLOCKS, BIG.block_bytes), dtype=np.uint8)
        assert lease.copy_into(out) == BLOCKS
        assert right(list(out), 1) == BLOCKS
        data, _, _ = mapping_of(lease.view(2))
        with open(Path(data).with_suffix(".cat"), "r+b") as file, mmap.mmap(file.fileno(), 0) as catalogue:
            word = generation_offset(int(lease.handles["slot"][2]))
            catalogue[word : word + 8] = (int(lease.handles["generation"][2]) + 1).to_bytes(8, "little")
            assert lease.copy_into(out) == 2


# -- past the client, past the daemon


def test_views_outlive_their_client(daemon: Daemon) -> None:
    """Views of a closed client keep their bytes during churn; when all are collected, pages are free."""
    client = Client(daemon.target)
    namespace = client.open_namespace(BIG)
    assert put(client, namespace, 1, BLOCKS)
    views = list(client.get(namespace, chain(1, BLOCKS)).views)
    client.close()
    with Elsewhere(churning, daemon.target) as other:
        other.ask(1)
    assert right(views, 1) == BLOCKS
    views.clear()
    await_nothing_held(daemon, "a closed client's views")


def test_closed_clients_leave_nothing(daemon: Daemon) -> None:
    """A process holds no lease, reservation or session of clients that it closed."""
    for turn in range(5):
        with Client(daemon.target, name="passing") as client:
            namespace = client.open_namespace(BIG)
            assert put(client, namespace, turn, 1)
            lease = client.acquire(namespace, chain(turn, 1))
            assert lease
            view = lease.view(0)
            assert right([view], turn) == 1
    del view, lease
    await_nothing_held(daemon, "closing")
    assert "passing" not in session_names(daemon)


def test_many_clients_of_one_process() -> None:
    """A process can make far more clients in turn than the session limit, closed or only collected."""
    with Daemon(f"[server]\nsession_limit = 2\n\n{HOST}") as daemon:
        for turn in range(40):
            client = Client(daemon.target)
            assert put(client, client.open_namespace(SMALL), turn, 1)
            if turn % 2:
                client.close()
            del client
            gc.collect()
        await_nothing_held(daemon, "forty clients")


def test_views_outlive_their_daemon(own_daemon: Daemon) -> None:
    """Views survive kill -9 and churn on the next daemon; when they are collected, their pages are free."""
    with Client(own_daemon.target) as client, Elsewhere(churning, own_daemon.target) as other:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, BLOCKS)
        views = list(client.get(namespace, chain(1, BLOCKS)).views)
        own_daemon.kill()
        assert right(views, 1) == BLOCKS
        own_daemon.start()
        assert other.ask(1) > 0
        assert right(views, 1) == BLOCKS
        assert churn(client, seed=9) > 0
        assert right(views, 1) == BLOCKS
        await_true(
            lambda: held(own_daemon)[2] == BLOCKS,
            "the views' pages alone are pinned once what leaves for NVMe has arrived",
        )
        views.clear()
        gc.collect()
        client.lookup(namespace, chain(1, 1))
        await_nothing_held(own_daemon, "a former daemon's views")


def test_deadlines_leave_nothing(daemon: Daemon) -> None:
    """A call that times out, even just before its answer, holds nothing."""
    missed = 0
    with Client(daemon.target) as client:
        namespace = client.open_namespace(BIG)
        assert put(client, namespace, 1, BLOCKS)
        for turn in range(200):
            limit = 0.0004 + 0.00001 * turn
            for call in (
                lambda limit=limit: client.acquire(namespace, chain(1, BLOCKS), timeout_s=limit).release(),
                lambda limit=limit, seed=turn + 2: client.reserve(
                    PutGroup(namespace, chain(seed, 2)), timeout_s=limit
                ).abort(),
            ):
                try:
                    call()
                except DeadlineExceeded:
                    missed += 1
        print(f"{missed} of 400 calls were too late")
        assert missed
        await_nothing_held(daemon, "calls that were too late")


def test_views_let_go_of_are_room(own_daemon: Daemon) -> None:
    """Pages of views dropped before a Reserve are room for it, even if the daemon reads the releases late."""
    with Client(own_daemon.target) as client:
        namespace, half = client.open_namespace(BIG), HOST_BYTES // BIG.block_bytes // 2
        names = chain(7, half)
        put(client, namespace, 7, half)
        views = [client.acquire(namespace, names[i : i + 1]).views() for i in range(half)]
        assert client.reserve(PutGroup(namespace, chain(8, half))).statuses.tolist() == [BlockStatus.NO_ROOM] * half
        stand_still(own_daemon.pid)
        with ThreadPoolExecutor(1) as pool:
            try:
                views.clear()
                before = unread_bytes()
                asked = pool.submit(client.reserve, PutGroup(namespace, chain(8, half)))
                await_true(lambda: unread_bytes() > before, "Reserve on its way")
            finally:
                os.kill(own_daemon.pid, signal.SIGCONT)
            assert asked.result().statuses.tolist() == [BlockStatus.RESERVED] * half


# -- several processes


def test_readers_share_pages(daemon: Daemon) -> None:
    """Three processes read the same physical pages with the right bytes while the writer goes on."""
    with Client(daemon.target) as client, contextlib.ExitStack() as stack:
        assert put(client, client.open_namespace(BIG), 1, BLOCKS)
        readers = [stack.enter_context(Elsewhere(reading, daemon.target)) for _ in range(3)]
        places = [reader.hear() for reader in readers]
        assert places[0] == places[1] == places[2]
        assert len(set(map(tuple, places[0]))) == BLOCKS
        writing = threading.Thread(target=churn, args=(client,), kwargs={"seed": 3})
        writing.start()
        for reader in readers:
            reader.say("end")
        assert [reader.hear() for reader in readers] == [0, 0, 0]
        writing.join()


def reading(talk: Talk, target: str) -> None:
    """Another process: reports the places of its pages, and the wrong bytes until its end."""
    client = Client(target)
    views = client.get(client.open_namespace(BIG), chain(1, BLOCKS)).views
    talk.say([(os.stat(mapping_of(view)[0]).st_ino, mapping_of(view)[2]) for view in views])
    talk.hear()
    talk.say(sum(BLOCKS - right(views, 1) for _ in range(20)))
