"""The place of an arena: choice of its directories, checks of room, and speed of its memory.

An arena lies in `<base>/tierd-<uid>/<instance>/<tier>`, a directory that only its owner can change.
A choice below the best adds a notice. The base is `arena_dir` if given; a tmpfs of its own with
huge pages is best. Otherwise it is a hugetlbfs with enough free pages, else /dev/shm. Files on
hugetlbfs are whole huge pages, so the small tables stay on /dev/shm.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierd.core.formats.model import TierSpec
from tierd.errors import ConfigError
from tierd.linux.huge_pages import HUGE_BYTES
from tierd.linux.mapping import address_of, allocate, map_file, populate
from tierd.tiers.io.lock import check_way, private_directory

SHM = Path("/dev/shm")
HUGE_POOLS = Path("/sys/kernel/mm/hugepages")
LOCK_NAME = "owner.lock"
PROBE_BYTES = 8 << 20
_INSTANCE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/mounts."""

    path: Path
    kind: str
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Directories of data files and of all others. mode: tmpfs, tmpfs-huge, hugetlbfs or file."""

    data: Path
    tables: Path
    mode: str


@dataclass(frozen=True, slots=True)
class Touch:
    """bytes_per_s: speed of the first touch of the memory. huge_share: part in huge pages, 0 to 1."""

    bytes_per_s: float
    huge_share: float


# -- choice


def choose_place(spec: TierSpec, *, instance: str, arena_dir: str = "") -> ArenaPlace:
    """The directories of one tier, made 0700 if missing. Raises ConfigError."""
    if not _INSTANCE.fullmatch(instance) or instance.startswith("."):
        raise ConfigError(
            f"instance {instance!r}: not a name of 1 to 64 letters, digits and _.-; use the id that tierd made"
        )
    mounts = list(read_mounts())
    if arena_dir:
        check_way(Path(arena_dir))
        base = Path(arena_dir).resolve()
        data, mode = base, _mode_of(base, mounts)
    else:
        base = SHM
        data = _find_huge_base(spec, mounts) or base
        mode = _mode_of(data, mounts)
    if not data.is_dir() or not base.is_dir():
        raise ConfigError(f"host.arena_dir: {data} is no directory; mount a tmpfs there or set another")
    tables = tables_base(data, mounts)
    return ArenaPlace(
        data=private_directory(_below(data, instance, spec.name)),
        tables=private_directory(_below(tables, instance, spec.name)),
        mode=mode,
    )


def tables_base(base: Path, mounts: list[Mount]) -> Path:
    """The base of all files but data files. hugetlbfs has no write(), so theirs is elsewhere."""
    return SHM if _mode_of(base, mounts) == "hugetlbfs" else base


def user_directory(base: Path) -> Path:
    """The directory of this user's instances below a base."""
    return base / f"tierd-{os.geteuid()}"


def _below(base: Path, instance: str, name: str) -> Path:
    return user_directory(base) / instance / name


def read_mounts(path: Path = Path("/proc/mounts")) -> Iterator[Mount]:
    """The mounts that this process sees."""
    for line in path.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        yield Mount(Path(where.encode().decode("unicode_escape")), kind, frozenset(options.split(",")))


def _mode_of(path: Path, mounts: list[Mount]) -> str:
    mount = _mount_of(path, mounts)
    if mount.kind != "tmpfs":
        return "hugetlbfs" if mount.kind == "hugetlbfs" else "file"
    huge = {"huge=always", "huge=within_size", "huge=advise"} & mount.options
    return "tmpfs-huge" if huge else "tmpfs"


def _mount_of(path: Path, mounts: list[Mount]) -> Mount:
    around = [m for m in mounts if path == m.path or m.path in path.parents]
    deepest = max((len(m.path.parts) for m in around), default=0)
    found = [m for m in around if len(m.path.parts) == deepest]
    return found[-1] if found else Mount(Path("/"), "unknown", frozenset())


def _find_huge_base(spec: TierSpec, mounts: list[Mount]) -> Path | None:
    """A hugetlbfs that holds the whole tier now, and whose pages divide a segment."""
    for mount in mounts:
        if mount.kind != "hugetlbfs" or not os.access(mount.path, os.W_OK | os.X_OK):
            continue
        if (
            spec.segment_bytes % os.statvfs(mount.path).f_bsize == 0
            and (find_free(mount.path) or 0) >= spec.capacity_bytes
        ):
            return mount.path
    return None


# -- room


def check_room(spec: TierSpec, *, place: ArenaPlace, held_bytes: int) -> None:
    """Check that the tier fits. held_bytes: of its files now. Raises ConfigError with the remedy."""
    free = find_free(place.data)
    needed = spec.capacity_bytes - held_bytes
    if free is not None and needed > free:
        raise ConfigError(
            f"{spec.name}.capacity: {_mib(spec.capacity_bytes)} needs {_mib(needed)} more in {place.data}, where {_mib(free)} "
            "are free; lower the capacity, enlarge the file system (mount -o remount,size=...), or set arena_dir; `tierd purge "
            "--orphans` frees arenas that nobody uses"
        )
    limit = find_memory_limit()
    if limit is not None and spec.capacity_bytes > limit:
        raise ConfigError(
            f"{spec.name}.capacity: {_mib(spec.capacity_bytes)} is above the {_mib(limit)} that this process's control group may "
            "use; lower the capacity or raise the group's memory limit"
        )


def find_free(path: Path) -> int | None:
    """Bytes free for new files; None without a limit. A hugetlbfs may share the machine's pages."""
    room = os.statvfs(path)
    if room.f_blocks:
        return room.f_bavail * room.f_frsize
    pool = HUGE_POOLS / f"hugepages-{room.f_bsize // 1024}kB" / "free_hugepages"
    return int(pool.read_text()) * room.f_bsize if pool.is_file() else None


def find_memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest memory limit of this control group and its parents (v1, v2), bytes; None without."""
    found = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [_limits(top, path, "memory.max") for top in (root, root / "unified")]
        elif "memory" in controllers.split(","):
            found.append(_limits(root / "memory", path, "memory.limit_in_bytes"))
    limits = [limit for group in found for limit in group]
    return min(limits, default=None)


def _limits(top: Path, path: str, name: str) -> list[int]:
    here = top / path.lstrip("/")
    texts = [
        (p / name).read_text().strip() for p in (here, *here.parents) if p.is_relative_to(top) and (p / name).is_file()
    ]
    return [
        int(text) for text in texts if text.isdigit() and int(text) < 1 << 60
    ]  # cgroup v1 writes a huge number for "none"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


# -- speed


def measure_touch(directory: Path) -> Touch | None:
    """Touch a few MiB for the first time in a temporary file; None if there is no room."""
    path = directory / "probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
        length = max(PROBE_BYTES, os.statvfs(directory).f_bsize)
        os.ftruncate(fd, length)
        view = map_file(fd, length)
        start = time.perf_counter()
        for at in range(0, length, HUGE_BYTES):
            allocate(fd, view, at)
        done = populate(view)
        seconds = time.perf_counter() - start
        return Touch(length / seconds, huge_share(view)) if done else None
    except OSError:
        return None
    finally:
        os.close(fd)


def shortcomings(spec: TierSpec, place: ArenaPlace, touch: Touch | None) -> list[str]:
    """The lack of the place that was chosen, as a notice; none where there is none."""
    if place.mode == "file":
        return [
            f"{spec.name}: {place.data} is on a disk, so the kernel writes pages back to it; set arena_dir to a tmpfs"
        ]
    if touch is None or touch.huge_share == 1:
        return []
    return [
        (
            f"{spec.name}: {1 - touch.huge_share:.0%} of its first memory is not in huge pages"
            f" (first touch {touch.bytes_per_s / _GB:.1f} GB/s);"
            " a tmpfs mounted with huge=always, named in arena_dir, is several times faster"
        )
    ]


def huge_share(view: memoryview) -> float:
    """Share of a mapping that this process has in huge pages, 0 to 1."""
    address, inside, huge_kib = address_of(view), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")):
            huge_kib += int(line.split()[1])
    return min(1.0, huge_kib * 1024 / view.nbytes)
