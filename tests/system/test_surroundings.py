"""Disturbances around the daemon: eviction during puts, full disks and memory, removed files."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.system.blocks import await_true, connected
from tests.system.sdk import SMALL, right
from tests.system.tcp import free_port, remote_config
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client
from tierd.core.formats.model import BlockStatus
from tierd.errors import Unavailable
from tierd.testing import chain, content_of

PUTS = 40
STORED = """\
[[host]]
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "1 MiB"
"""


@pytest.mark.parametrize("is_remote", [False, True], ids=["mapped", "tcp"])
def test_durable_put_beside_eviction(tmp_path: Path, *, is_remote: bool) -> None:
    """A durable put of existing blocks that are evicted during the put stores them again; none is FAILED."""
    port = free_port()
    config, begun, over = remote_config(tmp_path, port, host=STORED), threading.Semaphore(0), threading.Event()
    with Daemon(config) as daemon, connected(daemon) as operator:
        target = f"127.0.0.1:{port}" if is_remote else daemon.target

        def evict() -> None:
            for i in itertools.count():
                begun.acquire(timeout=60)
                if over.is_set():
                    return
                threading.Event().wait(0.002 * (i % 10))  # at a different moment of each put
                operator.call(operator.admin.Evict, apb.EvictRequest())

        beside = threading.Thread(target=evict)
        with Client(target, credential_file=str(tmp_path / "secret") if is_remote else "") as client:
            namespace, hashes = client.open_namespace(SMALL), chain(1, 64)
            blocks = [content_of(name, SMALL.block_bytes) for name in hashes]
            results = list[np.ndarray]()
            beside.start()
            try:
                while len(results) < PUTS or ("blocks not made durable" not in daemon.log and len(results) < 10 * PUTS):
                    begun.release()
                    results.append(client.put(namespace, hashes, blocks, durable=True).statuses)
            finally:
                over.set()
                begun.release()
                beside.join()
        statuses = np.concatenate(results)
        assert not (statuses == BlockStatus.FAILED).sum()
        assert "blocks not made durable" in daemon.log, "no block went meanwhile: this test shows nothing"


# -- space


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A separate file system."""
    path.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounts a small file system, which takes root and the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


def fill(path: Path) -> None:
    """Fills the remaining space, as other processes might."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def used(path: Path) -> int:
    """Bytes used on that file system."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("capacity", ["48 MiB", "63 MiB", "90 GiB", "900 TiB"])
def test_store_above_its_disk(tmp_path: Path, capacity: str) -> None:
    """A store too large for its disk is refused by name with both sizes; other space is given back."""
    with small_disk(tmp_path / "disk", "64m") as disk:
        (disk / "others").write_bytes(bytes(4 << 20))
        before = used(disk)
        two = f"""[[host]]\ncapacity = "8 MiB"\nsegment = "1 MiB"\n[[nvme]]\npath = "{disk}/a"\ncapacity = "16 MiB"\nsegment = "1 MiB"
[[nvme]]\npath = "{disk}/b"\ncapacity = "{capacity}"\n"""
        daemon = Daemon(two, root=tmp_path)
        with pytest.raises(Unavailable) as told:
            daemon.start()
        assert "nvme.1.capacity: " in str(told.value) and "are free there" in str(told.value)
        assert used(disk) - before < 1 << 20, "what was set aside stays"
        assert not list(daemon.arena.rglob("*.data"))
        assert "Traceback" not in daemon.log


def test_full_disk(tmp_path: Path) -> None:
    """With a full disk at start, stored blocks are served and durable puts fail; free space restores all."""
    with small_disk(tmp_path / "disk", "24m") as disk:
        config = STORED.replace("[[nvme]]", f'[[nvme]]\npath = "{disk}/store"')
        with Daemon(config, root=tmp_path) as daemon:
            with Client(daemon.target) as client:
                assert put(client, 1, durable=True)
            daemon.kill()
            fill(disk / "others")
            daemon.start()
            with Client(daemon.target) as client, connected(daemon) as operator:
                await_true(lambda: "free space" in operator.tiers()["nvme.0"].trouble, "the store out of service")
                assert get(client, 1) == COUNT
                assert not put(client, 2, durable=True)
                assert put(client, 3, durable=False) and get(client, 3) == COUNT
                (disk / "others").unlink()
                await_true(lambda: not operator.tiers()["nvme.0"].trouble, "the store in service")
                assert put(client, 2, durable=True)
            daemon.kill()
            shutil.rmtree(next(daemon.arena.glob("tierd-*")))
            daemon.start()
            with Client(daemon.target) as client:
                assert [get(client, seed) for seed in (1, 2)] == [COUNT, COUNT]


def test_memory_filled_by_others(tmp_path: Path) -> None:
    """If others fill the memory file system, puts evict cold blocks; the daemon uses memory freed later."""
    with small_disk(tmp_path / "memory", "40m") as memory:
        config = f'[[host]]\narena_dir = "{memory}"\ncapacity = "32 MiB"\nsegment = "1 MiB"\n'
        with Daemon(config, root=tmp_path) as daemon, connected(daemon) as operator:
            await_true(lambda: len(list(memory.rglob("spare-*"))) == 32, "all memory made ahead")
            for path in sorted(memory.rglob("spare-*"))[:-4]:
                path.unlink()  # as if the daemon had yet to make them
            with Client(daemon.target) as client, Client(daemon.target) as other:
                assert put(client, 1, durable=False) and operator.open_namespace()
                fill(memory / "others")
                for seed in range(1, 41):
                    assert put(client, seed, durable=False)
                    fill(memory / f"more-{seed}")
                assert get(client, 40) == COUNT
                put(other, 77, durable=False)  # needs new files, so NO_ROOM while others map the old ones
                assert get(client, 77) in (0, COUNT)
                for path in [memory / "others", *memory.glob("more-*")]:
                    path.unlink()
                await_true(lambda: holds(client, range(100, 200)), "more memory in use")


def holds(client: Client, seeds: range) -> bool:
    """Whether memory holds chains of 12.5 MiB at one time."""
    assert all(put(client, seed, durable=False) for seed in seeds)
    return get(client, seeds[0]) == COUNT


COUNT = 32


def put(client: Client, seed: int, *, durable: bool) -> bool:
    """Puts a chain of self-identifying blocks. Returns whether all are stored."""
    hashes = chain(seed, COUNT)
    blocks = [content_of(name, SMALL.block_bytes) for name in hashes]
    return bool(client.put(client.open_namespace(SMALL), hashes, blocks, durable=durable))


def get(client: Client, seed: int) -> int:
    """The number of blocks of the chain that are served, all of them right."""
    got = client.get(client.open_namespace(SMALL), chain(seed, COUNT))
    assert right(got.views, seed) == got.blocks
    return got.blocks


# -- files


@pytest.mark.parametrize("what", ["all", "data", "catalogues", "cut"])
def test_arena_taken_away(tmp_path: Path, what: str) -> None:
    """A daemon whose arena is removed or truncated ends and says why; after a restart no byte is wrong."""
    with Daemon(STORED, root=tmp_path) as daemon:
        with Client(daemon.target) as client:
            assert put(client, 1, durable=False)
            files = list(daemon.arena.rglob("*.data" if what != "catalogues" else "*.cat*"))
            assert files
            if what == "all":
                shutil.rmtree(next(daemon.arena.glob("tierd-*")))
            for path in files if what != "all" else ():
                os.truncate(path, 4096) if what == "cut" else path.unlink()
            await_true(lambda: daemon.has_ended, "its end")
        assert daemon.await_end() == 1
        assert "while the daemon ran" in daemon.log
        daemon.start()
        with Client(daemon.target) as client:
            assert get(client, 1) in (0, COUNT)
            assert put(client, 1, durable=True) and get(client, 1) == COUNT


def test_spare_files_taken_away(tmp_path: Path) -> None:
    """Removed or truncated spare files are made again: every put is stored."""
    with Daemon(STORED, root=tmp_path) as daemon, Client(daemon.target) as client:
        for i, path in enumerate(daemon.arena.rglob("spare-*.data")):
            os.truncate(path, 0) if i % 2 else path.unlink()
        assert all(put(client, seed, durable=False) for seed in range(1, 40))
        assert get(client, 39) == COUNT


@pytest.mark.parametrize("what", ["store", "slots", "journal", "snapshot", "moved"])
def test_store_taken_away(tmp_path: Path, what: str) -> None:
    """After a store file is removed, durable puts fail with the cause; a moved store serves on its return."""
    with Daemon(STORED, root=tmp_path) as daemon, Client(daemon.target) as client, connected(daemon) as operator:
        assert put(client, 1, durable=True)
        store = tmp_path / "state" / "nvme-0"
        if what == "moved":
            store.rename(tmp_path / "elsewhere")
        for path in () if what == "moved" else store.glob({"store": "*", "slots": "seg-*"}.get(what, f"{what}-*")):
            path.unlink()
        if what != "snapshot":
            assert not put(client, 2, durable=True), "the put that comes first is told that it is durable"
        await_true(
            lambda: "removed while the daemon ran" in operator.tiers()["nvme.0"].trouble, "the store out of service"
        )
        assert not put(client, 1, durable=True)
        assert put(client, 3, durable=False) and get(client, 3) == COUNT
        if what == "moved":
            (tmp_path / "elsewhere").rename(store)
            await_true(lambda: not operator.tiers()["nvme.0"].trouble, "the store in service")
            assert put(client, 2, durable=True)


@pytest.mark.parametrize("what", ["journal", "snapshot", "slots"])
def test_store_lost_between_starts(tmp_path: Path, what: str) -> None:
    """If a journal, snapshot or slot file is missing, fsck and the start report it, and the store serves."""
    with Daemon(STORED, root=tmp_path) as daemon:
        with Client(daemon.target) as client:
            assert put(client, 1, durable=True)
        daemon.kill()
        for path in (tmp_path / "state" / "nvme-0").glob("seg-*" if what == "slots" else f"{what}-*"):
            path.unlink()
        shutil.rmtree(next(daemon.arena.glob("tierd-*")))
        command = [sys.executable, "-m", "tierd.cli.ctl", "fsck", "--config", str(tmp_path / "tierd.toml")]
        said = subprocess.run(command, capture_output=True, text=True, check=False, env=daemon._env, timeout=60)
        if what != "snapshot":  # the snapshot is empty, so the journal has everything
            assert said.returncode == 1 and f"{COUNT} " in said.stdout, said
        daemon.start()
        with Client(daemon.target) as client, connected(daemon) as operator:
            assert get(client, 1) == (COUNT if what == "snapshot" else 0)
            notices = operator.call(operator.admin.Status, apb.StatusRequest()).notices
            assert any(
                ("they are dropped" if what == "slots" else f"no {what} beside slots") in told for told in notices
            )
            assert not operator.tiers()["nvme.0"].trouble
            assert put(client, 2, durable=True)
