"""Clients' reports of one-sided gets, and the work that these reports must not delay."""

from __future__ import annotations

import asyncio

import pytest

from tierd.client.session.notices import MESSAGE_MAX_BYTES, UNASKED_LIMIT
from tierd.errors import NotFound
from tierd.server.session import notices
from tierd.server.session.hit_reports import LIMIT, SESSION_LIMIT, TIMES_LIMIT, HitReports

Heard = list[tuple[int, bytes, int]]


@pytest.fixture
def heard() -> Heard:
    return []


def hearsay(heard: Heard) -> HitReports:
    return HitReports(lambda session, group, *, times: heard.append((session, group, times)))


async def test_one_at_a_time_between_other_work(heard: Heard) -> None:
    """Each loop step processes one report, so other work runs; equal reports merge at the first place."""
    its = hearsay(heard)
    for group in (b"a", b"b", b"a", b"c"):
        its.add(7, group)
    steps = []
    for _ in range(4):
        await asyncio.sleep(0)
        steps.append(len(heard))
    assert steps == [1, 2, 3, 3]
    assert heard == [(7, b"a", 2), (7, b"b", 1), (7, b"c", 1)]


async def test_none_is_passed_over(heard: Heard) -> None:
    """All sessions' reports are processed, however many repeat; repeats of one count up to a limit."""
    its = hearsay(heard)
    for _ in range(600):
        for session in range(20):
            its.add(session, b"same")
        await asyncio.sleep(0)
    assert {session for session, *_ in heard} == set(range(20))
    for _ in range(2 * TIMES_LIMIT):
        its.add(99, b"again")
    its.finish(99)
    assert heard[-1] == (99, b"again", TIMES_LIMIT)


async def test_what_was_told_before_the_end_of_a_session_is_heard_before_it(heard: Heard) -> None:
    """A session's end waits for its own reports, and for no other's."""
    its = hearsay(heard)
    for session, group in ((1, b"a"), (2, b"b"), (1, b"c")):
        its.add(session, group)
    its.finish(1)
    assert heard == [(1, b"a", 1), (1, b"c", 1)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert heard[2:] == [(2, b"b", 1)] and not its._counts


async def test_a_client_that_tells_much(heard: Heard) -> None:
    """Reports beyond the session's or the total bound are dropped; processed reports free room."""
    its = hearsay(heard)
    for session in range(2 * LIMIT // SESSION_LIMIT):
        for number in range(2 * SESSION_LIMIT):
            its.add(session, number.to_bytes(2))
    its.add(0, (0).to_bytes(2))  # merges with one that waits
    for _ in range(LIMIT + 1):
        await asyncio.sleep(0)
    assert len(heard) == LIMIT and max(session for session, *_ in heard) == LIMIT // SESSION_LIMIT - 1
    its.add(99, b"more")
    await asyncio.sleep(0)
    assert heard[-1] == (99, b"more", 1) and not its._counts


@pytest.mark.parametrize("error", [NotFound("gone"), KeyError("a fault")])
async def test_one_that_fails_keeps_none_of_the_others(heard: Heard, error: Exception) -> None:
    """A report that fails does not stop the next."""

    def hear(session: int, group: bytes, *, times: int) -> None:
        if group == b"bad":
            raise error
        heard.append((session, group, times))

    its = HitReports(hear)
    for group in (b"bad", b"good"):
        its.add(7, group)
    for _ in range(3):
        await asyncio.sleep(0)
    assert heard == [(7, b"good", 1)]


def test_clients_keep_to_the_bounds() -> None:
    """A client's reports between two answers fit the bound, and each fits a message."""
    assert UNASKED_LIMIT <= SESSION_LIMIT and MESSAGE_MAX_BYTES == notices.MESSAGE_BYTES
