"""The simulated disk acts as the real one while it has power, and loses only unsynced data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.depth import count
from tests.sim.disk import SECTOR_BYTES, DiskFaults, SimDisk
from tierd.tiers.io.durable import read_file, replace_file, write_fully
from tierd.tiers.io.files import OS, READ_WRITE, Files

HOME = Path("/sim")
NAMES = ("a", "b", "c")
CRASHES = 200


def file_of(disk: Files, path: Path, data: bytes) -> int:
    """A new file with this content, unsynced."""
    fd = disk.open(path, os.O_RDWR | os.O_CREAT)
    write_fully(fd, data, offset=0, disk=disk)
    return fd


def step(disk: Files, home: Path, seed: str) -> object:
    """Runs one operation that follows from the seed, and returns its result."""
    chance = Random(seed)
    path, other = (home / chance.choice(NAMES) for _ in range(2))
    kind = chance.choice(("write", "write", "read", "truncate", "allocate", "rename", "unlink", "replace"))
    if kind == "rename" and path.name in disk.list(home):
        disk.rename(path, other)
    elif kind == "unlink":
        disk.unlink(path)
    elif kind == "replace":
        return replace_file(path, [chance.randbytes(chance.randrange(3000))], disk=disk)
    elif kind in ("write", "read", "truncate", "allocate"):
        fd = disk.open(path, READ_WRITE | os.O_TRUNC * (chance.random() < 0.1))
        offset, data = chance.randrange(3000), chance.randbytes(chance.randrange(1, 2000))
        target = memoryview(bytearray(1500))
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: disk.pwritev(fd, [memoryview(data)[:100], memoryview(data)[100:]], offset),
            "read": lambda: disk.preadv(fd, [target[:700], target[700:]], offset),
            "truncate": lambda: disk.truncate(fd, offset),
            "allocate": lambda: disk.allocate(fd, offset + 1),
        }
        result = calls[kind]()
        disk.close(fd)
        return result, bytes(target)
    return None


def test_it_behaves_as_the_real_one(tmp_path: Path) -> None:
    """The same operations give the same results and files as on the machine's own file system."""
    for seed in range(count(test=20, nightly=300, weekly=1000)):
        home, disk = tmp_path / str(seed), SimDisk()
        home.mkdir()
        for i in range(40):
            assert step(disk, HOME, f"{seed}/{i}") == step(OS, home, f"{seed}/{i}"), (seed, i)
        assert sorted(disk.list(HOME)) == sorted(OS.list(home)), seed
        for name in disk.list(HOME):
            assert disk.get(HOME / name) == (home / name).read_bytes() == bytes(read_file(HOME / name, disk=disk)), seed
            assert disk.size(HOME / name) == OS.size(home / name)


def test_synced_bytes_outlive_every_crash_and_unsynced_ones_some() -> None:
    """A synced file keeps its bytes through a crash; of a later write any sector may be lost."""
    disk = SimDisk()
    old, new = b"o" * 4 * SECTOR_BYTES, b"n" * 2 * SECTOR_BYTES
    fd = file_of(disk, HOME / "a", old)
    disk.sync_data(fd)
    disk.sync_directory(HOME)
    disk.pwritev(fd, [memoryview(new)], SECTOR_BYTES)
    seen = Counter(disk.crashed(Random(i)).get(HOME / "a") for i in range(CRASHES))
    told = {bytes(data[::SECTOR_BYTES]) for data in seen}
    assert all(data == b"".join(bytes([c]) * SECTOR_BYTES for c in data[::SECTOR_BYTES]) for data in seen)
    assert told == {b"oooo", b"onno", b"onoo", b"oono"}
    assert disk.get(HOME / "a") == old[:SECTOR_BYTES] + new + old[-SECTOR_BYTES:], "it goes on as if nothing had been"


def test_names_are_lost_until_their_directory_is_synced() -> None:
    """A synced file can lose its name; an unsynced rename shows the old file or the new one,
    whole."""
    disk = SimDisk()
    disk.sync_data(file_of(disk, HOME / "a", b"old"))
    assert {tuple(disk.crashed(Random(i)).list(HOME)) for i in range(CRASHES)} == {(), ("a",)}
    disk.sync_directory(HOME)
    disk.sync_data(file_of(disk, HOME / "b", b"new"))
    disk.sync_directory(HOME)
    disk.rename(HOME / "b", HOME / "a")
    assert {disk.crashed(Random(i)).get(HOME / "a") for i in range(CRASHES)} == {b"old", b"new"}
    disk.sync_directory(HOME)
    assert {disk.crashed(Random(i)).get(HOME / "a") for i in range(CRASHES)} == {b"new"}


def test_file_that_grew_has_a_length_it_once_had() -> None:
    """After unsynced appends a crash leaves any length on the way, at least the synced one."""
    disk = SimDisk()
    fd = file_of(disk, HOME / "a", b"1" * 1000)
    disk.sync_directory(HOME)
    disk.sync_data(fd)
    write_fully(fd, b"2" * 1000, offset=1000, disk=disk)
    write_fully(fd, b"3" * 1000, offset=2000, disk=disk)
    found = [disk.crashed(Random(i)).get(HOME / "a") for i in range(CRASHES)]
    assert {len(data) for data in found} == {1000, 2000, 3000}
    assert all(data[:1000] == b"1" * 1000 and set(data[1000:2000]) <= {0, ord("2")} for data in found)


def test_the_same_seed_gives_the_same_crash() -> None:
    """Two disks with one history and one seed crash to the same bytes."""
    disks = [SimDisk(), SimDisk()]
    for disk in disks:
        for i in range(60):
            step(disk, HOME, f"same/{i}")
        disk.crash(Random(5))
    one, other = ({name: disk.get(HOME / name) for name in disk.list(HOME)} for disk in disks)
    assert one == other


def test_descriptors_and_locks_end_with_the_process() -> None:
    """After a crash or a process's end an old descriptor is refused, and the lock is free."""
    disk = SimDisk()
    for end in (disk.end_process, lambda: disk.crash(Random(1))):
        disk.lock(HOME / "lock", what="store")
        fd = file_of(disk, HOME / "a", b"x")
        end()
        with pytest.raises(OSError, match="not open"):
            disk.pwritev(fd, [memoryview(b"y")], 0)
        disk.lock(HOME / "lock", what="store").release()


@pytest.mark.parametrize("fault", [name for name in DiskFaults.__slots__ if name != "names"])
def test_every_fault_strikes_where_it_should(fault: str) -> None:
    """At chance 1 each fault strikes its own call, only files of its names, and is counted."""
    disk = SimDisk(Random(1))
    fds = [file_of(disk, HOME / name, b"0" * 16_384) for name in ("hit", "spared")]
    for fd in fds:
        disk.pwritev(fd, [memoryview(b"1" * 8192)], 4096)
        disk.sync_data(fd)
    disk.faults = DiskFaults(names="h*", **{fault: 1.0})
    assert outcome(disk, fds[1]) == (True, 8192, b"2" * 8192)
    assert outcome(disk, fds[0]) != (True, 8192, b"2" * 8192)
    assert disk.hits[fault] > 0
    assert sum(disk.hits.values()) == disk.hits[fault]


def outcome(disk: SimDisk, fd: int) -> object:
    """Whether two pages were written, read and synced; the count and the bytes that were read."""
    target = memoryview(bytearray(8192))
    try:
        disk.pwritev(fd, [memoryview(b"2" * 8192)], 4096)
        came = disk.preadv(fd, [target], 4096)
        disk.sync_data(fd)
    except OSError:
        return False
    return True, came, bytes(target)


def test_sync_that_failed_may_have_dropped_what_can_still_be_read() -> None:
    """After a failed sync bytes can be read and the next sync succeeds, yet a crash may lose
    them."""
    lost = 0
    for seed in range(20):
        disk = SimDisk(Random(seed))
        fd = file_of(disk, HOME / "a", b"bytes")
        disk.sync_directory(HOME)
        disk.faults = DiskFaults(failed_sync=1.0)
        with pytest.raises(OSError, match="sync failed"):
            disk.sync_data(fd)
        disk.faults = DiskFaults()
        disk.sync_data(fd)
        assert disk.get(HOME / "a") == b"bytes"
        disk.crash(Random(seed))
        lost += disk.get(HOME / "a") != b"bytes"
    assert 0 < lost < 20
