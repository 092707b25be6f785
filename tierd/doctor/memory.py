"""Shared memory, the control group's limit, huge pages and swap, for the host tiers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tierd.config import Config, HostConfig
from tierd.doctor.check import Check, Host, amount, unwritable
from tierd.tiers.arena.arena_files import (
    SHM,
    _mode_of,
    find_free,
    find_memory_limit,
    measure_touch,
    read_mounts,
    user_directory,
)


def check_memory(config: Config, host: Host) -> Iterator[Check]:
    """All checks of this module."""
    for index, tier in enumerate(config.host):
        yield check_room(f"host.{index}", tier)
        yield check_huge_pages(f"host.{index}", tier)
    yield check_limit(config, host)
    yield check_swap(host)


def check_room(name: str, tier: HostConfig) -> Check:
    """Free space of the file system of the segments."""
    base = Path(tier.arena_dir) if tier.arena_dir else SHM
    check = f"{name}.memory"
    if not os.path.isdir(base):
        return Check(
            check,
            "failure",
            f"{base} is no directory",
            "`tierd serve` cannot start",
            f"mount a tmpfs there, or set {name}.arena_dir",
        )
    there = of_user(base)
    if fault := unwritable(check, f"{name}.arena_dir", there):
        return fault
    free, held = find_free(there), held_bytes(there) if there != base else 0
    found = f"{amount(tier.capacity)} wanted in {there}"
    if free is None:
        return Check(check, "ok", f"{found}, which has no limit")
    found += f", {amount(free + held)} can be had"
    if tier.capacity > free + held:
        return Check(
            check,
            "failure",
            found,
            "`tierd serve` cannot start",
            f"enlarge it (mount -o remount,size=... {there}; in a container --shm-size), or lower {name}.capacity",
        )
    if _mode_of(there, list(read_mounts())) == "file":
        return Check(
            check,
            "warning",
            f"{found}; it is on a disk",
            "the kernel writes the pages back to the disk all the time",
            f"set {name}.arena_dir to a tmpfs",
        )
    return Check(check, "ok", found)


def of_user(base: Path) -> Path:
    """This user's directory of arenas; the base if it does not exist yet. A container may have the
    former from its node, and a small base of its own."""
    directory = user_directory(base)
    return directory if os.path.exists(directory) else base


def held_bytes(directory: Path) -> int:
    """Bytes that arenas of this user have there already."""
    return sum(
        os.stat(os.path.join(where, file)).st_blocks * 512 for where, _, files in os.walk(directory) for file in files
    )


def check_limit(config: Config, host: Host) -> Check:
    """The memory limit of the control group, and the machine's memory."""
    wanted = sum(tier.capacity for tier in config.host)
    whole = _kib(host, "MemTotal")
    limit = find_memory_limit(host.at("/proc/self/cgroup"), host.at("/sys/fs/cgroup"))
    refused = limit is not None and any(tier.capacity > limit for tier in config.host)
    for name, most, remedy in (
        ("control group", limit, "raise the group's limit (MemoryMax= of the unit, memory of the container)"),
        ("machine", whole, "add memory"),
    ):
        if most is not None and wanted > most:
            return Check(
                "memory-limit",
                "failure",
                f"{amount(wanted)} of host tiers, the {name} has {amount(most)}",
                "`tierd serve` cannot start" if refused else "the kernel kills the daemon when its tiers fill",
                f"{remedy}, or lower the capacity",
            )
    return Check("memory-limit", "ok", f"{amount(wanted)} of host tiers" + _of(whole))


def check_huge_pages(name: str, tier: HostConfig) -> Check:
    """Touches a few MiB in a file beside the segments, which is removed again."""
    base, check = of_user(Path(tier.arena_dir) if tier.arena_dir else SHM), f"{name}.huge-pages"
    try:
        with tempfile.TemporaryDirectory(prefix=".tierd-doctor-", dir=base) as scratch:
            touch = measure_touch(Path(scratch))
    except OSError as error:
        return Check(check, "skipped", f"{base}: {error.strerror}")
    if touch is None:
        return Check(check, "skipped", f"no room in {base}")
    found = f"{touch.huge_share:.0%} of new memory, first touched at {touch.bytes_per_s / 1e9:.2g} GB/s"
    if touch.huge_share < 1:
        return Check(
            check,
            "note",
            found,
            "first touches take several times as long, and verified reads from NVMe about twice",
            f"boot Linux 6.1 or newer, or mount a tmpfs with huge=always and name it in {name}.arena_dir",
        )
    return Check(check, "ok", found)


def check_swap(host: Host) -> Check:
    """Swap: shared memory may be written to it."""
    swap, swappiness = _kib(host, "SwapTotal") or 0, host.read("/proc/sys/vm/swappiness")
    if swap and swappiness not in ("0", "1"):
        return Check(
            "swap",
            "note",
            f"{amount(swap)}, swappiness {swappiness}",
            "under pressure the kernel writes the host tier to disk, and hits wait for it",
            "sysctl vm.swappiness=1, or swapoff -a",
        )
    return Check("swap", "ok", "none" if not swap else f"{amount(swap)}, swappiness {swappiness}")


def _kib(host: Host, key: str) -> int | None:
    for line in host.read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) << 10
    return None


def _of(whole: int | None) -> str:
    return f", the machine has {amount(whole)}" if whole else ""
