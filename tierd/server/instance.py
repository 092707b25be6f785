"""The daemon's identity: its state directory, its lock, its id, and its namespaces.

These small files outlive a restart. The lock is taken before anything is read, and held until the
end. The namespaces file is replaced whole and synced before a new namespace may be used.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import structlog

from tierd.checksum import record_checksum
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.errors import CorruptRecord, TierFailed
from tierd.failpoint import failpoint
from tierd.tiers.io.durable import replace_file
from tierd.tiers.io.lock import OwnerLock, private_directory, take_lock

log = structlog.get_logger(__name__)

_SEAL_FIELD = b',"checksum":'
_SEAL = _SEAL_FIELD + b'"%016x"}'
_SEAL_BYTES = len(_SEAL % 0)


class Instance:
    """A state directory that this process owns. Raises AlreadyOwned, ConfigError."""

    def __init__(self, state_dir: str) -> None:
        self.directory = private_directory(Path(state_dir))
        self._lock: OwnerLock = take_lock(self.directory / "tierd.lock", what=f"instance in {state_dir}")
        self.id = self._read_id()

    def restore_namespaces(self, registry: NamespaceRegistry) -> None:
        """Restores the file's namespaces. A damaged line is dropped and logged, and the file is
        copied."""
        path = self.directory / "namespaces.jsonl"
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
            try:
                registry.restore([unsealed(line)])
            except CorruptRecord as error:
                path.with_suffix(".damaged").write_bytes(path.read_bytes())
                log.warning("namespace dropped", file=str(path), line=number, error=str(error))

    def keep_namespaces(self, records: list[bytes]) -> None:
        """Replaces the file durably. Blocking. Raises TierFailed."""
        path = self.directory / "namespaces.jsonl"
        try:
            failpoint("instance.namespaces.before_replace")
            replace_file(path, [b"".join(sealed(record) + b"\n" for record in records)])  # one write, not one per name
        except OSError as error:
            raise TierFailed(
                f"{path}: cannot be written ({error}); free space in server.state_dir, or check its disk"
            ) from error

    def close(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def _read_id(self) -> str:
        path = self.directory / "instance"
        if not path.exists():
            replace_file(path, [secrets.token_hex(8).encode()])
        return path.read_text(errors="replace").strip()


def sealed(record: bytes) -> bytes:
    """A namespace's JSON record with a checksum (xxh3-64) as its last field. The record's digest
    does not cover ids and domains."""
    return record.removesuffix(b"}") + _SEAL % record_checksum(record)


def unsealed(line: bytes) -> bytes:
    """The record of a line. Older lines without a checksum are accepted. Raises CorruptRecord."""
    record, seal = line[:-_SEAL_BYTES] + b"}", line[-_SEAL_BYTES:]
    if _SEAL_FIELD not in line:
        return line
    if seal != _SEAL % record_checksum(record):
        raise CorruptRecord("namespace record: its checksum does not match; it is dropped")
    return record
