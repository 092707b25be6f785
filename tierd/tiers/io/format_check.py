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

from tierd.checksum import record_checksum
from tierd.core.formats import versions
from tierd.core.formats.versions import Versions
from tierd.errors import TierFailed

_HEAD_BYTES = 4096
_VERSION_AT = 8
_STORE = slice(16, 32)  # in snapshots and journals


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
    """Raises VersionMismatch for a file of a version that this tierd does not read, TierFailed for a store whose files name another. Nothing is changed."""
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
    """Empty for a file that cannot be read: whoever needs it says so."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _check_store(path: Path, stores: dict[Path, bytes]) -> None:
    """store.json has no checksum, so the heads beside it have a say: under a wrong id all of the store would be taken for foreign, and removed."""
    try:
        description = json.loads(_read_head(path))
        version, store = int(description["format"]), bytes.fromhex(description["store"])
    except (ValueError, KeyError, TypeError):
        return  # whoever opens the store says so
    versions.STORE.check(version, name=str(path))
    for other, found in stores.items():
        if found != store:
            raise TierFailed(
                f"{path}: it names store {store.hex()}, {other.name} belongs to {found.hex()}; correct the one that is wrong, or remove the"
                " directory"
            )
