"""Turns at a disk: each kind waits only for itself, and writes have half their turns beside reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tierd.tiers.io.calls import Kind
from tierd.tiers.io.turns import ALONE, Turns

AT_ONCE_S, SOON_S, LONG_S = 0.0, 10.0, 60.0


@pytest.fixture
def turns() -> Turns:
    """Four turns of each kind."""
    return Turns(4)


def fill(turns: Turns, kind: Kind) -> int:
    """Takes all free turns of a kind and returns their number."""
    count = 0
    while turns.take(kind, timeout_s=AT_ONCE_S):
        count += 1
    return count


def pass_by(turns: Turns, kind: Kind, count: int = 1) -> None:
    """Takes and gives back this many turns, one after another."""
    for _ in range(count):
        assert turns.take(kind, timeout_s=AT_ONCE_S)
        turns.give(kind)


def until(is_so: Callable[[], bool]) -> None:
    """Lets other threads run until the condition holds."""
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0)


def wait_in(threads: ThreadPoolExecutor, turns: Turns, kind: Kind, count: int) -> list[Future[bool]]:
    """Threads that wait for a turn, in this order."""
    begun = list[Future[bool]]()
    for _ in range(count):
        before = len(turns.waiting[kind])
        begun.append(threads.submit(turns.take, kind, timeout_s=LONG_S))
        until(lambda before=before: len(turns.waiting[kind]) > before)  # type: ignore[misc]
    return begun


def test_no_kind_has_more_than_its_turns(turns: Turns) -> None:
    """Writes without reads have all their turns, and so do reads beside any number of writes."""
    assert fill(turns, "write") == 4
    assert fill(turns, "read") == 4


def test_beside_a_read_writes_have_half(turns: Turns) -> None:
    """While a read is at the disk, writes have half their turns, however many of them pass."""
    assert turns.take("read", timeout_s=AT_ONCE_S)
    pass_by(turns, "write", 2 * ALONE)
    assert fill(turns, "write") == 2


def test_after_a_read_writes_have_half_for_a_while(turns: Turns) -> None:
    """Writes have half their turns for ALONE writes after the last read, and then all of them."""
    assert turns.take("read", timeout_s=AT_ONCE_S)
    pass_by(turns, "write", ALONE)
    turns.give("read")
    pass_by(turns, "write", ALONE - 3)
    assert fill(turns, "write") == 2
    turns.give("write")
    assert fill(turns, "write") == 3


def test_a_single_turn_is_not_halved() -> None:
    """With one turn of each kind, a write has it beside a read too."""
    turns = Turns(1)
    assert fill(turns, "read") == 1
    assert fill(turns, "write") == 1


def test_turns_are_had_in_order(turns: Turns) -> None:
    """A returned turn goes to the longest waiter of its kind, not to a newcomer or to the other kind."""
    fill(turns, "write")
    fill(turns, "read")
    with ThreadPoolExecutor(4) as threads:
        (write,) = wait_in(threads, turns, "write", 1)
        reads = wait_in(threads, turns, "read", 2)
        turns.give("read")
        assert reads[0].result(SOON_S)
        assert not turns.take("read", timeout_s=AT_ONCE_S) and not reads[1].done() and not write.done()
        turns.give("read")
        assert reads[1].result(SOON_S) and not write.done()
        for _ in range(3):  # of four, until fewer than half are taken
            turns.give("write")
        assert write.result(SOON_S)


def test_all_who_wait_for_writes_go_on_when_these_are_alone(turns: Turns) -> None:
    """The write that ends the half share wakes as many waiters as there are turns, not only one."""
    pass_by(turns, "read")
    pass_by(turns, "write", ALONE - 3)
    assert fill(turns, "write") == 2
    with ThreadPoolExecutor(3) as threads:
        waiting = wait_in(threads, turns, "write", 3)
        turns.give("write")
        assert all(each.result(SOON_S) for each in waiting)
    assert turns.taken["write"] == 4


def test_who_has_waited_in_vain_has_no_turn(turns: Turns) -> None:
    """A thread whose wait times out gets no turn, and none is reserved for it: the next thread gets it."""
    fill(turns, "read")
    assert not turns.take("read", timeout_s=0.01)
    turns.give("read")
    assert turns.taken["read"] == 3 and fill(turns, "read") == 1


def test_no_turn_is_lost_among_many() -> None:
    """After threads take, give back or time out, no turn is taken and no thread waits."""
    turns, stop = Turns(2), threading.Event()

    def come_and_go(kind: Kind) -> None:
        while not stop.is_set():
            if turns.take(kind, timeout_s=0.0005):
                assert 0 < turns.taken[kind] <= 2
                turns.give(kind)

    with ThreadPoolExecutor(8) as threads:
        work = [threads.submit(come_and_go, kind) for kind in ("read", "write") * 4]  # type: ignore[arg-type]
        stop.wait(0.3)
        stop.set()
        for each in work:
            each.result(SOON_S)
    assert turns.taken == {"read": 0, "write": 0} and not any(turns.waiting.values())
