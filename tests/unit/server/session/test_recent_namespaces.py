"""The namespaces that sessions have opened."""

from __future__ import annotations

from tierd.server.session.recent_namespaces import LIMIT, RecentNamespaces


def test_the_latest_are_kept_until_the_session_stops() -> None:
    """Each session's latest namespaces are kept in order of last opening, up to a limit, until forgotten."""
    recent_namespaces = RecentNamespaces()
    for number in (*range(LIMIT + 5), 70, 10):
        recent_namespaces.note(1, number)
    recent_namespaces.note(2, 3)
    assert recent_namespaces.of(1) == [*range(6, 10), *range(11, LIMIT + 5), 70, 10] and recent_namespaces.of(2) == [3]
    recent_namespaces.forget(1)
    assert recent_namespaces.of(1) == [] and recent_namespaces.of(2) == [3]
