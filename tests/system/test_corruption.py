"""Flipped bits on disk or in memory give a miss, a count and a log line, never wrong bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.depth import count
from tests.system.blocks import BlockClient, connected
from tests.system.test_restart import wipe_arena
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.errors import Unavailable
from tierd.testing import chain, content_of
from tierd.tiers.store.slots import HEADER_BYTES

CONFIG = """\
[server]
shutdown_deadline = "2 s"

[[host]]
capacity = "8 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
"""
NAMES = chain(1, 8)
BAD = 3
"""Index of the damaged block in NAMES."""
LENGTH = 64 << 10


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon for one test."""
    with Daemon(CONFIG) as running:
        yield running


def _namespace(client: BlockClient) -> int:
    return client.open_namespace(block_bytes=LENGTH)


def _put(daemon: Daemon, *, durable: bool) -> None:
    with connected(daemon) as client:
        assert client.put(_namespace(client), NAMES, length=LENGTH, durable=durable) == len(NAMES)


def _read(daemon: Daemon) -> int:
    """The number of blocks that a get gives, every byte compared. The daemon must still serve."""
    with connected(daemon) as client:
        found = client.read(_namespace(client), NAMES)
        assert client.status().state == "serving"
        return found


def _corrupt(daemon: Daemon, tier: str) -> int:
    with connected(daemon) as client:
        return client.counter(f'tierd_corrupt_total{{tier="{tier}"}}')


def flip(directory: Path, block: int, *, shift: int) -> None:
    """Flips one bit at `shift` from the start of a block's bytes, in the one file that holds them."""
    start = content_of(NAMES[block], LENGTH)[:64].tobytes()
    found = [
        (path, at) for path in directory.rglob("*") if path.is_file() and (at := path.read_bytes().find(start)) >= 0
    ]
    assert len(found) == 1, f"block {block} lies in {found}"
    path, at = found[0]
    flip_bit(path, at + shift)


def flip_bit(path: Path, at: int) -> None:
    """Flips through the file, so that every process that maps it sees the change."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x10]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


PLACES = [100, LENGTH - 1]
HEADER_PLACES = [-HEADER_BYTES, -HEADER_BYTES + 100, -HEADER_BYTES + 256]


@pytest.mark.parametrize("shift", PLACES + HEADER_PLACES)
def test_store_slot(daemon: Daemon, shift: int) -> None:
    """A flipped bit in a slot's payload or header is a counted miss from that block on. A new put
    repairs it."""
    _put(daemon, durable=True)
    daemon.kill()
    wipe_arena(daemon)
    flip(daemon.root / "state", BAD, shift=shift)
    daemon.start()
    assert _read(daemon) == BAD
    assert _corrupt(daemon, "nvme.0") == 1
    _put(daemon, durable=True)
    assert _read(daemon) == len(NAMES)


@pytest.mark.parametrize("shift", PLACES)
@pytest.mark.parametrize("is_up", [False, True], ids=["down", "up"])
def test_arena(daemon: Daemon, shift: int, is_up: bool) -> None:
    """An arena bit flipped before or after the daemon's start is a counted miss at the first hit."""
    _put(daemon, durable=False)
    daemon.kill()
    if is_up:
        daemon.start()
    flip(daemon.arena, BAD, shift=shift)
    if not is_up:
        daemon.start()
    assert _read(daemon) == BAD
    assert _corrupt(daemon, "host.0") == 1
    _put(daemon, durable=False)
    assert _read(daemon) == len(NAMES)


def test_arena_with_a_far_copy(daemon: Daemon) -> None:
    """A get that detects a bad memory copy serves the block from its store."""
    _put(daemon, durable=True)
    daemon.kill()
    flip(daemon.arena, BAD, shift=5)
    daemon.start()
    assert _read(daemon) == len(NAMES)
    assert _corrupt(daemon, "host.0") == 1


def test_both_copies(daemon: Daemon) -> None:
    """One get detects a block bad in memory and in the store; a new put makes it whole."""
    _put(daemon, durable=True)
    daemon.kill()
    flip(daemon.arena, BAD, shift=5)
    flip(daemon.root / "state", BAD, shift=5)
    daemon.start()
    assert _read(daemon) == BAD
    assert [_corrupt(daemon, tier) for tier in ("host.0", "nvme.0")] == [1, 1]
    _put(daemon, durable=True)
    assert _read(daemon) == len(NAMES)


def test_bad_memory_does_not_reach_the_store(daemon: Daemon) -> None:
    """A page that went bad in memory is never written to the store: its block is a miss there."""
    _put(daemon, durable=False)
    daemon.kill()
    flip(daemon.arena, BAD, shift=5)
    daemon.start()
    with connected(daemon) as client:
        client.call(client.admin.Flush, apb.FlushRequest())
    daemon.kill()
    wipe_arena(daemon)
    daemon.start()
    assert _read(daemon) == BAD


@pytest.mark.parametrize("seed", range(count(test=6, nightly=6, weekly=60)))
def test_noise(daemon: Daemon, seed: int) -> None:
    """After random flips the next daemon serves committed bytes and misses, or refuses to start
    with a reason."""
    _put(daemon, durable=seed % 2 == 0)
    daemon.stop() if seed % 4 < 2 else daemon.kill()
    chance = random.Random(seed)
    files = [
        p
        for d in (daemon.root / "state", daemon.arena)
        for p in sorted(d.rglob("*"))
        if p.is_file() and p.stat().st_size
    ]
    for path in chance.sample(files, len(files) // 3):
        if path.suffix != ".lock":
            used = _used_bytes(path)
            for _ in range(4):
                flip_bit(path, chance.randrange(used))
    if _starts(daemon):
        print("served", _read(daemon), "of", len(NAMES))
        assert "call failed" not in daemon.log, daemon.log
    else:
        reason = daemon.log.splitlines()[-1]
        print("refused:", reason)
        assert reason.startswith("tierd: "), daemon.log


def _starts(daemon: Daemon) -> bool:
    try:
        daemon.start()
    except Unavailable:
        return False
    return True


def _used_bytes(path: Path) -> int:
    """Bytes up to the last one that is not zero."""
    used = np.flatnonzero(np.fromfile(path, dtype=np.uint8))
    return int(used[-1]) + 1 if len(used) else 1


@pytest.mark.parametrize("lost", ["nvme-0", "arena", "namespaces.jsonl"])
def test_lost_files(daemon: Daemon, lost: str) -> None:
    """A daemon without its store, its arena or its list of namespaces starts and serves every block."""
    _put(daemon, durable=True)
    daemon.kill()
    if lost == "arena":
        wipe_arena(daemon)
    elif lost == "nvme-0":
        shutil.rmtree(daemon.root / "state" / lost)
    else:
        (daemon.root / "state" / lost).unlink()
    daemon.start()
    assert _read(daemon) == len(NAMES)
