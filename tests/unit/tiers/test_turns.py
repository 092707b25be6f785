"""Turns at a disk: reads and writes wait for their own kind alone, and writes leave the disk to reads where there are some."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tierd.tiers.calls import Kind
from tierd.tiers.turns import ALONE, Turns

AT_ONCE_S, SOON_S = 0.0, 10.0


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


def test_a_single_turn_is_not_halved(turns: Turns) -> None:
    """With one turn of each kind a write has it beside a read too."""
    turns = Turns(1)
    assert fill(turns, "read") == 1
    assert fill(turns, "write") == 1


def test_who_waits_has_the_turn_that_is_given_back(turns: Turns) -> None:
    """As many go on as turns of their kind come back, and who waits for the other kind does not."""
    fill(turns, "write")
    fill(turns, "read")
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(turns.take, "read", timeout_s=SOON_S) for _ in range(2)]
        turns.give("read")
        turns.give("read")
        assert [each.result(SOON_S) for each in waiting] == [True, True]
    assert not turns.take("write", timeout_s=AT_ONCE_S)


def test_all_who_wait_for_writes_go_on_when_these_are_alone(turns: Turns) -> None:
    """The write that ends their time beside reads lets as many go on as there are turns, though only one came back."""
    pass_by(turns, "read")
    pass_by(turns, "write", ALONE - 3)
    assert fill(turns, "write") == 2
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(turns.take, "write", timeout_s=SOON_S) for _ in range(3)]
        turns.give("write")
        assert all(each.result(SOON_S) for each in waiting)
    assert turns.taken["write"] == 4
