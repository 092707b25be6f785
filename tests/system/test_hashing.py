"""The hash process of a true daemon: it ends with it, and its own end costs no block."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.maps import maps_of
from tests.system.blocks import await_true
from tests.system.sdk import BIG, HOST, put, right
from tierd.client import Client
from tierd.testing import Daemon, chain

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
        for seed in range(4):
            assert put(client, namespace, seed, BLOCKS).stored == BLOCKS
        (mine,) = children(daemon)
        lines = list(map(str.split, maps_of(mine)))
        modes = {line[1] for line in lines if len(line) > 5 and str(daemon.arena) in line[5]}
        assert modes == {"r--s"}
