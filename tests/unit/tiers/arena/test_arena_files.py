"""An arena's place, kind of memory and size; and the files of its segments, made in advance."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd import failpoint
from tierd.core.formats.model import TierKind, TierSpec
from tierd.errors import ConfigError, TierFailed
from tierd.linux.mapping import address_of
from tierd.tiers.arena import arena_files
from tierd.tiers.arena.arena import Arena
from tierd.tiers.arena.arena_files import (
    ArenaPlace,
    Mount,
    Touch,
    check_room,
    choose_place,
    find_memory_limit,
    read_mounts,
)
from tierd.tiers.arena.data_files import DataFiles

MIB = 1 << 20
SOON_S = 10.0
SPEC = TierSpec(TierKind.HOST, 0, 4 * MIB, MIB, writer_owned=True)


def test_capacity_beyond_the_control_group_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena above the control group's memory limit is refused, even if the file system could hold it."""
    monkeypatch.setattr(arena_files, "find_memory_limit", lambda: 3 * MIB)
    place = choose_place(SPEC, instance="t", arena_dir=str(directory))
    with pytest.raises(ConfigError, match=r"4 MiB is above the 3 MiB .*control group"):
        check_room(SPEC, place=place, held_bytes=0)
    monkeypatch.setattr(arena_files, "find_memory_limit", lambda: 4 * MIB)
    check_room(SPEC, place=place, held_bytes=0)


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b", {"a/memory.max": "5000", "a/b/memory.max": "70"}, 70),
        ("0::/gone", {"memory.max": "8000"}, 8000),
        (
            "4:cpu,memory:/c",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/c/memory.limit_in_bytes": "44"},
            44,
        ),
        ("4:cpu:/c", {"memory/c/memory.limit_in_bytes": "44"}, None),
        ("0::/", {}, None),
    ],
)
def test_memory_limit_is_the_least_on_the_way_up(
    tmp_path: Path, line: str, files: dict[str, str], limit: int | None
) -> None:
    """The lookup reads the limit of either version of control groups, in the group or any group above."""
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    (tmp_path / "cgroup").write_text(line + "\n")
    assert find_memory_limit(tmp_path / "cgroup", tmp_path / "fs") == limit


# -- place


@pytest.mark.parametrize(
    ("path", "mode"),
    [("/dev/shm/x", "tmpfs"), ("/mnt/huge/x", "tmpfs-huge"), ("/mnt/pages", "hugetlbfs"), ("/var/x", "file")],
)
def test_mode_is_that_of_the_deepest_mount(tmp_path: Path, path: str, mode: str) -> None:
    """The kind of memory is that of the mount that contains the directory."""
    (tmp_path / "mounts").write_text(
        "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid 0 0\ntmpfs /mnt/huge tmpfs rw,huge=always 0 0\n"
        "none /mnt/pages hugetlbfs rw,pagesize=2M 0 0\n"
    )
    mounts = list(read_mounts(tmp_path / "mounts"))
    assert Mount(Path("/dev/shm"), "tmpfs", frozenset({"rw", "nosuid"})) in mounts
    assert arena_files._mode_of(Path(path), mounts) == mode


@pytest.mark.parametrize("instance", ["", "..", "a/b", ".hidden", "x" * 65])
def test_instance_is_no_path(directory: Path, instance: str) -> None:
    """An instance name that could escape the base directory is refused."""
    with pytest.raises(ConfigError, match="instance"):
        choose_place(SPEC, instance=instance, arena_dir=str(directory))


def test_missing_arena_dir_is_refused(directory: Path) -> None:
    """A base directory that does not exist is refused, not created: the operator meant a mount."""
    with pytest.raises(ConfigError, match=r"arena_dir.*no directory"):
        choose_place(SPEC, instance="t", arena_dir=str(directory / "absent"))


def test_arena_in_reach_of_others_is_refused(directory: Path) -> None:
    """A base that others may write to without the sticky bit is refused: they could swap the arena."""
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        choose_place(SPEC, instance="t", arena_dir=str(directory))


async def test_file_system_that_is_no_memory_is_said(tmp_path: Path) -> None:
    """An arena on a disk works, and its notice names the remedy."""
    if arena_files._mode_of(tmp_path, list(read_mounts())) != "file":
        pytest.skip("the temporary directory is in memory")
    arena = Arena(SPEC, position=0, instance="t", arena_dir=str(tmp_path))
    await arena.open()
    assert arena.mode == "file" and any("set arena_dir to a tmpfs" in n for n in arena.notices)
    await arena.close(release=True)


@pytest.mark.parametrize(
    ("mode", "share", "said"), [("tmpfs", None, 0), ("hugetlbfs", 1.0, 0), ("tmpfs", 0.5, 1), ("file", 1.0, 1)]
)
def test_good_news_is_no_notice(tmp_path: Path, mode: str, share: float | None, said: int) -> None:
    """An arena without a known shortcoming gives no notice."""
    place = ArenaPlace(tmp_path, tmp_path, mode)
    touch = None if share is None else Touch(4e9, share)
    assert len(arena_files.shortcomings(SPEC, place, touch)) == said


# -- data files


def test_takers_share_what_is_in_the_making(tmp_path: Path) -> None:
    """Any number of requests make no more files than the tier has places, and each gets its own."""
    files = DataFiles(tmp_path, segment_bytes=MIB, places=8)
    files.start()
    views = [files.take(number) for number in range(8)]
    assert len({address_of(v) for v in views}) == 8 and len(list(tmp_path.iterdir())) == 8
    with pytest.raises(TierFailed, match="every file"):
        files.take(99)
    files.discard(3)
    assert files.take(99).nbytes == MIB
    files.stop()


def test_half_made_spares_are_not_taken_over(tmp_path: Path) -> None:
    """A start removes a spare file that is partly allocated or beyond the capacity."""
    first = DataFiles(tmp_path, segment_bytes=MIB, places=3)
    first.start()
    first._thread.join()
    first.stop()
    torn = next(tmp_path.glob("spare-*"))
    os.truncate(torn, 0)
    os.truncate(torn, MIB)
    second = DataFiles(tmp_path, segment_bytes=MIB, places=1)
    second.adopt_spares()
    assert second.spares == 1 and len(list(tmp_path.iterdir())) == 1 and not torn.exists()


@contextlib.contextmanager
def held_up(point: str = "arena.spare.before_file") -> Iterator[threading.Event]:
    """The spare thread waits at this point until the event is set."""
    go_on = threading.Event()

    def see(name: str) -> None:
        if name == point and threading.current_thread().name == "tierd-spares":
            assert go_on.wait(SOON_S)

    failpoint.watch(see)
    try:
        yield go_on
    finally:
        failpoint.watch(None)
        go_on.set()


def test_progress_is_told_to_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unready bytes count down from the whole capacity, within a file too. A file that a caller
    takes meanwhile counts."""
    files = DataFiles(tmp_path, segment_bytes=8 * MIB, places=3)
    assert (files.unready_bytes, files.idle_reason) == (24 * MIB, "")
    allocate, seen = os.posix_fallocate, list[tuple[str, int]]()

    def noted(fd: int, start: int, length: int) -> None:
        if length == 2 * MIB:  # a step, not the first allocation of its huge page
            seen.append((threading.current_thread().name, files.unready_bytes))
        allocate(fd, start, length)

    with held_up() as go_on:
        files.start()
        files.take(1)
        assert (files.unready_bytes, files.idle_reason) == (16 * MIB, "")
        monkeypatch.setattr(os, "posix_fallocate", noted)
        go_on.set()
        files._thread.join()
    assert seen == [("tierd-spares", left * MIB) for left in range(16, 0, -2)]
    assert (files.unready_bytes, files.idle_reason) == (0, "")
    files.discard(1)
    assert files.unready_bytes == 8 * MIB and "were dropped" in files.idle_reason
    files.stop()


def test_a_background_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """When no spare file can be made, the reason is reported; a caller gets a file once there is room."""
    files = DataFiles(tmp_path, segment_bytes=8 * MIB, places=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
    try:
        files.start()
        files._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in files.idle_reason and files.unready_bytes == 16 * MIB
    assert not list(tmp_path.iterdir())
    assert files.take(1).nbytes == 8 * MIB
    files.stop()


def test_the_background_gives_way(tmp_path: Path) -> None:
    """The thread that makes spare files has a lower priority than the process's other threads."""
    files = DataFiles(tmp_path, segment_bytes=MIB, places=1)
    with held_up():
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        failpoint.arm("arena.spare.before_file", "count")
        try:
            files.start()
            assert failpoint.await_hits("arena.spare.before_file", count=1, timeout_s=SOON_S)
        finally:
            failpoint.disarm()
        (maker,) = [thread for thread in threading.enumerate() if thread.name == "tierd-spares"]
        assert maker.native_id is not None
        assert os.getpriority(os.PRIO_PROCESS, maker.native_id) == min(19, own + 10)
    files.stop()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_file_found_whole_is_not_allocated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    """A start does not allocate a whole file again; it allocates a file with a hole before any mapping."""
    path = tmp_path / "7.data"
    path.write_bytes(bytes(MIB if is_whole else 4096))
    os.truncate(path, MIB)
    calls, allocate = list[int](), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: (calls.append(given[2]), allocate(*given)))
    files = DataFiles(tmp_path, segment_bytes=MIB, places=1)
    assert files.adopt(7).nbytes == MIB
    assert calls == ([] if is_whole else [MIB])
    assert path.stat().st_blocks * 512 >= MIB
