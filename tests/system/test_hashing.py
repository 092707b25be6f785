"""The hash process of a true daemon: it ends with it, and its own end costs no block."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.maps import maps_of
from tests.system.blocks import await_true
from tests.system.sdk import BIG, HOST, SMALL, put, right
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.testing import chain

BLOCKS = 8


def children(daemon: Daemon) -> list[int]:
    """Processes that it has started for itself."""
    return list(map(int, Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()))


def is_gone(pid: int) -> bool:
    """Also while nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def files_of(daemon: Daemon) -> list[str]:
    """What its descriptors are of."""
    found = list[str]()
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.readlink(entry))
    return found


def test_it_ends_with_a_killed_daemon() -> None:
    """SIGKILL leaves no process behind."""
    with Daemon(HOST) as daemon:
        (mine,) = children(daemon)
        daemon.kill()
        await_true(lambda: is_gone(mine), "the hash process has ended")


def test_its_end_costs_no_block() -> None:
    """Puts that go on while it is killed again and again are stored, and hold what was put."""
    with Daemon(HOST) as daemon, Client(daemon.target) as client:
        namespace, killed = client.open_namespace(BIG), set[int]()
        for seed in range(60):
            for pid in set(children(daemon)) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            assert put(client, namespace, seed, BLOCKS).stored == BLOCKS
            assert right(client.acquire(namespace, chain(seed, BLOCKS)).views(), seed) == BLOCKS
        assert killed
        await_true(lambda: bool(set(children(daemon)) - killed), "another takes its place")


def test_it_maps_for_reading_alone() -> None:
    """No mapping of the arena that the hash process has can be written through."""
    with Daemon(HOST) as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(BIG)
        (mine,), seeds, modes = children(daemon), itertools.count(), set[str]()

        def has_mapped() -> bool:
            """It follows a put as soon as it runs, which may be after the first ones."""
            assert put(client, namespace, next(seeds), BLOCKS).stored == BLOCKS
            lines = list(map(str.split, maps_of(mine)))
            modes.update(line[1] for line in lines if len(line) > 5 and str(daemon.arena) in line[5])
            return bool(modes)

        await_true(has_mapped, "the hash process has mapped the arena")
        assert modes == {"r--s"}


def test_more_puts_at_once_than_words() -> None:
    """Puts of one client from more threads than its board has words are stored, and hold what was put; all words are free afterwards."""
    with Daemon(HOST.replace('"32 MiB"', '"256 MiB"')) as daemon, Client(daemon.target) as client:
        namespace = client.open_namespace(SMALL)
        assert put(client, namespace, 200, BLOCKS).stored == BLOCKS
        board = client._verbs.connector.link.session.board
        del board.free[2:]
        free = sorted(board.free)
        with ThreadPoolExecutor(8) as threads:
            stored = list(threads.map(lambda seed: put(client, namespace, seed, BLOCKS).stored, range(200)))
        assert stored == [BLOCKS] * 200
        assert all(right(client.get(namespace, chain(seed, BLOCKS)).views, seed) == BLOCKS for seed in range(200))
        assert sorted(board.free) == free


def test_who_only_reads_has_no_board() -> None:
    """A session costs the daemon a descriptor for it from the first memory on that it may write to, and no other."""
    with Daemon(HOST) as daemon, Client(daemon.target) as writer, Client(daemon.target) as reader:
        namespace = writer.open_namespace(SMALL)
        for seed in range(3):
            assert put(writer, namespace, seed, BLOCKS).stored == BLOCKS
        assert reader.get(reader.open_namespace(SMALL), chain(1, BLOCKS)).blocks == BLOCKS
        assert [client._verbs.connector.link.session.board is None for client in (writer, reader)] == [False, True]
        assert sum("tierd-board" in file for file in files_of(daemon)) == 1
