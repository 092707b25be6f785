"""Files of places: which sessions could ever map them, and which domains' bytes they hold.

The question is whether a place's file may serve its next segment. Unknown processes may still map
it: a fork outlives its parent and keeps its mappings. The file also keeps bytes that the daemon
wrote for one domain, even if no client mapped it. pages.py tracks the known processes.
"""

from __future__ import annotations

from tierd.core.index.segment import Key


class Files:
    """Files of one tier, by place. is_strict: clients are untrusted, so none gets a file that
    another could write to or truncate."""

    def __init__(self, places: int, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._domains: list[set[int]] = [set() for _ in range(places)]
        self._writers: list[set[int]] = [set() for _ in range(places)]

    def lengthen(self, places: int) -> None:
        """There are so many places more."""
        self._domains += [set() for _ in range(places)]
        self._writers += [set() for _ in range(places)]

    def begin(self, place: int, domain: int) -> None:
        """Blocks of the domain will lie in it; their bytes remain."""
        self._domains[place].add(domain)

    def note(self, place: int, domain: int, *, writer: int | None) -> None:
        """A client of the domain maps it; writer: the session, if it can write to it."""
        self._domains[place].add(domain)
        if writer is not None:
            self.note_writer(place, writer)

    def note_writer(self, place: int, writer: int) -> None:
        """The session can write to it, or could."""
        self._writers[place].add(writer)

    def is_fit(self, place: int, key: Key) -> bool:
        """Whether no process maps it that may not see the key's segment or write to it, and it
        holds no bytes of another domain."""
        strangers = self._writers[place] - {key.writer} if self._is_strict else ()
        return not strangers and not self._domains[place] - {key.domain}

    def renew(self, place: int) -> None:
        """The place gets another file."""
        self._domains[place].clear()
        self._writers[place].clear()
