"""Check of the versions in all files that hold blocks, before any is opened for writing.

A start that finds files of another version changes nothing. Every version of every format keeps
magic, version (u32 at 8) and checksum where they are here. A head with a wrong checksum is damage,
which its reader handles.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import NamedTuple

from tierd.checksum import record_checksum
from tierd.core.formats import versions
from tierd.core.formats.versions import Versions
from tierd.errors import TierFailed

_HEAD_BYTES = 4096
_VERSION_AT = 8
_STORE = slice(16, 32)  # in snapshots and journals


class Head(NamedTuple):
    """pattern: names of such files; sealed_bytes: length covered by the checksum that follows."""

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
    """Change nothing. Raises VersionMismatch; TierFailed if a store's files name another store."""
    for directory in directories:
        stores = dict[Path, bytes]()
        for head in HEADS:
            for path in sorted(directory.glob(head.pattern)):
                raw = _read_head(path)
                version = find_version(raw, head)
                if version is not None:
                    head.versions.check(version, name=str(path))
                    stores[path] = raw[_STORE]
        if (directory / "store.json").exists():
            _check_store(directory / "store.json", stores)


def find_version(raw: bytes, head: Head) -> int | None:
    """The version that a head names; None if it is damaged."""
    end = head.sealed_bytes
    if not raw.startswith(head.magic) or len(raw) < end + 8:
        return None
    if record_checksum(raw[:end]) != int.from_bytes(raw[end : end + 8], "little"):
        return None
    return int(struct.unpack_from("<I", raw, _VERSION_AT)[0])


def _read_head(path: Path) -> bytes:
    """Empty for a file that cannot be read: its user raises the error."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _check_store(path: Path, stores: dict[Path, bytes]) -> None:
    """Compare store.json, which has no checksum, with the other heads. Under a wrong id all files
    of the store would be removed as foreign."""
    try:
        description = json.loads(_read_head(path))
        version, store = int(description["format"]), bytes.fromhex(description["store"])
    except (ValueError, KeyError, TypeError):
        return  # opening the store raises the error
    versions.STORE.check(version, name=str(path))
    for other, found in stores.items():
        if found != store:
            raise TierFailed(
                f"{path}: it names store {store.hex()}, {other.name} belongs to {found.hex()}; correct the one that is wrong, or remove the"
                " directory"
            )
