"""Verbs in threads that a caller may stop: stopped once, in any wait, with undisturbed cleanup."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest

from tierd.client.connect import cancellation, threads
from tierd.client.connect.calls import left_s
from tierd.client.connect.cancellation import Cancellation, Cancelled
from tierd.client.connect.threads import Threads
from tierd.errors import DeadlineExceeded, Unavailable

SOON_S = 10.0


def stopped_in(verb: Callable[[], object], begun: threading.Event) -> BaseException | None:
    """Stops a verb after it has begun; returns the exception that ended it."""
    stop, ended = Cancellation(), list[BaseException | None]()

    def work() -> None:
        try:
            stop.around(verb)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(SOON_S)
    stop.set()
    thread.join(SOON_S)
    return ended[0]


def test_stopped_in_a_pause() -> None:
    """A stop ends a pause at once."""
    begun = threading.Event()

    def verb() -> None:
        begun.set()
        cancellation.pause(60 * SOON_S)

    assert isinstance(stopped_in(verb, begun), Cancelled)


def test_stopped_in_a_wait() -> None:
    """A stop calls the wait's end function, and the verb raises Cancelled, not the resulting error."""
    begun, ended = threading.Event(), threading.Event()

    def verb() -> None:
        with cancellation.ended_by(ended.set):
            begun.set()
            assert ended.wait(SOON_S)
            raise Unavailable("the wait was ended")

    assert isinstance(stopped_in(verb, begun), Cancelled)


def test_told_before_it_goes_on() -> None:
    """Work that cannot be interrupted runs to its end, and no work follows it."""
    begun, stopped, done = threading.Event(), threading.Event(), list[str]()
    stop = Cancellation()

    def first() -> None:
        begun.set()
        assert stopped.wait(SOON_S)
        done.append("first")

    def verb() -> None:
        first()
        left_s(time.monotonic() + SOON_S)
        done.append("second")

    def work() -> None:
        with pytest.raises(Cancelled):
            stop.around(verb)
        done.append("cancelled")

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(SOON_S)
    stop.set()
    stopped.set()
    thread.join(SOON_S)
    assert done == ["first", "cancelled"]


def test_what_it_gives_back_is_not_disturbed() -> None:
    """A verb is stopped once: its cleanup then runs and waits as usual."""
    begun, done, waited = threading.Event(), list[str](), list[str]()

    def wait() -> None:
        with cancellation.ended_by(lambda: waited.append("ended")):
            done.append("given back")

    def verb() -> None:
        try:
            begun.set()
            cancellation.pause(60 * SOON_S)
        finally:
            cancellation.pause(0.001)
            left_s(time.monotonic() + SOON_S)
            wait()

    assert isinstance(stopped_in(verb, begun), Cancelled)
    assert (done, waited) == (["given back"], [])


def test_cancelled_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """A cancel returns only after the verb's thread has ended, and the verb's error is not logged."""
    own, begun, at_it, going_on = Threads(), threading.Event(), threading.Event(), threading.Event()

    def verb() -> None:
        at_it.set()
        with cancellation.ended_by(going_on.set):
            begun.set()
            assert going_on.wait(SOON_S)
        at_it.clear()
        cancellation.check()

    async def cancel() -> None:
        task = asyncio.ensure_future(own.run(verb, timeout_s=SOON_S))
        await asyncio.to_thread(begun.wait, SOON_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not at_it.is_set()

    asyncio.run(cancel())
    own.close()
    gc.collect()
    assert not caplog.records


async def test_a_verb_that_does_not_end_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel of a verb that cannot be interrupted returns after a bounded time."""
    monkeypatch.setattr(threads, "STOP_S", 0.01)
    own, begun, over = Threads(), threading.Event(), threading.Event()

    def verb() -> None:
        begun.set()
        assert over.wait(SOON_S)

    task = asyncio.ensure_future(own.run(verb, timeout_s=SOON_S))
    await asyncio.to_thread(begun.wait, SOON_S)
    task.cancel()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(asyncio.CancelledError):
            await task
    over.set()
    own.close()


async def test_no_thread_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that gets no thread in its time does not run and raises; one with more time gets its turn."""
    monkeypatch.setattr(threads, "THREADS", 1)
    own, over, begun = Threads(), threading.Event(), list[int]()
    first = asyncio.ensure_future(own.run(lambda: over.wait(SOON_S), timeout_s=SOON_S))
    await asyncio.sleep(0)  # it has its thread
    with pytest.raises(DeadlineExceeded, match="all 1 threads were busy"):
        await own.run(lambda: begun.append(1), timeout_s=0.01)
    patient = asyncio.ensure_future(own.run(lambda: begun.append(2), timeout_s=SOON_S))
    cancelled = asyncio.ensure_future(own.run(lambda: begun.append(3), timeout_s=SOON_S))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    over.set()
    assert await first
    await patient
    assert begun == [2]
    own.close()


async def test_cancelled_twice_when_it_has_ended() -> None:
    """Repeated cancels during a verb's end still return only after the verb has ended."""
    own, begun, over, at_it = Threads(), threading.Event(), threading.Event(), threading.Event()

    def verb() -> None:
        at_it.set()
        begun.set()
        assert over.wait(SOON_S)
        at_it.clear()

    task = asyncio.ensure_future(own.run(verb, timeout_s=SOON_S))
    await asyncio.to_thread(begun.wait, SOON_S)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    over.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not at_it.is_set()
    own.close()
