"""The disks under a directory, and their wear.

`drives_under` follows a path through file system, device mapper and partition to whole disks, by
sysfs. `read_wear` uses nvme-cli, if it is installed and permitted. Neither the disks nor
permissions are changed.

If the machine tells little, nothing is raised: `trouble` holds the reason and the remedy. No call
takes longer than SMART_TIMEOUT_S.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.tiers.drives.smart import Smart, parse_smart

SMART_TIMEOUT_S = 5.0
OUTPUT_LIMIT_BYTES = 1 << 20
MOST_DRIVES = 8
"""The limit of disks under one path: of an array, or a volume over several disks."""
_SECTOR_BYTES = 512
"""Sector size in sysfs, independent of the disk's."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Drive:
    """One disk. device: e.g. /dev/nvme0n1. model and capacity_bytes: empty and 0 if unknown.
    smart: its health log, or None with the reason in trouble."""

    device: str
    model: str = ""
    capacity_bytes: int = 0
    rotational: bool = False
    smart: Smart | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel's descriptions of disks; tests replace it."""

    sys: Path = Path("/sys")
    mounts: Path = Path("/proc/self/mountinfo")
    search_path: str | None = None
    """Of programs; None: from the environment."""


def drives_under(path: Path, machine: Machine = Machine()) -> list[Drive]:
    """The disks under a directory, with their wear; if none, one Drive with only trouble. Blocking."""
    found = sorted(set(_disks(_block_device(path, machine))))[:MOST_DRIVES]
    if not found:
        return [Drive("", trouble=_why_none(path, machine))]
    return [read_wear(describe(disk), machine) for disk in found]


def describe(disk: Path) -> Drive:
    """A whole disk, described by its directory in sysfs."""
    return Drive(
        device=f"/dev/{disk.name}",
        model=_read(disk / "device" / "model") or _read(disk / "device" / "name"),
        capacity_bytes=_number(disk / "size") * _SECTOR_BYTES,
        rotational=_read(disk / "queue" / "rotational") == "1",
    )


def read_wear(drive: Drive, machine: Machine = Machine()) -> Drive:
    """The drive with its SMART log, or with the reason why there is none."""
    if not Path(drive.device).name.startswith("nvme"):
        return replace(
            drive,
            trouble=f"{drive.device}: no NVMe drive, so it has no NVMe health log; ask `smartctl -a {drive.device}`",
        )
    program = shutil.which("nvme", path=machine.search_path)
    if program is None:
        return replace(
            drive,
            trouble=f"{drive.device}: nvme-cli is not installed, so its wear is not read; install it (package nvme-cli)",
        )
    try:
        done = subprocess.run(
            [program, "smart-log", drive.device, "-o", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SMART_TIMEOUT_S,
            check=False,
            env={"PATH": machine.search_path or os.environ.get("PATH", ""), "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return replace(drive, trouble=f"{drive.device}: `nvme smart-log` did not answer ({error}); run it by hand")
    return _with_output(drive, done)


def _with_output(drive: Drive, done: subprocess.CompletedProcess[bytes]) -> Drive:
    said = (done.stderr or done.stdout)[:300].decode(errors="replace").strip() or f"status {done.returncode}"
    if done.returncode and ("ermission" in said or "not permitted" in said):
        remedy = f"only root may read it; run `sudo nvme smart-log {drive.device}`, or give the daemon CAP_SYS_ADMIN"
        return replace(drive, trouble=f"{drive.device}: its wear may not be read ({said}); {remedy}")
    if done.returncode:
        return replace(drive, trouble=f"{drive.device}: `nvme smart-log` failed ({said}); run it by hand")
    try:
        return replace(drive, smart=parse_smart(done.stdout[:OUTPUT_LIMIT_BYTES]))
    except ValueError as error:
        return replace(drive, trouble=f"{drive.device}: `nvme smart-log` is not understood ({error}); update nvme-cli")


def _block_device(path: Path, machine: Machine) -> Path | None:
    """The device under a path in sysfs, by the file system's number, or the mount's source (btrfs)."""
    numbers = [os.stat(path).st_dev] if path.exists() else []
    source = _mount_source(path, machine)
    if source.startswith("/dev/") and os.path.exists(source):
        numbers.append(os.stat(source).st_rdev)
    for number in numbers:
        place = machine.sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        if place.exists():
            return place.resolve()
    return None


def _mount_source(path: Path, machine: Machine) -> str:
    """The source mounted under a path: `/dev/nvme0n1p2`, `tmpfs`; empty if unknown."""
    best, source, whole = -1, "", path.resolve()
    for line in _read(machine.mounts).splitlines():
        fields, _, rest = line.partition(" - ")
        names = [
            _OCTAL.sub(lambda match: chr(int(match[1], 8)), name) for name in (*fields.split()[4:5], *rest.split()[1:2])
        ]
        if len(names) == 2 and whole.is_relative_to(names[0]) and len(names[0]) >= best:
            best, source = len(names[0]), names[1]
    return source


def _disks(device: Path | None, depth: int = 8) -> Iterator[Path]:
    """Whole disks under a device: through partitions, device mapper and md."""
    if device is None or not depth:
        return
    if (device / "partition").exists():
        device = device.parent
    parts = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    for part in parts:
        yield from _disks(part.resolve(), depth - 1)
    if not parts:
        yield device


def _why_none(path: Path, machine: Machine) -> str:
    source = _mount_source(path, machine)
    if not path.exists():
        return f"{path}: does not exist yet"
    return f"{path}: is on {source or 'a file system'} without a disk of its own; put nvme.path on a local drive"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdecimal() else 0
