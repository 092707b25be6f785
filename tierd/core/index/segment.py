"""Segments of a tier as values, kept by pages.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tierd.core.formats.model import DAEMON, NOBODY


class Key(NamedTuple):
    """The common properties of a segment's pages. class_bytes includes the slot overhead."""

    domain: int
    class_bytes: int
    writer: int


class Usage(NamedTuple):
    """Bytes in pages that are not free and not retiring, and the most that could be."""

    used_bytes: int
    whole_bytes: int


class Quarantined(NamedTuple):
    """Fault of a quarantined page, since when, and the bytes of its place."""

    fault: int
    since: float
    start: int
    end: int


@dataclass(slots=True)
class Segment:
    """A segment at a place. low: no slot below it is free.

    first: its first page id. spare: free pages. is_proven: it held a block, so its memory exists.
    is_own: the daemon began it, in this run, to load blocks.
    """

    id: int
    key: Key
    first: int
    pages: int
    spare: int
    low: int = 0
    is_proven: bool = False
    is_own: bool = False

    @property
    def stays(self) -> bool:
        """Whether it waits when empty: not if a former client may write to it."""
        return self.is_proven and (self.is_own or self.key.writer not in (DAEMON, NOBODY))
