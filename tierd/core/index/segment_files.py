"""Files of places, who could ever map them, and whose bytes are in them.

Purpose: whether a place's file may serve its next life, though processes may still map it that nobody knows of: a fork outlives its parent with what that had
mapped; and though nobody ever mapped it, what the daemon itself had written to it for one domain is in it still. Non-purpose: the processes that are known (pages.py).
"""

from __future__ import annotations

from tierd.core.index.segment import Key


class Files:
    """Of one tier, by place. is_strict: its writers are not to be trusted, so none gets a file that another one could write to, or cut short."""

    def __init__(self, places: int, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._domains: list[set[int]] = [set() for _ in range(places)]
        self._writers: list[set[int]] = [set() for _ in range(places)]

    def begin(self, place: int, domain: int) -> None:
        """Blocks of the domain will lie in it, and what they leave behind."""
        self._domains[place].add(domain)

    def note(self, place: int, domain: int, *, writer: int | None) -> None:
        """A client of the domain maps it; writer: it can write to it."""
        self._domains[place].add(domain)
        if writer is not None:
            self.note_writer(place, writer)

    def note_writer(self, place: int, writer: int) -> None:
        """It can write to it, or could."""
        self._writers[place].add(writer)

    def is_fit(self, place: int, key: Key) -> bool:
        """Whether nobody maps it who may not see the key's segment, or must not write to it, and nothing of another domain was in it."""
        strangers = self._writers[place] - {key.writer} if self._is_strict else ()
        return not strangers and not self._domains[place] - {key.domain}

    def renew(self, place: int) -> None:
        """The place gets another file."""
        self._domains[place].clear()
        self._writers[place].clear()
