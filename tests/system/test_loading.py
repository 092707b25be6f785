"""A daemon whose store loads slowly serves memory at once, and loses nothing however loading ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.depth import slow
from tests.system.blocks import await_true, connected
from tests.system.test_restart import wipe_arena
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.errors import Unavailable
from tierd.testing import Daemon, chain

CONFIG = """\
[server]
shutdown_deadline = "2 s"

[[host]]
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
"""
HELD_S = 5
"""Seconds that the first piece of the store's index is delayed, unless the daemon ends first."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A configured, stopped daemon with one chain only in its store and another only in memory."""
    with Daemon(CONFIG) as found:
        with connected(found) as client:
            client.put(client.open_namespace(), chain(1, 8), durable=True)
        assert found.stop() == 0
        wipe_arena(found)
        found.start()
        with connected(found) as client:
            client.put(client.open_namespace(), chain(2, 8))
        assert found.stop() == 0
        yield found


@pytest.mark.parametrize("end", [signal.SIGKILL, *slow(signal.SIGTERM, None)])
def test_memory_is_served_before_the_store_is_loaded(daemon: Daemon, end: signal.Signals | None) -> None:
    """While the store loads, memory serves gets and puts. After SIGKILL, SIGTERM or loading, all is there."""
    daemon.start(wait=False, failpoints=f"nvme.load.before_piece=delay:{HELD_S}x1")
    await_true(lambda: daemon.log.count("serving from memory") == 2, "memory is not served")
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert client.status().state == "loading"
        assert [client.read(namespace, chain(seed, 8)) for seed in (1, 2)] == [0, 8]
        client.put(namespace, chain(3, 8))
        assert client.read(namespace, chain(3, 8)) == 8
        store = client.tiers()["nvme.0"]
        assert not store.serving and store.trouble == "loading, 0 %"
    if end is None:
        await_true(lambda: daemon.log.count("start_s=") == 3, "the store is not loaded")
    elif end is signal.SIGKILL:
        daemon.restart()
    else:
        assert daemon.stop() == 0
        daemon.start()
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert [client.read(namespace, chain(seed, 8)) for seed in (1, 2, 3)] == [8, 8, 8]
        assert client.status().state == "serving"


def test_what_is_evicted_by_command_does_not_come_back(daemon: Daemon) -> None:
    """While a store loads, evictions from it or from all tiers are refused; from memory they succeed."""
    daemon.start(wait=False, failpoints=f"nvme.load.before_piece=delay:{HELD_S}x1")
    await_true(lambda: daemon.log.count("serving from memory") == 2, "memory is not served")
    with connect(daemon.target) as operator:
        for tier in ("", "nvme.0"):
            with pytest.raises(Unavailable, match=r"nvme\.0: loading"):
                operator.ask(pb.EvictRequest(tier=tier))
        assert operator.ask(pb.EvictRequest(tier="host.0")).blocks == 8
        await_true(lambda: daemon.log.count("start_s=") == 3, "the store is not loaded")
        assert operator.ask(pb.EvictRequest()).blocks == 8
    with connected(daemon) as client:
        assert [client.read(client.open_namespace(), chain(seed, 8)) for seed in (1, 2)] == [0, 0]


def test_memory_above_its_watermark_is_written_once_the_store_is_there(daemon: Daemon) -> None:
    """Blocks in memory above the watermark are written to the store after it loads, without a call."""
    daemon.configure(CONFIG.replace('"16 MiB"', '"16 MiB"\nhigh_watermark = 0.001\nlow_watermark = 0.0005', 1))
    daemon.start(wait=False, failpoints=f"nvme.load.before_piece=delay:{HELD_S}x1")
    await_true(lambda: daemon.log.count("start_s=") == 3, "the store is not loaded")
    with connect(daemon.target) as operator:
        await_true(lambda: operator.ask(pb.TiersRequest()).tiers[1].pages_ready > 8, "nothing is written")


def snapshots(daemon: Daemon) -> dict[str, int]:
    """Name and inode of each snapshot."""
    return {path.name: path.stat().st_ino for path in (daemon.root / "state" / "nvme-0").glob("snapshot-*.bin")}


def test_memory_is_served_before_a_store_is_loaded_that_crashed(daemon: Daemon) -> None:
    """After repeated SIGKILL, memory serves before the store loads, without a new snapshot. A final
    load restores all durable blocks."""
    daemon.start()
    with connected(daemon) as client:
        client.put(client.open_namespace(), chain(3, 2), durable=True)
    daemon.kill()
    wipe_arena(daemon)
    before = snapshots(daemon)
    for seed in (4, 5):
        daemon.start(wait=False, failpoints=f"nvme.load.before_piece=delay:{HELD_S}x1")
        await_true(lambda count=seed - 1: daemon.log.count("serving from memory") == count, "memory is not served")
        assert snapshots(daemon) == before
        with connected(daemon) as client:
            namespace = client.open_namespace()
            assert client.status().state == "loading"
            assert client.read(namespace, chain(3, 2)) == 0
            client.put(namespace, chain(seed, 8))
            assert client.read(namespace, chain(seed, 8)) == 8
        daemon.kill()
    daemon.start()
    with connected(daemon) as client:
        namespace = client.open_namespace()
        assert [client.read(namespace, chain(seed, 8)) for seed in (1, 4, 5)] == [8, 8, 8]
        assert client.read(namespace, chain(3, 2)) == 2
