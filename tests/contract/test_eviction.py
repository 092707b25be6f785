"""The contract of `tierd.core.eviction.Eviction`, for every registered policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.named import Path, add, numbered
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction import EVICTION
from tierd.simulator.rivals import RIVALS

ID_LIMIT = 48
EVERY = {**EVICTION, **RIVALS}
BY_PLACE = {"2q", "s3-fifo", "sieve", "w-tinylfu"}
"""Policies in which not every use moves a block."""
BY_WORTH = {"hyperbolic", "reuse-index", "w-tinylfu"}
"""Policies that may rate a block below its successor, at once or later; the core then keeps it."""


class Heard:
    """A policy over blocks; as in the core, the blocks record a use first."""

    def __init__(self, name: str, blocks: Blocks) -> None:
        self.name, self.blocks = name, blocks
        self.policy = EVERY[name](blocks)
        self.track, self.forget, self.victims = self.policy.track, self.policy.forget, self.policy.victims

    def __len__(self) -> int:
        return len(self.policy)

    def touch(self, blocks: np.ndarray, now: float) -> None:
        self.blocks.touch(blocks, now)
        self.policy.touch(blocks, now)


Make = Callable[..., Heard]


@pytest.fixture(params=sorted(EVERY), scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    return lambda blocks=None: Heard(request.param, blocks or numbered(ID_LIMIT))


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


def mask(*pinned: int, size: int = ID_LIMIT) -> np.ndarray:
    flags = np.zeros(size, dtype=bool)
    flags[list(pinned)] = True
    return flags


distinct = st.lists(st.integers(0, ID_LIMIT - 1), unique=True, max_size=12)
uses = st.lists(st.tuples(st.sampled_from(["use", "forget"]), distinct), max_size=40)


def played(policy: Heard, history: list[tuple[str, list[int]]]) -> set[int]:
    """Applies a history as the core does: it tracks blocks before it touches them. Returns
    these."""
    tracked: set[int] = set()
    for now, (verb, blocks) in enumerate(history):
        held = [b for b in blocks if b in tracked]
        if verb == "forget":
            policy.forget(ids(*held))
            tracked -= set(held)
            continue
        policy.touch(ids(*held), float(now))
        policy.track(ids(*(b for b in blocks if b not in tracked)), float(now))
        tracked |= set(blocks)
    return tracked


def order_of(policy: Heard, size: int = ID_LIMIT) -> list[int]:
    """All tracked blocks, coldest first."""
    victims = policy.victims(len(policy), mask(size=size))
    assert victims is not None
    return victims.tolist()


@given(history=uses, wanted=st.integers(0, ID_LIMIT), pinned=distinct)
def test_exactly_as_many_as_asked_or_none(make, history, wanted, pinned):
    """victims returns exactly `count` distinct unpinned tracked blocks, or None if there are
    fewer."""
    policy = make()
    tracked = played(policy, history)
    free = tracked - set(pinned)
    victims = policy.victims(wanted, mask(*pinned))
    if wanted > len(free):
        assert victims is None
    else:
        assert victims is not None and len(victims) == wanted == len(set(victims.tolist()))
        assert victims.dtype == np.int64 and set(victims.tolist()) <= free


@given(history=uses, questions=st.lists(st.tuples(st.integers(0, ID_LIMIT), distinct), max_size=6), later=uses)
def test_a_question_changes_nothing(make, history, questions, later):
    """Calls of victims, with any answers, do not change later answers."""
    asked, silent = make(), make()
    tracked = played(asked, history)
    assert tracked == played(silent, history)
    for wanted, pinned in questions:
        asked.victims(wanted, mask(*pinned))
    assert order_of(asked) == order_of(silent)
    gone = ids(*sorted(tracked))
    for policy in (asked, silent):
        policy.forget(gone)
        played(policy, later)
    assert order_of(asked) == order_of(silent)


@given(history=uses)
def test_equal_calls_give_equal_answers(make, history):
    """Two policies with the same calls agree on the order and the number of all blocks."""
    one, other = make(), make()
    tracked = played(one, history)
    played(other, history)
    assert order_of(one) == order_of(other)
    assert set(order_of(one)) == tracked and len(one) == len(tracked)


@given(history=uses, wanted=st.integers(1, ID_LIMIT))
def test_fewer_victims_are_the_first_of_more(make, history, wanted):
    """victims(n) returns the first n of all victims, coldest first."""
    policy = make()
    tracked = played(policy, history)
    wanted = min(wanted, len(tracked))
    victims = policy.victims(wanted, mask())
    assert victims is not None and victims.tolist() == order_of(policy)[:wanted]


@given(history=uses, pinned=distinct)
def test_pinning_removes_from_the_order_and_moves_nothing(make, history, pinned):
    """Pins do not change the order of the other blocks."""
    policy = make()
    tracked = played(policy, history)
    free = tracked - set(pinned)
    victims = policy.victims(len(free), mask(*pinned))
    assert victims is not None
    assert victims.tolist() == [b for b in order_of(policy) if b in free]


def test_a_forgotten_block_returns_as_a_stranger(make):
    """An id that was hot, forgotten and given to another block is as cold as any new block."""
    policy = make()
    policy.track(ids(7), 0.0)
    for now in range(1, 50):
        policy.touch(ids(7), float(now))
    policy.forget(ids(7))
    policy.blocks.fade(ids(7))
    assert add(policy.blocks, [(1000,)]).tolist() == [7]
    policy.track(ids(7, 1), 50.0)
    policy.touch(ids(1), 51.0)
    assert order_of(policy) == [7, 1]


def test_later_in_the_array_is_hotter(make):
    """Within one call, later blocks count as used later."""
    policy = make()
    policy.track(ids(5, 3, 9, 1), 0.0)
    assert order_of(policy) == [5, 3, 9, 1]
    policy.touch(ids(9, 5, 1, 3), 0.0)
    assert policy.name in BY_PLACE or order_of(policy) == [9, 5, 1, 3]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=30))
def test_tails_leave_before_their_prefix(make, requests):
    """If whole requests are used, last block first, no block is colder than one that follows it."""
    policy = make(Blocks())
    known: dict[Path, int] = {}
    for now, (depth, branch, more) in enumerate(requests):
        path = (0,) * depth + (branch,) + (1,) * more
        chain = [path[: i + 1] for i in range(len(path))]
        used = [known[p] for p in reversed(chain) if p in known]
        new = [p for p in chain if p not in known]
        policy.touch(ids(*used), float(now))
        known.update(zip(new, add(policy.blocks, new).tolist(), strict=True))
        policy.track(ids(*(known[p] for p in reversed(new))), float(now))
        policy.policy.touch(ids(*used), float(now))  # blocks before a put count as used, for the order
    rank = {b: i for i, b in enumerate(order_of(policy, size=len(known)))}
    colder = [p for p, b in known.items() if len(p) > 1 and rank[b] > rank[known[p[:-1]]]]
    assert policy.name in BY_WORTH or not colder


def test_ids_may_be_large_and_sparse(make):
    """Columns grow for a greater id and keep their content."""
    policy = make(numbered(5_000))
    policy.track(ids(2), 0.0)
    policy.track(ids(4_999), 1.0)
    policy.track(ids(2_500), 2.0)
    assert order_of(policy, size=5_000) == [2, 4_999, 2_500]


def test_nothing_is_no_fault(make):
    """Empty arrays and a count of zero are valid, for an empty policy too."""
    policy = make()
    for call in (lambda: policy.track(ids(), 0.0), lambda: policy.touch(ids(), 0.0), lambda: policy.forget(ids())):
        call()
    assert len(policy) == 0
    assert policy.victims(1, mask()) is None
    none = policy.victims(0, mask())
    assert none is not None and len(none) == 0
