"""The versions of each format that this tierd reads and writes.

`core/FORMAT.md` and `tiers/FORMAT*.md` describe the formats. Version N reads N-1; tierd writes
`current`. It refuses a file of any other version before it changes anything beside it, and keeps
it. BlockMeta has no file of its own. A new version of META also raises that of the catalogue, the
journal and the snapshot, so a start can tell by their heads. The version of `namespaces.log` is
that of the `arena.tbl` beside it. A directory is on no disk: a client that does not read its
version asks the daemon. A client and a daemon of different protocols or formats do not work
together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.errors import VersionMismatch


@dataclass(frozen=True, slots=True)
class Versions:
    """oldest to current are read. what: the format. remedy: for a file of another version."""

    what: str
    oldest: int
    current: int
    remedy: str = "use another directory"

    def reads(self, found: int) -> bool:
        """Whether this tierd reads that version."""
        return self.oldest <= found <= self.current

    def check(self, found: int, *, name: str) -> None:
        """Raises VersionMismatch, naming both sides."""
        if not self.reads(found):
            wrote = "newer" if found > self.current else "older"
            raise VersionMismatch(
                f"{name}: {self.what} version {found}, this tierd reads {self.oldest} to {self.current}; run the {wrote} tierd"
                f" that wrote it, or {self.remedy}"
            )


_PURGE = "free the memory with `tierd purge`"

META = Versions("block record", 1, 2)
CATALOGUE = Versions("catalogue", 1, 2, _PURGE)
ARENA = Versions("arena", 1, 1, _PURGE)
SESSIONS = Versions("session table", 1, 1, "end all clients and remove it")
STORE = Versions("store", 1, 1)
JOURNAL = Versions("journal", 1, 2)
SNAPSHOT = Versions("snapshot", 1, 2)
DIRECTORY = Versions("directory", 1, 1)

PROTO_VERSION = 2
"""Version of the session socket, local RPC and notices between a local client and its daemon. A
hello with another is refused."""
FORMAT_VERSION = CATALOGUE.current
"""Version of the segments that a local client maps; a hello with another is refused too."""
