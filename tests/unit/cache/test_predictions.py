"""Predicted turns: when blocks are brought back, and when that stops."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.cache.test_flights import _far
from tests.unit.cache.world import CONFIG, SOON_S, opened
from tierd.cache.predictions import PAUSES, Predictions
from tierd.cache.prefetches import Order, Outcome, Started
from tierd.core.formats.model import Hint, TierKind, Wanted
from tierd.core.plan import GroupQuery
from tierd.errors import SessionLost
from tierd.policies.returns import LEAST_SEEN, RETRY, WINDOW
from tierd.testing import chain

TOOL = Order(ttl_s=30.0, hint=Hint.TOOL_CALL)


@dataclass
class Timer:
    """A timer of Clock."""

    work: Callable[[], object] | None

    def cancel(self) -> None:
        self.work = None


@dataclass
class Clock:
    """Time and timers that a test moves."""

    now: float = 0.0
    timers: list[tuple[float, int, Timer]] = field(default_factory=list)
    count: Any = field(default_factory=itertools.count)

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(lambda: callback(*args))
        heapq.heappush(self.timers, (self.now + delay, next(self.count), timer))
        return timer

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timers and self.timers[0][0] <= until:
            self.now, _, timer = heapq.heappop(self.timers)
            if timer.work is not None:
                timer.work()
        self.now = until


@dataclass
class Sessions:
    """Sessions with a chain each; a prefetch is used or wasted at once, as the test says."""

    clock: Clock = field(default_factory=Clock)
    outcome: Outcome = field(default_factory=lambda: Outcome(used=1))
    brought: list[tuple[float, Sequence[GroupQuery], Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.predictions = Predictions(self.bring, is_on=True, loop=lambda: self.clock)

    def bring(self, session: int, groups: Sequence[GroupQuery], _: Wanted, order: Order) -> Started:
        if session == 0:
            raise SessionLost("session 0: it has ended; open a session again")
        self.brought.append((self.clock.now, groups, order))
        assert order.ended is not None
        order.ended(self.outcome)
        return Started(len(self.brought), 1)

    def pause(self, number: int, seconds: float | None, *, session: int = 1) -> None:
        """A tool call that takes so long; None: its answer never comes."""
        self.predictions.pause(session, [query(number, 3)], TierKind.HOST, TOOL)
        self.clock.wait(2000.0 if seconds is None else seconds)
        if seconds is not None:
            self.predictions.ask([query(number, 4)])

    def learn(self, seconds: float, *, count: int = LEAST_SEEN + 5) -> None:
        for number in range(count):
            self.pause(number, seconds)


def query(number: int, blocks: int) -> GroupQuery:
    """A chain whose last block is short."""
    return GroupQuery((1,), chain(number, blocks), 16, 16 * blocks - 5)


def test_blocks_come_before_the_expected_return() -> None:
    """After like pauses, a session's blocks are brought once, before it is back, and as a guess."""
    sessions = Sessions()
    sessions.learn(12.0)
    sessions.brought.clear()
    begun = sessions.clock.now
    sessions.pause(99, 12.0)
    ((at, groups, order),) = sessions.brought
    assert begun < at < begun + 12.0
    assert (order.origin, order.ttl_s) == ("predicted", 30.0)
    assert groups[0].hashes.tobytes() == query(99, 3).hashes.tobytes()


def test_a_session_that_is_back_early_needs_nothing() -> None:
    """Its timer ends with its pause."""
    sessions = Sessions()
    sessions.learn(12.0)
    sessions.brought.clear()
    sessions.pause(99, 0.5)
    sessions.clock.wait(2000.0)
    assert sessions.brought == []


def test_rare_returns_bring_nothing() -> None:
    """If most sessions stay away, nothing is brought."""
    sessions = Sessions()
    for number in range(200):
        sessions.pause(number, 12.0 if number % 3 == 0 else None)
    assert len(sessions.brought) <= LEAST_SEEN
    sessions.brought.clear()
    sessions.pause(999, None)
    assert sessions.brought == []


def test_what_is_wasted_stops_it() -> None:
    """If the bytes are wasted although the sessions come back, predictions stop but for rare trials."""
    sessions = Sessions(outcome=Outcome(wasted=1))
    sessions.learn(12.0, count=1000)
    assert len(sessions.brought) <= 1 + 1000 // RETRY + 1
    sessions.outcome = Outcome(used=1)
    sessions.learn(12.0, count=RETRY * WINDOW)
    sessions.brought.clear()
    sessions.learn(12.0, count=10)
    assert len(sessions.brought) == 10


def test_a_session_that_ended_costs_no_turn() -> None:
    """A prefetch that is refused is no outcome: the next prediction is carried out."""
    sessions = Sessions()
    sessions.learn(12.0)
    for number in range(2 * WINDOW):
        sessions.pause(1000 + number, 12.0, session=0)
    sessions.brought.clear()
    sessions.pause(5000, 12.0)
    assert len(sessions.brought) == 1


def test_pauses_are_bounded() -> None:
    """Beyond PAUSES the longest ones are given up, and their timers."""
    sessions = Sessions()
    sessions.learn(12.0)
    for number in range(PAUSES + 50):
        sessions.predictions.pause(1, [query(10_000 + number, 2)], TierKind.HOST, TOOL)
    assert len(sessions.predictions._pauses) == PAUSES
    assert sum(timer.work is not None for *_, timer in sessions.clock.timers) == PAUSES


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_hint_begins_nothing_at_once(*, is_on: bool) -> None:
    """A prefetch with a hint starts no transfer; only with the setting the daemon watches the pause."""
    config = CONFIG + f"[mover]\nprefetch_on_lookup = false\nprefetch_predicted = {str(is_on).lower()}\n"
    async with opened(config) as world:
        await _far(world, chain(1, 4))
        started = world.cache.prefetch(world.session, [world.query(chain(1, 4))], TierKind.HOST, TOOL)
        assert (started.id, started.blocks, world.cache.flights.count) == (0, 0, 0)
        assert len(world.cache.predictions._pauses) == is_on
        world.cache.lookup(world.session, [world.query(chain(1, 4))])
        assert len(world.cache.predictions._pauses) == 0
        assert await world.cache.flights.idle(timeout_s=SOON_S)
