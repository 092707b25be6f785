"""The heads of all files that hold blocks: which version wrote them, told before anything is opened for writing.

Purpose: `check_versions`, so that a start that meets files of another version changes nothing at all. Non-purpose: what the files
hold. Invariant: of every format, in every version, magic, version (u32 at 8) and checksum stay where they are here; a head whose checksum does
not hold is damage, which is for its reader to deal with.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from tierd.core import versions
from tierd.core.versions import Versions
from tierd.tiers.checksum import record_checksum

_HEAD_BYTES = 4096
_VERSION_AT = 8


class Head(NamedTuple):
    """pattern: names of such files; sealed_bytes: how many the checksum behind them covers."""

    pattern: str
    magic: bytes
    sealed_bytes: int
    versions: Versions


HEADS = (
    Head("*.cat", b"TIERDCAT", 120, versions.CATALOGUE),
    Head("arena.tbl", b"TIERDARN", 32, versions.ARENA),
    Head("sessions.tbl", b"TIERDSES", 16, versions.SESSIONS),
    Head("snapshot-*.bin", b"tierdSNP", 80, versions.SNAPSHOT),
    Head("journal-*.log", b"tierdJNL", 40, versions.JOURNAL),
)


def check_versions(*directories: Path) -> None:
    """Raises VersionMismatch for a file of a version that this tierd does not read. Nothing is changed."""
    for directory in directories:
        for head in HEADS:
            for path in sorted(directory.glob(head.pattern)):
                version = find_version(_read_head(path), head)
                if version is not None:
                    head.versions.check(version, name=str(path))
        if (directory / "store.json").exists():
            _check_store(directory / "store.json")


def find_version(raw: bytes, head: Head) -> int | None:
    """The version that a head names; None if it is damaged."""
    end = head.sealed_bytes
    if not raw.startswith(head.magic) or len(raw) < end + 8:
        return None
    if record_checksum(raw[:end]) != int.from_bytes(raw[end : end + 8], "little"):
        return None
    return int(struct.unpack_from("<I", raw, _VERSION_AT)[0])


def _read_head(path: Path) -> bytes:
    """Empty for a file that cannot be read: whoever needs it says so."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _check_store(path: Path) -> None:
    try:
        version = int(json.loads(_read_head(path))["format"])
    except (ValueError, KeyError, TypeError):
        return
    versions.STORE.check(version, name=str(path))
