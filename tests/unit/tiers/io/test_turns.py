"""Turns at a disk: reads and writes wait for their own kind alone, and writes leave the disk to reads where there are some."""

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
    """Four of each kind."""
    return Turns(4)


def fill(turns: Turns, kind: Kind) -> int:
    """Takes all turns of a kind that there are; how many."""
    count = 0
    while turns.take(kind, timeout_s=AT_ONCE_S):
        count += 1
    return count


def pass_by(turns: Turns, kind: Kind, count: int = 1) -> None:
    """So many calls come and go, one after another."""
    for _ in range(count):
        assert turns.take(kind, timeout_s=AT_ONCE_S)
        turns.give(kind)


def until(is_so: Callable[[], bool]) -> None:
    """Gives the other threads their time until it is."""
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
    """So many writes where there are no reads, and so many reads, however many writes there are."""
    assert fill(turns, "write") == 4
    assert fill(turns, "read") == 4


def test_beside_a_read_writes_have_half(turns: Turns) -> None:
    """As long as a read is at the disk, however many writes that takes."""
    assert turns.take("read", timeout_s=AT_ONCE_S)
    pass_by(turns, "write", 2 * ALONE)
    assert fill(turns, "write") == 2


def test_after_a_read_writes_have_half_for_a_while(turns: Turns) -> None:
    """For so many writes after the last read has ended; then they have all turns again."""
    assert turns.take("read", timeout_s=AT_ONCE_S)
    pass_by(turns, "write", ALONE)
    turns.give("read")
    pass_by(turns, "write", ALONE - 3)
    assert fill(turns, "write") == 2
    turns.give("write")
    assert fill(turns, "write") == 3


def test_a_single_turn_is_not_halved() -> None:
    """With one turn of each kind a write has it beside a read too."""
    turns = Turns(1)
    assert fill(turns, "read") == 1
    assert fill(turns, "write") == 1


def test_turns_are_had_in_order(turns: Turns) -> None:
    """A turn that is given back is his who has waited longest, and nobody's who comes just then; who waits for the other kind has none."""
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
        for _ in range(3):  # of four, until fewer than half are left
            turns.give("write")
        assert write.result(SOON_S)


def test_all_who_wait_for_writes_go_on_when_these_are_alone(turns: Turns) -> None:
    """The write that ends their time beside reads lets as many go on as there are turns, though only one came back."""
    pass_by(turns, "read")
    pass_by(turns, "write", ALONE - 3)
    assert fill(turns, "write") == 2
    with ThreadPoolExecutor(3) as threads:
        waiting = wait_in(threads, turns, "write", 3)
        turns.give("write")
        assert all(each.result(SOON_S) for each in waiting)
    assert turns.taken["write"] == 4


def test_who_has_waited_in_vain_has_no_turn(turns: Turns) -> None:
    """Nor is one kept for him: what comes back is the next one's."""
    fill(turns, "read")
    assert not turns.take("read", timeout_s=0.01)
    turns.give("read")
    assert turns.taken["read"] == 3 and fill(turns, "read") == 1


def test_no_turn_is_lost_among_many() -> None:
    """Threads that take and give turns of both kinds, some of which give up waiting, leave none taken and nobody waiting."""
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
