"""Credits: bounds on calls in progress, the text of refusals, and cutting off greedy sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tierd.errors import Overloaded
from tierd.server.grpc.credits import ENDLESS_LIMIT, FORGIVEN_PER_S, PATIENCE, RETRY_AFTER_S, Credits

ACQUIRE, LOOKUP, RELEASE, ABORT, WATCH = (
    f"/tierd.v1.Cache/{name}" for name in ("Acquire", "Lookup", "Release", "Abort", "Watch")
)
STATUS = "/tierd.v1.Admin/Status"


@dataclass
class Desk:
    """Credits with their own clock, and a list of the sessions cut off."""

    now: float = 0.0
    ended: list[tuple[int, str]] = field(default_factory=list)

    def credits(self, *, queue_limit: int = 16, session_credits: int = 4) -> Credits:
        return Credits(
            queue_limit=queue_limit,
            session_credits=session_credits,
            now=lambda: self.now,
            cut_off=lambda session, why: self.ended.append((session, str(why))),
        )


@contextlib.contextmanager
def taken(room: Credits, count: int, *, method: str = ACQUIRE, session: int = 1) -> Iterator[None]:
    """This many calls in progress."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(room.place(method, session))
        yield


def refusal(room: Credits, method: str = ACQUIRE, *, session: int = 1) -> Overloaded | None:
    """The refusal of one more call, or None."""
    try:
        with room.place(method, session):
            return None
    except Overloaded as error:
        return error


def test_a_session_has_its_credits_and_no_more() -> None:
    """The last credit is served, one more is refused with a hint, and a call's end gives its credit back."""
    room = Desk().credits()
    with taken(room, 3):
        assert refusal(room) is None
        with taken(room, 1):
            told = refusal(room)
            assert told is not None
            assert told.retry_after_s > 0
            assert refusal(room, session=2) is None
    assert room.running == 0


def test_no_session_takes_more_than_half() -> None:
    """Two sessions have room in the queue, for any session_credits."""
    room = Desk().credits(queue_limit=8, session_credits=1000)
    with taken(room, room.share):
        assert refusal(room) is not None
        assert refusal(room, session=2) is None


def test_slow_calls_leave_room_for_quick_ones() -> None:
    """When slow calls are at their limit, another slow call is refused and a lookup is admitted."""
    room = Desk().credits(queue_limit=16)
    with taken(room, 4), taken(room, 4, session=2), taken(room, 4, session=3):
        assert refusal(room, session=4) is not None
        assert refusal(room, LOOKUP, session=4) is None


def test_fewer_credits_cut_no_session_off_that_was_told_more() -> None:
    """After a change the new limit holds; only calls beyond the credits once told count as excess."""
    desk = Desk()
    room = desk.credits()
    room.set_limits(queue_limit=16, session_credits=2)
    with taken(room, 2):
        for _ in range(10 * PATIENCE):
            assert refusal(room) is not None
    assert desk.ended == []
    room.set_limits(queue_limit=16, session_credits=4)
    with taken(room, 4):
        assert room.share == 4 and refusal(room) is not None
        for _ in range(10 * PATIENCE):
            refusal(room)
    assert desk.ended


def test_what_gives_back_and_what_operators_do_is_not_refused() -> None:
    """Release and abort are always admitted, and so are operators' calls when the queue is full."""
    room = Desk().credits(queue_limit=4, session_credits=2)
    with taken(room, 2), taken(room, 2, method=LOOKUP, session=2):
        assert refusal(room, LOOKUP, session=3) is not None
        for session in (1, 2, 3):
            assert refusal(room, RELEASE, session=session) is None
            assert refusal(room, ABORT, session=session) is None
        assert refusal(room, STATUS, session=3) is None


def test_watchers_of_a_session_are_bounded() -> None:
    """The watches of a session are bounded, and take no credit."""
    room = Desk().credits()
    with taken(room, ENDLESS_LIMIT, method=WATCH):
        assert refusal(room, WATCH) is not None
        assert refusal(room) is None


@pytest.mark.parametrize(("method", "count"), [(WATCH, ENDLESS_LIMIT), (ACQUIRE, 8)])
def test_a_session_of_many_clients_is_never_cut_off(method: str, count: int) -> None:
    """Clients that share a session are refused with a constant hint, and the session never ends for it."""
    desk = Desk()
    room = desk.credits()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(room.place(method, 1, is_shared=True))
        told = set()
        for _ in range(4 * PATIENCE * count):
            with pytest.raises(Overloaded) as refused:
                room.place(method, 1, is_shared=True)
            told.add((str(refused.value), refused.value.retry_after_s))
    assert desk.ended == [] and len(told) == 1 and "cut off" not in str(told)


def test_who_goes_on_is_told_to_wait_longer_and_then_cut_off() -> None:
    """Hints grow with the refusals; after many of them the session ends, once, with a reason."""
    desk = Desk()
    room = desk.credits()
    with taken(room, 4):
        hints = [told.retry_after_s for _ in range(4 * PATIENCE) if (told := refusal(room)) is not None]
        assert RETRY_AFTER_S < hints[0] < 2 * hints[0] < hints[-1]
        assert hints == sorted(hints)
        assert desk.ended == []
        refusal(room)
    assert [session for session, _ in desk.ended] == [1]
    assert "credits" in desk.ended[0][1]


def test_who_comes_now_and_then_is_borne_with() -> None:
    """Refusals expire with time: a client with few errors over an hour is not cut off."""
    desk = Desk()
    room = desk.credits()
    with taken(room, 4):
        for _ in range(3600):
            assert refusal(room) is not None
            desk.now += 1 / FORGIVEN_PER_S
    assert desk.ended == []


def test_who_heeds_the_hints_is_never_cut_off() -> None:
    """Three times as many callers as credits that obey the hints are never cut off."""
    desk = Desk()
    room = desk.credits()
    due = [0.0] * 12
    with taken(room, 4):
        for _ in range(5000):
            first = min(range(len(due)), key=due.__getitem__)
            desk.now = max(desk.now, due[first])
            told = refusal(room)
            assert told is not None
            due[first] = desk.now + told.retry_after_s
    assert desk.ended == []


def test_a_full_queue_is_nobodys_fault() -> None:
    """A session within its credits is refused when the queue is full, but never cut off for it."""
    desk = Desk()
    room = desk.credits(queue_limit=4, session_credits=2)
    with taken(room, 2, method=LOOKUP), taken(room, 2, method=LOOKUP, session=2):
        for _ in range(1000):
            told = refusal(room, LOOKUP, session=3)
            assert told is not None
            assert told.retry_after_s == pytest.approx(RETRY_AFTER_S)
    assert desk.ended == []


def test_a_session_that_ends_is_forgotten() -> None:
    """No state remains of a session whose connection is closed."""
    room = Desk().credits()
    with taken(room, 4):
        refusal(room)
    room.forget(1)
    assert (room.running, room._excess, dict(room._running)) == (0, {}, {})
