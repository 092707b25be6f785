"""Which namespaces sessions have opened."""

from __future__ import annotations

from tierd.server.openings import LIMIT, Openings


def test_the_latest_are_kept_until_the_session_stops() -> None:
    """Each session's namespaces in the order of their last opening, a bounded number; nothing once it is forgotten."""
    openings = Openings()
    for number in (*range(LIMIT + 5), 70, 10):
        openings.note(1, number)
    openings.note(2, 3)
    assert openings.of(1) == [*range(6, 10), *range(11, LIMIT + 5), 70, 10] and openings.of(2) == [3]
    openings.forget(1)
    assert openings.of(1) == [] and openings.of(2) == [3]
