"""Stores and instances that are unavailable: dead disks, and directories that another daemon holds."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import SOON_S, BlockClient, await_true, connected
from tests.system.shim.iofault import EVERYTHING, READS, SYNCS, IoFaults
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.errors import Unavailable
from tierd.testing import chain

TWO_STORES = """\
[server]
shutdown_deadline = "2 s"

[[host]]
capacity = "8 MiB"
segment = "1 MiB"

[[nvme]]
path = "{root}/a"
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
path = "{root}/b"
capacity = "16 MiB"
segment = "1 MiB"
"""
DEMOTES = """\
[[host]]
capacity = "8 MiB"
segment = "1 MiB"
high_watermark = 0.02
low_watermark = 0.01

"""
CHAINS = 24
"""Chains of one block each; each store has about half."""


def _put_single(client: BlockClient, namespace: int, *, seed: int, count: int) -> np.ndarray:
    """Puts durable chains of one block. Returns for each whether it was acknowledged."""
    stored = [client.put(namespace, chain(seed + i, 1), durable=True) for i in range(count)]
    return np.array(stored, dtype=bool)


def _stores_of(client: BlockClient, *, seed: int, count: int) -> list[str]:
    """The store that holds each block; empty for none."""
    found = []
    for i in range(count):
        reply = client.call(client.admin.Inspect, apb.InspectRequest(hash=chain(seed + i, 1).tobytes().hex()))
        found.append(next((page.tier for page in reply.pages if page.tier.startswith("nvme")), ""))
    return found


def test_store_dies(tmp_path: Path) -> None:
    """If one of two stores dies, its blocks miss and new ones go to the other; later all are back."""
    io = IoFaults(tmp_path)
    with Daemon(TWO_STORES, env=io.env) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        assert _put_single(client, namespace, seed=1000, count=CHAINS).all()
        before = np.array(_stores_of(client, seed=1000, count=CHAINS))
        assert set(before.tolist()) == {"nvme.0", "nvme.1"}
        with io.armed(EVERYTHING, "EIO", f"{daemon.root}/b/*"):
            first = _put_single(client, namespace, seed=2000, count=CHAINS)
            assert not first.all(), "no put noticed that the disk is gone"
            await_true(lambda: bool(client.tiers()["nvme.1"].trouble), "the dead store out of service")
            assert _put_single(client, namespace, seed=3000, count=CHAINS).all()
            assert set(_stores_of(client, seed=3000, count=CHAINS)) == {"nvme.0"}
            assert not client.tiers()["nvme.0"].trouble
            assert "tier out of service" in daemon.log
            client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
            assert _found(client, seed=1000) == (before == "nvme.0").tolist()
        await_true(lambda: not client.tiers()["nvme.1"].trouble, "the store back in service")
        assert _found(client, seed=1000) == [True] * CHAINS
        assert np.array(_found(client, seed=2000))[first].all()
        assert _put_single(client, namespace, seed=4000, count=CHAINS).all()
        assert set(_stores_of(client, seed=4000, count=CHAINS)) == {"nvme.0", "nvme.1"}
        print(f"{int(first.sum())} of {CHAINS} puts acknowledged while it died")


def _found(client: BlockClient, *, seed: int) -> list[bool]:
    namespace = client.open_namespace()
    return [bool(client.read(namespace, chain(seed + i, 1))) for i in range(CHAINS)]


def test_reads_fail(tmp_path: Path) -> None:
    """A store whose reads fail costs only its own blocks; when reads succeed again, it serves them."""
    io = IoFaults(tmp_path)
    with Daemon(TWO_STORES, env=io.env) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        assert _put_single(client, namespace, seed=1000, count=CHAINS).all()
        where = np.array(_stores_of(client, seed=1000, count=CHAINS))
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        with io.armed(READS, "EIO", f"{daemon.root}/b/*"):
            assert _found(client, seed=1000) == (where == "nvme.0").tolist()
            await_true(lambda: bool(client.tiers()["nvme.1"].trouble), "the store out of service")
        await_true(lambda: not client.tiers()["nvme.1"].trouble, "the store in service")
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        assert _found(client, seed=1000) == [True] * CHAINS


def test_flush_over_stores_that_fail(tmp_path: Path) -> None:
    """A flush counts the blocks that it could not write to NVMe; when the disks work again, none is left."""
    io = IoFaults(tmp_path)
    with Daemon(TWO_STORES, env=io.env) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        with io.armed(SYNCS, "EIO", f"{daemon.root}/*"):
            for i in range(CHAINS):
                client.put(namespace, chain(1000 + i, 1))
            assert client.call(client.admin.Flush, apb.FlushRequest(deadline_s=SOON_S)).left > 0
        await_true(lambda: not client.call(client.admin.Flush, apb.FlushRequest(deadline_s=SOON_S)).left, "all flushed")
        assert _put_single(client, namespace, seed=1000, count=CHAINS).all()


def test_a_sync_fails_under_demotion(tmp_path: Path) -> None:
    """Blocks lost with a failed sync are still in memory, so a later flush writes them to the store
    again. No page is quarantined, and one outage is reported."""
    io, count = IoFaults(tmp_path), 60
    config = DEMOTES + '[[nvme]]\ncapacity = "16 MiB"\nsegment = "1 MiB"\n'
    with Daemon(config, env=io.env) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        with io.armed(SYNCS, "EIO", f"{daemon.root}/*/seg-*", times=1):
            assert [client.put(namespace, chain(1000 + i, 4)) for i in range(count)] == [4] * count
            await_true(lambda: "tier out of service" in daemon.log, "a sync of what was demoted")
        await_true(lambda: not client.tiers()["nvme.0"].trouble, "the store back in service")
        await_true(lambda: not client.call(client.admin.Flush, apb.FlushRequest(deadline_s=SOON_S)).left, "all flushed")
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        assert [client.read(namespace, chain(1000 + i, 4)) for i in range(count)] == [4] * count
        assert client.tiers()["nvme.0"].pages_quarantined == 0
        assert daemon.log.count("tier out of service") == 1


def test_dead_store_after_a_restart(tmp_path: Path) -> None:
    """After kill -9 all acknowledged blocks hit, in either store, and no other block is wrong."""
    io = IoFaults(tmp_path)
    with Daemon(TWO_STORES, env=io.env) as daemon:
        with connected(daemon) as client:
            namespace = client.open_namespace()
            with io.armed(SYNCS, "EIO", f"{daemon.root}/b/*"):
                stored = _put_single(client, namespace, seed=1000, count=CHAINS)
        assert stored.any()
        assert not stored.all()
        daemon.kill()
        io.disarm()
        wipe_arena(daemon)
        daemon.start()
        with connected(daemon) as client:
            found = np.array(_found(client, seed=1000))
            assert found[stored].all()
            assert _put_single(client, client.open_namespace(), seed=5000, count=CHAINS).all(), (
                "a restart puts the store back into service"
            )


def test_second_daemon_on_one_instance() -> None:
    """A second daemon on the same instance exits non-zero and names the holder; the first serves on."""
    with Daemon() as daemon:
        second = Daemon(root=daemon.root)
        try:
            with pytest.raises(Unavailable, match=rf"exit status [1-9](?s:.*)process {daemon.pid}\b"):
                second.start()
        finally:
            shutil.rmtree(second.arena)
        assert "Traceback" not in daemon.log
        with connected(daemon) as client:
            assert client.put(client.open_namespace(), chain(1, 4)) == 4
            assert client.read(client.open_namespace(), chain(1, 4)) == 4


def test_store_of_another_daemon(tmp_path: Path) -> None:
    """A daemon whose store another holds refuses to start and names both; later it starts."""
    config = f'[[host]]\ncapacity = "8 MiB"\nsegment = "1 MiB"\n[[nvme]]\npath = "{tmp_path}/store"\ncapacity = "16 MiB"\nsegment = "1 MiB"\n'
    other = Daemon(config)
    with Daemon(config) as daemon:
        with pytest.raises(
            Unavailable, match=rf"exit status [1-9](?s:.*){tmp_path}/store(?s:.*)process {daemon.pid}\b"
        ):
            other.start()
        assert "Traceback" not in other.log
        with connected(daemon) as client:
            assert client.put(client.open_namespace(), chain(1, 4), durable=True) == 4
    with other, connected(other) as client:
        assert client.status().state == "serving"
        begun = time.monotonic()
        assert client.read(client.open_namespace(), chain(1, 4)) in (0, 4)
        assert time.monotonic() - begun < SOON_S
