"""The namespaces that each session opened lately, for operators.

`tierctl engines` shows from it which sessions share blocks. Their number is bounded for each
session, and none are kept of a stopped session. The cache checks permissions.
"""

from __future__ import annotations

LIMIT = 64
"""Namespaces of one session. Beyond this limit, the one opened longest ago is forgotten."""


class RecentNamespaces:
    """One per daemon."""

    def __init__(self) -> None:
        self._opened: dict[int, dict[int, None]] = {}

    def note(self, session: int, namespace: int) -> None:
        """Records that the session opened a namespace, for the first time or again."""
        opened = self._opened.setdefault(session, {})
        opened.pop(namespace, None)
        opened[namespace] = None
        if len(opened) > LIMIT:
            del opened[next(iter(opened))]

    def of(self, session: int) -> list[int]:
        """Ids (of rank 0), the latest last."""
        return list(self._opened.get(session, ()))

    def forget(self, session: int) -> None:
        """Forgets a stopped session."""
        self._opened.pop(session, None)
