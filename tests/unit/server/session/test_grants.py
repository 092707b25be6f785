"""Grants: a call's lease and reservations are released when its client gives it up at any time."""

from __future__ import annotations

import pytest

from tierd.errors import SessionLost, Unavailable
from tierd.server.session import grants
from tierd.server.session.grants import Grants

CALL = (7, "7-1")


class Cache:
    """Records the releases and aborts."""

    def __init__(self) -> None:
        self.released: list[tuple[int, list[int]]] = []
        self.aborted: list[tuple[int, int]] = []
        self.stopped: set[int] = set()

    def check_open(self, session: int) -> None:
        if session in self.stopped:
            raise SessionLost(f"session {session}: it has ended")

    def grants(self) -> Grants:
        return Grants(
            release=lambda session, leases: self.released.append((session, list(leases))),
            abort=lambda session, reservation: self.aborted.append((session, reservation)),
            check_open=self.check_open,
        )


def test_given_up_after_its_end() -> None:
    """A client that gives up an ended call releases its lease and its reservation, once."""
    cache = Cache()
    given = cache.grants()
    assert given.give(CALL, "reply", lease=3, reservations=[4]) == "reply"
    assert not cache.released
    for _ in range(2):
        given.revoke(*CALL)
    assert (cache.released, cache.aborted) == ([(7, [3])], [(7, 4)])


def test_given_up_before_its_end() -> None:
    """A call that is given up while it runs releases at its end, and its client gets no reply."""
    cache = Cache()
    given = cache.grants()
    given.revoke(*CALL)
    with pytest.raises(Unavailable):
        given.give(CALL, "reply", lease=3)
    assert (cache.released, cache.aborted) == ([(7, [3])], [])
    assert given.give(CALL, "reply", lease=5) == "reply"


def test_a_reservation_alone() -> None:
    """A call without a lease only aborts its reservation."""
    cache = Cache()
    given = cache.grants()
    given.give(CALL, "reply", reservations=[4])
    given.revoke(*CALL)
    assert (cache.released, cache.aborted) == ([], [(7, 4)])


def test_several_reservations() -> None:
    """A call with several reservations aborts all of them, if given up after its end or before."""
    cache = Cache()
    given = cache.grants()
    given.give(CALL, "reply", reservations=[4, 5, 6])
    given.revoke(*CALL)
    given.revoke(7, "7-2")
    with pytest.raises(Unavailable):
        given.give((7, "7-2"), "reply", reservations=[8, 9])
    assert cache.aborted == [(7, number) for number in (4, 5, 6, 8, 9)]


def test_calls_of_others() -> None:
    """A session gives up its own calls only."""
    cache = Cache()
    given = cache.grants()
    given.give(CALL, "reply", lease=3)
    given.revoke(8, CALL[1])
    given.revoke(7, "7-2")
    assert not cache.released


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants remember a bounded number of the latest calls, both ended and given up."""
    monkeypatch.setattr(grants, "LIMIT", 2)
    cache = Cache()
    given = cache.grants()
    for number in range(1, 5):
        given.give((7, f"{number}"), "reply", lease=number)
    for number in range(1, 5):
        given.revoke(7, f"{number}")
    assert cache.released == [(7, [3]), (7, [4])]
    assert given.count == 2


def test_no_session_crowds_out_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls of one session do not displace another session's calls."""
    monkeypatch.setattr(grants, "LIMIT", 2)
    cache = Cache()
    given = cache.grants()
    given.give(CALL, "reply", lease=3)
    for number in range(1, 9):
        given.give((8, f"{number}"), "reply", lease=number + 10)
        given.revoke(9, f"{number}")
    given.revoke(*CALL)
    assert (7, [3]) in cache.released


def test_forgotten_with_its_session() -> None:
    """No state remains of a session whose connection is closed."""
    given = Cache().grants()
    given.give(CALL, "reply", lease=3)
    given.revoke(7, "7-9")
    assert given.count == 2
    given.forget(7)
    assert given.count == 0


def test_a_call_that_ends_after_its_session() -> None:
    """A call that ends after its session releases at once, and is not remembered."""
    cache = Cache()
    given = cache.grants()
    cache.stopped.add(7)
    with pytest.raises(SessionLost):
        given.give(CALL, "reply", lease=3, reservations=[4])
    assert (cache.released, cache.aborted, given.count) == ([(7, [3])], [(7, 4)], 0)
