"""One result of an examination, and the machine that is examined.

The machine is its files: `/proc`, `/sys`, and the directories of a configuration. Nothing here
changes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "warning", "failure", "skipped"]
"""note: slower than it could be. warning: harm is likely. failure: a daemon does not start.

skipped: not asked for, or not to be found out."""


@dataclass(frozen=True, slots=True)
class Check:
    """found: what the machine has. consequence, remedy: empty if the status is ok."""

    name: str
    status: Status
    found: str
    consequence: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The examined machine. root: of /proc and /sys. environ: of the programs to be started."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def at(self, path: str) -> Path:
        """This absolute path below the root."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """A small file's text without spaces around it; "" if it cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def matching(self, directory: str, pattern: str) -> Iterator[Path]:
        """Paths in a directory by a glob, sorted."""
        yield from sorted(self.at(directory).glob(pattern))


def amount(count: float) -> str:
    """Bytes as people read them: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def existing(path: Path) -> Path:
    """The path itself, or the nearest above it that exists and that this process may see."""
    return next(p for p in (path, *path.parents) if os.path.exists(p))


def unwritable(name: str, setting: str, there: Path) -> Check | None:
    """A failure if this process may not make files in a path that exists; None if it may."""
    if not os.path.isdir(there):
        found, remedy = f"{there} is no directory", "move it away"
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        found, remedy = f"the file system of {there} is mounted read-only", "mount it to be written"
    elif not os.access(there, os.W_OK | os.X_OK):
        found, remedy = f"uid {os.geteuid()} may not write to {there}", "change its owner"
    else:
        return None
    return Check(name, "failure", found, "`tierd serve` cannot start", f"{remedy}, or set {setting}")
