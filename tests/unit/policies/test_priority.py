"""Priority against the plainest equivalent program: a sort by level and last use."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.named import numbered
from tierd.core.formats.model import PRIORITY_DEFAULT
from tierd.core.index.priorities import Priorities, raise_said, said_by
from tierd.policies.eviction import retention
from tierd.policies.eviction.late import Late, merged
from tierd.policies.eviction.priority import Priority
from tierd.policies.eviction.retention import Ends

BLOCKS = 24
UNIX_S = 1_700_000_000.5
"""An offset that reveals a `now` in place of Unix time."""
NONE_PINNED = np.zeros(BLOCKS, bool)


@dataclass
class Plain:
    """Tracked blocks with the number of their last use. said: each block's priority and its end."""

    uses: dict[int, int] = field(default_factory=dict)
    said: dict[int, tuple[int, float]] = field(default_factory=dict)
    count: int = 0

    def use(self, blocks: list[int]) -> None:
        for block in blocks:
            self.count += 1
            self.uses[block] = self.count

    def order(self, now: float) -> list[int]:
        def level(block: int) -> int:
            priority, until = self.said.get(block, (PRIORITY_DEFAULT, np.inf))
            return priority if until > now else PRIORITY_DEFAULT

        return sorted(self.uses, key=lambda block: (level(block), self.uses[block]))


class Played:
    """The policy and the plain program under the same calls."""

    def __init__(self) -> None:
        self.blocks, self.plain, self.now = numbered(BLOCKS), Plain(), 0.0
        self.blocks.unix_s = UNIX_S
        self.policy = Priority(self.blocks)

    def use(self, blocks: list[int]) -> None:
        held = [b for b in blocks if b in self.plain.uses]
        new = [b for b in blocks if b not in self.plain.uses]
        self.policy.touch(np.array(held, np.int64), self.now)
        self.policy.track(np.array(new, np.int64), self.now)
        self.plain.use([*held, *new])

    def say(self, blocks: list[int], priority: int, retention_s: int) -> None:
        """Sets priorities: untracked blocks as in a first put, tracked ones as in another put."""
        time_s = UNIX_S + self.now
        words = said_by(np.array([priority], np.uint8), np.array([retention_s], np.uint32), time_s=time_s)
        new = np.array([b for b in blocks if b not in self.plain.uses], np.int64)
        self.blocks.priority[new], self.blocks.until_s[new] = words
        held = np.array([b for b in blocks if b in self.plain.uses], np.int64)
        changed = raise_said(self.blocks, held, words.at(np.zeros(len(held), np.int64)), time_s)
        self.policy.said(changed, self.now)
        until = np.ceil(time_s + retention_s) - UNIX_S if retention_s else np.inf
        self.plain.said |= dict.fromkeys([*new.tolist(), *changed.tolist()], (priority, until))
        self.plain.use(changed.tolist())

    def forget(self, blocks: list[int]) -> None:
        held = [b for b in blocks if b in self.plain.uses]
        self.policy.forget(np.array(held, np.int64))
        for block in held:
            del self.plain.uses[block]

    def order(self) -> list[int]:
        self.policy.pass_time(self.now)
        victims = self.policy.victims(len(self.policy), NONE_PINNED)
        assert victims is not None
        return victims.tolist()


some = st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1, max_size=8)
events = st.one_of(
    st.tuples(st.just("use"), some),
    st.tuples(st.just("forget"), some),
    st.tuples(st.just("say"), some, st.sampled_from([0, 20, 35, 36, 90, 100]), st.sampled_from([0, 1, 3, 10])),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 4.0])),
)


@given(st.lists(events, min_size=20, max_size=60))
def test_the_order_is_a_sort_by_level_and_last_use(history: list[tuple]) -> None:
    """After any calls and waits, the lowest level comes first, in it the least recently used block."""
    played = Played()
    for verb, *what in history:
        if verb == "wait":
            played.now += what[0]
        else:
            getattr(played, verb)(*what)
        assert played.order() == played.plain.order(played.now)
        assert len(played.policy) == len(played.plain.uses)


def test_what_was_said_holds_for_its_time_and_no_longer() -> None:
    """A retained block is last until its end, then takes the place of its last use."""
    played = Played()
    played.say([3], 90, 10)
    played.use([1, 3, 2])
    played.now = 9.9
    assert played.order() == [1, 2, 3]
    played.now = 11.0
    assert played.order() == [1, 3, 2]
    played.use([3])
    assert played.order() == [1, 2, 3]


def test_those_whose_time_has_run_out_are_among_the_rest() -> None:
    """After its end, each block takes the place of its last use among the others."""
    played = Played()
    for block, priority, retention_s in ((7, 90, 5), (3, 60, 10), (5, 20, 5)):
        played.say([block], priority, retention_s)
    played.use([1, 7, 2, 3, 5, 4])
    for now, order in ((0.0, [5, 1, 2, 4, 3, 7]), (7.0, [1, 7, 2, 5, 4, 3]), (20.0, [1, 7, 2, 3, 5, 4])):
        played.now = now
        assert played.order() == order


def test_a_low_priority_runs_out_too() -> None:
    """A low priority also ends; the block then takes the place of its last use."""
    played = Played()
    played.say([2], 0, 10)
    played.use([1, 2, 3])
    assert played.order() == [2, 1, 3]
    played.now = 11.0
    assert played.order() == [1, 2, 3]


def test_a_forgotten_block_takes_its_time_with_it() -> None:
    """If another block reuses a retained block's id, the old end does not move it."""
    played = Played()
    played.say([2], 90, 5)
    played.use([1, 2])
    played.forget([2])
    played.blocks.priority[2], played.blocks.until_s[2] = 81, 0
    played.use([2, 3])
    played.now = 10.0
    assert played.order() == [1, 3, 2]


def test_notes_of_ends_are_bounded() -> None:
    """Retained blocks that come and go cause at most 2 * blocks + 4096 notes."""
    played = Played()
    played.say(list(range(BLOCKS)), 90, 10_000)
    for _ in range(1000):
        played.use(list(range(BLOCKS)))
        played.forget(list(range(BLOCKS)))
    assert len(played.policy._ends) <= 2 * BLOCKS + 4096
    played.use(list(range(BLOCKS)))
    played.now = 10_001.0
    played.policy.pass_time(played.now)
    assert len(played.policy._late) == BLOCKS


def test_notes_that_are_right_are_kept() -> None:
    """`trim` drops only the notes of blocks that left or have another end."""
    ends = Ends()
    for _ in range(2000):
        ends.note(np.array([1, 2, 3]), np.array([50, 60, 60], np.uint32))
    ends.trim(3, lambda ids, second: (ids != 3) & (second > 0))
    assert len(ends) == 2
    assert (ends.due(50.0).tolist(), ends.due(59.0).tolist(), ends.due(60.0).tolist()) == ([1], [], [2])


def test_many_times_that_run_out_at_once_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call returns about DUE_LIMIT of the due blocks, the next calls the rest."""
    monkeypatch.setattr(retention, "DUE_LIMIT", 4)
    ends, told = Ends(), list[list[int]]()
    for first in range(0, 12, 3):
        ends.note(np.arange(first, first + 3), np.full(3, 50 + first % 2, np.uint32))
    while len(ends):
        told.append(ends.due(60.0).tolist())
    assert sorted(told[0] + told[1]) == list(range(12)) and [len(part) for part in told] == [6, 6]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 63), unique=True, max_size=20)), max_size=20))
def test_late_is_sorted_whatever_comes_and_goes(history: list[tuple[bool, list[int]]]) -> None:
    """`Late` returns exactly its blocks, by last use."""
    late, held = Late(), {}
    for number, (comes, blocks) in enumerate(history):
        if comes:
            new = [b for b in blocks if b not in held]
            stamps = {b: 1 + (b * 37 + number * 101) % 1009 * 64 + b for b in new}
            late.add(np.array(new, np.int64), np.array(list(stamps.values()), np.int64))
            held |= stamps
        else:
            gone = [b for b in blocks if b in held]
            late.remove(np.array(gone, np.int64))
            held = {b: s for b, s in held.items() if b not in gone}
        assert [b for piece in late.walk() for b in piece.tolist()] == sorted(held, key=lambda b: held[b])
        assert len(late) == len(held)


pieces = st.lists(st.lists(st.integers(0, 40), max_size=5), max_size=6)


@given(pieces, pieces)
def test_two_orders_merge(one: list[list[int]], other: list[list[int]]) -> None:
    """Two ascending orders in pieces, some of them empty, merge into one ascending order."""

    def cut(parts: list[list[int]]) -> list[np.ndarray]:
        flat = iter(sorted(n for part in parts for n in part))
        return [np.array([next(flat) for _ in part], np.int64) for part in parts]

    found = np.concatenate([np.zeros(0, np.int64), *merged(iter(cut(one)), iter(cut(other)), lambda ids: ids)])
    assert found.tolist() == sorted(n for part in [*one, *other] for n in part)


def test_words_are_compared_at_their_time() -> None:
    """The greater priority wins, then the later end. An expired or missing one is the default."""
    codes, ends = [0, 36, 36, 91, 91, 91, 1], [0, 0, 200, 0, 150, 90, 0]
    words = Priorities(np.array(codes, np.uint8), np.array(ends, np.uint32))
    ranks = words.ranks(100.0)
    assert words.priorities(100.0).tolist() == [35, 35, 35, 90, 90, 35, 0]
    assert ranks[0] == ranks[1] == ranks[5] > ranks[2] > ranks[6]
    assert ranks[3] > ranks[4] > ranks[0]
