"""Stores and instances that are not to be had: dead disks, directories that belong to another daemon."""

from __future__ import annotations

import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import SOON_S, BlockClient, await_true, connected
from tests.system.test_restart import wipe_arena
from tierd._proto import admin_pb2 as apb
from tierd.errors import Unavailable
from tierd.testing import Daemon, chain

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
SYNCS = "fdatasync,fsync"
WRITES = SYNCS + ",pwritev,pwritev2,pwrite64,write"
READS = "preadv,preadv2,pread64"
CHAINS = 24
"""Of one block each: about half of them on either store."""


@contextmanager
def failing(pid: int, directory: Path, calls: str) -> Iterator[None]:
    """Makes these system calls of a process fail with EIO on the files of a directory: a disk that dies under it."""
    if shutil.which("strace") is None:
        pytest.skip("strace, which makes a disk fail, is not installed")
    paths = [argument for path in [directory, *directory.iterdir()] for argument in ("-P", str(path))]
    tracer = subprocess.Popen(
        [
            "strace",
            "-f",
            "-o",
            "/dev/null",
            *paths,
            "-e",
            f"trace={calls}",
            "-e",
            f"inject={calls}:error=EIO",
            "-p",
            str(pid),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stderr
        ready, _, _ = select.select([tracer.stderr], [], [], SOON_S)
        told = tracer.stderr.readline() if ready else "strace said nothing"
        if "attached" not in told:
            pytest.skip(f"this machine does not let strace attach: {told}")
        yield
    finally:
        tracer.terminate()
        tracer.wait()
        assert tracer.stderr
        tracer.stderr.close()


def _put_single(client: BlockClient, namespace: int, *, seed: int, count: int) -> np.ndarray:
    """Durable chains of one block; which of them were acknowledged."""
    stored = [client.put(namespace, chain(seed + i, 1), durable=True) for i in range(count)]
    return np.array(stored, dtype=bool)


def _stores_of(client: BlockClient, *, seed: int, count: int) -> list[str]:
    """Which store holds each block; empty for none."""
    found = []
    for i in range(count):
        reply = client.call(client.admin.Inspect, apb.InspectRequest(hash=chain(seed + i, 1).tobytes().hex()))
        found.append(next((page.tier for page in reply.pages if page.tier.startswith("nvme")), ""))
    return found


def test_store_dies() -> None:
    """One of two stores dies under the daemon: its blocks are misses, the other's are served, new ones go there, and it is said."""
    with Daemon(TWO_STORES) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        assert _put_single(client, namespace, seed=1000, count=CHAINS).all()
        before = np.array(_stores_of(client, seed=1000, count=CHAINS))
        assert set(before.tolist()) == {"nvme.0", "nvme.1"}
        with failing(daemon.pid, daemon.root / "b", WRITES + "," + READS):
            first = _put_single(client, namespace, seed=2000, count=CHAINS)
            assert not first.all(), "no put noticed that the disk is gone"
            await_true(lambda: not client.tiers()["nvme.1"].serving, "the dead store out of service")
            assert _put_single(client, namespace, seed=3000, count=CHAINS).all()
            assert set(_stores_of(client, seed=3000, count=CHAINS)) == {"nvme.0"}
        tiers = client.tiers()
        assert (tiers["nvme.0"].serving, tiers["nvme.1"].serving, tiers["host.0"].serving) == (True, False, True)
        assert "tier out of service" in daemon.log
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        found = np.array([client.read(namespace, chain(1000 + i, 1)) for i in range(CHAINS)], dtype=bool)
        assert found.tolist() == (before == "nvme.0").tolist()
        acknowledged = np.array([client.read(namespace, chain(2000 + i, 1)) for i in range(CHAINS)], dtype=bool)
        on_b = np.array([s == "nvme.1" for s in _stores_of_or_none(client, seed=2000, count=CHAINS)])
        assert not on_b.any()
        print(
            f"{int(first.sum())} of {CHAINS} puts acknowledged while it died, {int((first & acknowledged).sum())} of them still there"
        )


def _stores_of_or_none(client: BlockClient, *, seed: int, count: int) -> list[str]:
    held = [client.lookup(client.open_namespace(), chain(seed + i, 1)) for i in range(count)]
    return [_stores_of(client, seed=seed + i, count=1)[0] if there else "" for i, there in enumerate(held)]


def test_reads_fail() -> None:
    """A store whose reads fail costs its blocks, one by one, and nothing else; when they succeed again it serves them."""
    with Daemon(TWO_STORES) as daemon, connected(daemon) as client:
        namespace = client.open_namespace()
        assert _put_single(client, namespace, seed=1000, count=CHAINS).all()
        where = np.array(_stores_of(client, seed=1000, count=CHAINS))
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        with failing(daemon.pid, daemon.root / "b", READS):
            found = np.array([client.read(namespace, chain(1000 + i, 1)) for i in range(CHAINS)], dtype=bool)
        assert found.tolist() == (where == "nvme.0").tolist()


def test_dead_store_after_a_restart() -> None:
    """What the living store acknowledged is there after kill -9; what the dead one's files still hold is never wrong."""
    with Daemon(TWO_STORES) as daemon:
        with connected(daemon) as client:
            namespace = client.open_namespace()
            with failing(daemon.pid, daemon.root / "b", SYNCS):
                stored = _put_single(client, namespace, seed=1000, count=CHAINS)
        assert stored.any() and not stored.all()
        daemon.kill()
        wipe_arena(daemon)
        daemon.start()
        with connected(daemon) as client:
            namespace = client.open_namespace()
            found = np.array([client.read(namespace, chain(1000 + i, 1)) for i in range(CHAINS)], dtype=bool)
            assert found[stored].all()
            assert _put_single(client, namespace, seed=5000, count=CHAINS).all(), (
                "a restart puts the store back into service"
            )


def test_second_daemon_on_one_instance() -> None:
    """A second daemon on the same instance exits non-zero, names the holder's process, and the first serves on."""
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
    """A daemon whose store is held by another one refuses to start and names store and holder; it starts when that has gone."""
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
