"""The host tier gets larger and smaller while clients work: never a wrong byte, kills included."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.sdk import SMALL, arena_files, put, right
from tests.system.test_set import request
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, OpenedNamespace
from tierd.testing import chain

HOST = '[[host]]\ncapacity = {size}\nsegment = "256 KiB"\n'
NVME = '[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\nadmission = "all"\n'
SEGMENT = 256 << 10
COUNT = 16
"""Blocks of a chain; four chains fill a segment."""


def config(size: int, *, store: bool = True) -> str:
    """A host tier of so many segments, above a store or alone."""
    host = HOST.format(size=size * SEGMENT)
    return host + NVME if store else "nvme = []\n" + host


def resize(daemon: Daemon, size: int) -> list[str]:
    """Sets the host tier's capacity in segments. Returns what was not reached."""
    with RawClient(daemon.target) as operator:
        answer = operator.call(operator.admin.Set, request({"host.0.capacity": str(size * SEGMENT)}))
    return list(answer.notes)


def capacity(daemon: Daemon) -> int:
    """The host tier's capacity in segments."""
    with RawClient(daemon.target) as operator:
        host = operator.call(operator.admin.Tiers, apb.TiersRequest()).tiers[0]
    assert host.used_bytes <= host.assigned_bytes <= host.capacity_bytes
    return int(host.capacity_bytes // SEGMENT)


def data_bytes(daemon: Daemon) -> int:
    """Bytes of the arena's data files."""
    return sum(path.stat().st_size for path in arena_files(daemon) if path.suffix == ".data")


def found(client: Client, space: OpenedNamespace, seeds: range) -> int:
    """Blocks of these chains that the daemon serves, all with the right bytes."""
    count = 0
    for seed in seeds:
        views = client.get(space, chain(seed, COUNT)).views
        assert right(views, seed) == len(views)
        count += len(views)
        del views
    return count


def flush(daemon: Daemon) -> None:
    """Writes to the store what host memory alone has."""
    with RawClient(daemon.target) as operator:
        assert operator.call(operator.admin.Flush, apb.FlushRequest(deadline_s=30)).left == 0


@contextmanager
def busy(daemon: Daemon) -> Iterator[list[int]]:
    """Two clients put and get all the time. Yields their counts of served blocks."""
    done, served, wrong = threading.Event(), [0, 0], list[str]()

    def work(number: int) -> None:
        try:
            with Client(daemon.target, best_effort=True) as client:
                space = client.open_namespace(SMALL)
                while not done.is_set():
                    for seed in range(1000 * (number + 1), 1000 * (number + 1) + 20):
                        put(client, space, seed, COUNT)
                        views = client.get(space, chain(seed - 5, COUNT)).views
                        served[number] += len(views)
                        wrong.extend([f"chain {seed - 5}"] * (right(views, seed - 5) != len(views)))
        except Exception as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        await_true(lambda: min(served) > 0, "both clients get blocks")
        yield served
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert not wrong


def test_a_tier_grows() -> None:
    """A larger tier holds more blocks than it could before, at once and while clients work."""
    with Daemon(config(4, store=False)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SMALL)
        with busy(daemon):
            assert resize(daemon, 24) == []
        assert capacity(daemon) == 24
        client_blocks = sum(put(client, space, seed, COUNT).stored for seed in range(40))
        assert client_blocks == 40 * COUNT and found(client, space, range(40)) == 40 * COUNT
        await_true(lambda: data_bytes(daemon) == 24 * SEGMENT, "all memory is made")
        daemon.restart()  # with the size of its file: the hottest blocks that fit stay
        assert 0 < found(client, space, range(40)) < 40 * COUNT and capacity(daemon) == 4


def test_a_tier_that_does_not_fit_stays() -> None:
    """A capacity beyond the machine's memory is refused with the remedy, and nothing changes."""
    with Daemon(config(4)) as daemon, RawClient(daemon.target) as operator:
        wanted = {"host.0.capacity": "800 TiB", "server.call_timeout": "1 s"}
        for check in (True, False):
            assert operator.error_of(operator.admin.Set, request(wanted, check=check)) == "InvalidArgument"
        assert capacity(daemon) == 4 and "setting changed" not in daemon.log


def test_a_tier_shrinks_and_its_blocks_move_to_the_store() -> None:
    """A smaller tier frees the files of its segments; its blocks come from the store, all of them."""
    with Daemon(config(16)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(SMALL)
        assert sum(put(client, space, seed, COUNT).stored for seed in range(30)) == 30 * COUNT
        assert resize(daemon, 4) == []
        assert capacity(daemon) == 4 and data_bytes(daemon) == 4 * SEGMENT
        flush(daemon)
        assert found(client, space, range(30)) == 30 * COUNT
        assert resize(daemon, 16) == []
        assert found(client, space, range(30)) == 30 * COUNT and capacity(daemon) == 16


def test_a_tier_changes_its_size_again_and_again_under_load() -> None:
    """While clients put and get, each change reaches its size, and every served byte is right."""
    with Daemon(config(12)) as daemon:
        with busy(daemon) as served:
            for size in (3, 8, 2, 12, 5):
                assert resize(daemon, size) == []
                assert capacity(daemon) == size
                before = list(served)
                await_true(lambda before=before: served[0] > before[0] and served[1] > before[1], "gets go on")  # type: ignore[misc]
        assert "Traceback" not in daemon.log


def test_segments_that_a_client_holds_stay() -> None:
    """Views keep their segments: the answer names their session, and a later change succeeds."""
    with Daemon(config(8)) as daemon, Client(daemon.target, name="holder") as client:
        space = client.open_namespace(SMALL)
        assert sum(put(client, space, seed, COUNT).stored for seed in range(15)) == 15 * COUNT
        held = [client.get(space, chain(seed, COUNT)).views for seed in range(15)]
        (note,) = resize(daemon, 1)
        with RawClient(daemon.target) as operator:
            sessions = operator.call(operator.admin.Sessions, apb.SessionsRequest()).sessions
        (holder,) = [session.id for session in sessions if session.name == "holder"]
        assert f"held by sessions {str(holder)[:8]} (" in note and "not to 256 KiB" in note and 1 < capacity(daemon) < 8
        assert all(right(views, seed) == COUNT for seed, views in enumerate(held))
        flush(daemon)
        del held
        assert resize(daemon, 1) == [] and capacity(daemon) == 1
        assert found(client, space, range(15)) == 15 * COUNT


def test_a_daemon_that_shrinks_can_end() -> None:
    """SIGTERM during a shrink that waits for a client: the shrink gives up, and the blocks survive."""
    server = '[server]\nshutdown_deadline = "2 s"\n'
    with Daemon(server + config(8)) as daemon, Client(daemon.target, name="holder") as client:
        space = client.open_namespace(SMALL)
        assert sum(put(client, space, seed, COUNT).stored for seed in range(15)) == 15 * COUNT
        flush(daemon)
        held = [client.get(space, chain(seed, COUNT)).views for seed in range(15)]
        await_true(lambda: data_bytes(daemon) == 8 * SEGMENT, "all memory is made")
        (daemon.root / "tierd.toml").write_text(daemon._with_arena(server + config(1)))
        os.kill(daemon.pid, signal.SIGHUP)
        await_true(lambda: data_bytes(daemon) < 8 * SEGMENT, "the shrink has begun")
        assert daemon.stop() == 0
        said = daemon.log
        assert "configuration read again" in said and "Traceback" not in said
        assert said.index("stopping") < said.index("held by sessions") < said.index("ended")
        assert all(right(views, seed) == COUNT for seed, views in enumerate(held))
        daemon.start()
        with Client(daemon.target) as other:
            assert found(other, other.open_namespace(SMALL), range(15)) == 15 * COUNT


@pytest.mark.parametrize(("point", "later"), [("arena.close.before_catalogue", 4), ("arena.close.before_discard", 12)])
def test_a_death_while_it_shrinks(point: str, later: int) -> None:
    """A daemon that is killed while it shrinks starts again, with either size, and serves right bytes."""
    with Daemon(config(12), faults=True) as daemon:
        with Client(daemon.target) as client:
            space = client.open_namespace(SMALL)
            assert sum(put(client, space, seed, COUNT).stored for seed in range(25)) == 25 * COUNT
        flush(daemon)
        with daemon.faults() as faults:
            faults.arm(point, "kill@2")
        with pytest.raises(grpc.RpcError):
            resize(daemon, 4)
        daemon.await_end()
        daemon.configure(config(later))
        daemon.start()
        with Client(daemon.target) as client:
            space = client.open_namespace(SMALL)
            assert found(client, space, range(25)) == 25 * COUNT
        assert capacity(daemon) == later and data_bytes(daemon) <= later * SEGMENT
