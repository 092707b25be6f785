"""The times at which notices are read."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.cache.world import SOON_S
from tierd.client.session import notices as client
from tierd.server.session import notice_polling
from tierd.server.session.notice_polling import NoticePolling


class Heard:
    """Counts reads by session, and wakes a task that waits for the next one."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._next = asyncio.Event()

    def hear(self, session: int) -> None:
        """Counts one read."""
        self.counts[session] = self.counts.get(session, 0) + 1
        self._next.set()

    async def wait(self) -> None:
        """Waits for the next read."""
        self._next.clear()
        async with asyncio.timeout(SOON_S):
            await self._next.wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls start sooner, and end sooner."""
    monkeypatch.setattr(notice_polling, "LOOK_S", 0.01)
    monkeypatch.setattr(notice_polling, "KEPT_S", 0.05)


async def test_an_answer_is_followed_by_looks_and_then_by_none() -> None:
    """An answer reads a session's notices at once and until KEPT_S later; then the timer stops."""
    heard = Heard()
    its = NoticePolling(heard.hear)
    its.answered(7)
    assert heard.counts == {7: 1}
    begun = asyncio.get_running_loop().time()
    while its._timer is not None:
        await heard.wait()
        last_s = asyncio.get_running_loop().time() - begun
        await asyncio.sleep(0)
    assert heard.counts[7] >= 2 and last_s >= notice_polling.KEPT_S and not its._answered


async def test_a_look_that_takes_long_is_nobodys_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session read within KEPT_S of its answer is polled again, however long the other reads take."""
    heard, loop, spent_s = Heard(), asyncio.get_running_loop(), 0.0
    real = loop.time

    def hear(session: int) -> None:
        nonlocal spent_s
        heard.hear(session)
        if session == 8:
            spent_s += notice_polling.KEPT_S

    monkeypatch.setattr(loop, "time", lambda: real() + spent_s)
    its = NoticePolling(hear)
    its.answered(8)
    its._answered = {7: loop.time() - notice_polling.KEPT_S / 2, 8: loop.time()}
    its._look()
    assert 7 in its._answered
    its.close()


async def test_who_wants_room_has_all_heard() -> None:
    """When room is needed, every recently answered session is read, and no other."""
    heard = Heard()
    its = NoticePolling(heard.hear)
    its.answered(7)
    its.answered(8)
    its.read_all()
    assert heard.counts == {7: 2, 8: 2}
    its.close()


def test_clients_give_back_before_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client stops sending notices before the daemon's last poll."""
    monkeypatch.undo()
    assert client.NOTICE_S <= notice_polling.KEPT_S
