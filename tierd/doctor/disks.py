"""The disks of the stores: space, direct I/O, kind, wear and speed."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tierd.config import Config, NvmeConfig
from tierd.doctor.check import Check, Host, amount, existing, unwritable
from tierd.tiers.drives.drives import Machine, drives_under
from tierd.tiers.io.files import READ_WRITE
from tierd.tiers.store.slots import allows_direct
from tierd.tiers.store.store_files import INDEX_SHARE

MEASURED_BYTES = 64 << 20
PIECE_BYTES = 2 << 20
MEASURED_S = 2.0
"""Time limit of the reads of a measurement, and of its writes."""
SLOW_BYTES_PER_S = 1e9
TOKEN_BYTES = 131_072
"""Of Llama-3-8B in bfloat16; an A100 computes about 10,000 of its tokens a second, an H100 30,000."""
WORN_PERCENT = 95
VIRTUAL = ("vd", "xvd")
"""Names of a hypervisor's disks, which may call themselves rotational on any drive."""


def check_disks(config: Config, host: Host, *, measure: bool, show: Callable[[str], None]) -> Iterator[Check]:
    """All checks of this module. measure: write and read 64 MiB in each store's directory."""
    wanted: Counter[int] = Counter()
    for index, store in enumerate(config.nvme):
        name, there = f"nvme.{index}", existing(Path(store.path))
        if fault := unwritable(f"{name}.path", f"{name}.path", there):
            yield fault
            continue
        device = os.stat(there).st_dev
        yield check_space(name, store, there, others=wanted[device])
        wanted[device] += sum(missing_of(store))
        try:
            yield check_direct(name, store, there)
        except OSError as error:
            yield Check(
                f"{name}.path",
                "failure",
                f"{there} takes no file: {error.strerror}",
                "`tierd serve` cannot start",
                f"set {name}.path to a directory on a disk",
            )
            continue
        yield from check_drives(name, there, Machine(host.at("/sys"), host.at("/proc/self/mountinfo")))
        if measure:
            show(f"reading from {there}")
            yield check_speed(name, there)


def missing_of(store: NvmeConfig) -> tuple[int, int]:
    """Bytes that the store's files and its index still want; those that exist are not wanted again."""
    held = sum(os.stat(path).st_blocks * 512 for path in Path(store.path).glob("seg-*.slots"))
    missing = max(0, store.capacity - held)
    return missing, store.capacity // INDEX_SHARE if missing else 0


def check_space(name: str, store: NvmeConfig, there: Path, *, others: int = 0) -> Check:
    """Free space for the store's files. others: bytes that stores before it want there."""
    room, (missing, index) = os.statvfs(there), missing_of(store)
    free = max(0, room.f_bavail * room.f_frsize - others)
    found = f"{amount(missing)} and {amount(index)} of index wanted in {there}, {amount(free)} are free"
    found += f" beside the {amount(others)} of stores before it" if others else ""
    if missing + index > free:
        return Check(
            f"{name}.space",
            "failure",
            found,
            "`tierd serve` cannot start",
            f"free space there, lower {name}.capacity, or set {name}.path",
        )
    return Check(f"{name}.space", "ok", found)


def check_direct(name: str, store: NvmeConfig, there: Path) -> Check:
    """O_DIRECT, by a file that is removed again."""
    with tempfile.TemporaryDirectory(prefix=".tierd-doctor-", dir=there) as scratch:
        is_direct = allows_direct(Path(scratch))
    check = f"{name}.direct"
    if is_direct or store.direct == "off":
        return Check(check, "ok", "O_DIRECT works" if is_direct else "not asked for (direct = off)")
    return Check(
        check,
        "failure" if store.direct == "on" else "warning",
        f"the file system of {there} refuses O_DIRECT",
        "`tierd serve` cannot start" if store.direct == "on" else "every block takes memory of the page cache too",
        f"put {name}.path on ext4 or xfs",
    )


def check_drives(name: str, there: Path, machine: Machine) -> Iterator[Check]:
    """The drives under a store: their kind, wear and own warnings."""
    check = f"{name}.drive"
    for drive in drives_under(there, machine):
        label = f"{drive.device} {drive.model}".strip() or str(there)
        if drive.rotational and not Path(drive.device).name.startswith(VIRTUAL):
            yield Check(
                check,
                "warning",
                f"{label} is rotational",
                "a load takes tens of milliseconds a block; most are slower than computing",
                f"set {name}.path to an NVMe drive",
            )
        elif drive.smart is None:
            yield Check(check, "skipped", drive.trouble)
        elif drive.smart.warning or drive.smart.percentage_used >= WORN_PERCENT:
            yield Check(
                check,
                "warning",
                f"{label}: {drive.smart.percentage_used} % of its endurance used, warning bits {drive.smart.warning:#x}",
                "the drive may turn read-only or fail; its blocks become misses",
                "replace the drive; `tierctl wear` shows what wrote to it",
            )
        else:
            yield Check(check, "ok", f"{label}: {drive.smart.percentage_used} % of its endurance used")


def check_speed(name: str, there: Path) -> Check:
    """Reads of 2 MiB, one after another, from a file of 64 MiB that is removed again."""
    try:
        return judge_speed(f"{name}.speed", read_speed(there))
    except OSError as error:
        return Check(f"{name}.speed", "skipped", f"not measured in {there}: {error.strerror}")


def judge_speed(check: str, speed: float) -> Check:
    """speed: bytes a second."""
    tokens = speed / TOKEN_BYTES
    found = f"{speed / 1e9:.2f} GB/s by single reads of 2 MiB: {tokens:,.0f} tokens of Llama-3-8B a second"
    if speed < SLOW_BYTES_PER_S:
        return Check(
            check,
            "warning",
            found,
            "a GPU computes as many or more, so loads save little or no time",
            "use a faster drive, or several stores; engines compute what would load too slowly",
        )
    return Check(check, "ok", found)


def read_speed(there: Path) -> float:
    """Bytes a second. Raises OSError."""
    piece = mmap.mmap(-1, PIECE_BYTES)
    with tempfile.TemporaryDirectory(prefix=".tierd-doctor-", dir=there) as scratch:
        flags = READ_WRITE | (os.O_DIRECT if allows_direct(Path(scratch)) else 0)
        fd = os.open(os.path.join(scratch, "speed"), flags, 0o600)
        try:
            written = _timed(lambda at: os.pwrite(fd, piece, at), MEASURED_BYTES)[0]
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            count, seconds = _timed(lambda at: os.preadv(fd, [piece], at), written)
        finally:
            os.close(fd)
    return count / seconds


def _timed(move: Callable[[int], int], limit: int) -> tuple[int, float]:
    """Moves pieces up to this many bytes, or until time is over: bytes and seconds."""
    started, done = time.monotonic(), 0
    while done < limit and (not done or time.monotonic() - started < MEASURED_S):
        done += move(done)
    return done, max(time.monotonic() - started, 1e-9)
