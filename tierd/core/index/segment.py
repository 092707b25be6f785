"""Segments of a tier, as values: what their pages have in common, how full they are, what was found bad in them.

Purpose: names for the books in pages.py. Non-purpose: keeping them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tierd.core.formats.model import DAEMON, NOBODY


class Key(NamedTuple):
    """What the pages of one segment have in common. class_bytes includes the slot overhead."""

    domain: int
    class_bytes: int
    writer: int


class Usage(NamedTuple):
    """Bytes in pages that are not free and not retiring, of so many that could be."""

    used_bytes: int
    whole_bytes: int


class Found(NamedTuple):
    """Why a page is quarantined (Fault), since when, and which bytes of its place it is about."""

    fault: int
    since: float
    start: int
    end: int


@dataclass(slots=True)
class Segment:
    """A life of a place. first: its first page id. spare: pages that are free. low: no slot below it is free. is_proven: a block was in it,
    so its memory can be had. is_own: the daemon began it, in this life, for what it loads itself."""

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
        """Whether it waits, once it is empty, until its place is wanted: not where a client of the past may write to it."""
        return self.is_proven and (self.is_own or self.key.writer not in (DAEMON, NOBODY))
