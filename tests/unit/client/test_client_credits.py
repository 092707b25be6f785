"""The SDK's side of credits: turns in order, none lost, and retries of refused calls after the hint."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tierd.client.connect.cancellation import Cancellation, Cancelled
from tierd.client.connect.credits import TRIES, Credits, pause_s
from tierd.errors import Overloaded

SOON_S = 10.0


def test_no_more_turns_than_credits() -> None:
    """At most as many threads as credits call at one time, and all get their turn."""
    own, inside, most, done = Credits(3), 0, 0, 0
    lock = threading.Lock()

    def call() -> None:
        nonlocal inside, most, done
        with own.turn("Lookup", timeout_s=SOON_S):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with lock:
                inside -= 1
                done += 1

    threads = [threading.Thread(target=call) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert (most, done) == (3, 30)


def test_no_turn_in_time() -> None:
    """A call without a turn in its time is Overloaded, and the turn that comes later is not lost."""
    own = Credits(1)
    with own.turn("Lookup", timeout_s=SOON_S):
        with pytest.raises(Overloaded, match="credits"), own.turn("Lookup", timeout_s=0.01):
            pass
        with own.turn("Release", timeout_s=0.01):  # it gives a resource back, so it never waits
            pass
    with own.turn("Lookup", timeout_s=0.01) as left_s:
        assert 0 <= left_s <= 0.01


def test_who_waits_no_longer_leaves_the_queue() -> None:
    """Calls that time out vanish from the queue, and the next waiter is served."""
    own = Credits(1)
    with own.turn("Lookup", timeout_s=SOON_S):
        for _ in range(20):
            with pytest.raises(Overloaded), own.turn("Lookup", timeout_s=0.001):
                pass
        assert len(own._waiting) == 0
        waiter = own.ask("Lookup")
    assert waiter is not None
    waiter.result(SOON_S)
    own.give("Lookup")


def test_no_number_no_bound() -> None:
    """A daemon that names no credits sets no bound."""
    own = Credits(0)
    with own.turn("Lookup", timeout_s=0), own.turn("Lookup", timeout_s=0):
        pass


def test_who_is_stopped_waits_no_longer() -> None:
    """A verb that is stopped while it waits for a turn ends, and costs no credit."""
    own, stop, ended = Credits(1), Cancellation(), queue.SimpleQueue[str]()

    def call() -> None:
        try:
            with own.turn("Lookup", timeout_s=SOON_S):
                ended.put("had its turn")
        except Cancelled:
            ended.put("stopped")

    with own.turn("Lookup", timeout_s=SOON_S):
        thread = threading.Thread(target=stop.around, args=(call,))
        thread.start()
        while not own._waiting:
            assert thread.is_alive()
        stop.set()
        assert ended.get(timeout=SOON_S) == "stopped"
        assert not own._waiting
    with own.turn("Lookup", timeout_s=0.01):
        pass
    thread.join(SOON_S)


def test_pauses() -> None:
    """A retry comes after one to two times the hint: not without hint, too often or past the deadline."""
    told = Overloaded("x", retry_after_s=0.1)
    pauses = [pause_s(told, tries=1, left_s=10.0) or 0.0 for _ in range(100)]
    assert 0.1 <= min(pauses) < max(pauses) <= 0.2
    assert pause_s(Overloaded("x"), tries=1, left_s=10.0) is None
    assert pause_s(told, tries=TRIES, left_s=10.0) is None
    assert pause_s(told, tries=1, left_s=0.05) is None
