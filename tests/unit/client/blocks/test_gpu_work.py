"""Waits for GPU work: events and streams of any framework, never longer than the deadline."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tierd.client.blocks.gpu_work import is_done, pauses
from tierd.errors import DeadlineExceeded, InvalidArgument


class Event:
    """Like torch's: done after this many queries."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def query(self) -> bool:
        self.asks -= 1
        return self.asks < 0


def test_each_framework_says_done_in_its_way() -> None:
    """torch's query(), cupy's done and a future's done() work; any other object is refused by name."""
    assert is_done(Event(0)) and not is_done(Event(1))
    assert is_done(SimpleNamespace(done=True)) and not is_done(SimpleNamespace(done=False))
    assert is_done(SimpleNamespace(done=lambda: True))
    with pytest.raises(InvalidArgument, match="int has neither"):
        is_done(3)


def test_all_of_the_work_is_waited_for() -> None:
    """The wait lasts until the last of several events is done, and its pauses stay below their bound."""
    events = [Event(3), Event(0), Event(12)]
    made = list(pauses(events, time.monotonic() + 60.0))
    assert len(made) == 15 and max(made) == 0.001 and all(event.asks < 0 for event in events)


def test_work_that_hangs_costs_the_deadline() -> None:
    """Work that never ends raises DeadlineExceeded with the remedy."""
    with pytest.raises(DeadlineExceeded, match="try again"):
        list(pauses([Event(10**9)], time.monotonic() - 1.0))
