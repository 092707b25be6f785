"""Which namespaces each session has opened lately, for operators.

Purpose: `tierctl engines` tells who shares blocks with whom. Non-purpose: who may use a namespace (cache). Invariants: a bounded number for each session;
of a session that has stopped nothing is remembered.
"""

from __future__ import annotations

LIMIT = 64
"""Namespaces of one session; beyond them that which was opened longest ago is forgotten."""


class RecentNamespaces:
    """One per daemon."""

    def __init__(self) -> None:
        self._opened: dict[int, dict[int, None]] = {}

    def note(self, session: int, namespace: int) -> None:
        """The session has opened a namespace, for the first time or again."""
        opened = self._opened.setdefault(session, {})
        opened.pop(namespace, None)
        opened[namespace] = None
        if len(opened) > LIMIT:
            del opened[next(iter(opened))]

    def of(self, session: int) -> list[int]:
        """Ids (of rank 0), the latest last."""
        return list(self._opened.get(session, ()))

    def forget(self, session: int) -> None:
        """The session serves nothing any more."""
        self._opened.pop(session, None)
