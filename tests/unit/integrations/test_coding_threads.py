"""The threads that encode and decode for engines: they end before a call does, and a fork has its own."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tierd.integrations.coding import Codings
from tierd.integrations.options import Options

SOON_S = 20


def test_a_fault_ends_no_call_before_its_threads() -> None:
    """After an item's fault is raised, no other item is worked on any more."""
    busy, go = [], threading.Event()

    def work(number: int) -> None:
        if number == 0:
            threading.Timer(0.2, go.set).start()
            raise ValueError("the first fails")
        assert go.wait(SOON_S)
        busy.append(number)

    with pytest.raises(ValueError, match="the first fails"):
        Codings(Options()).each(work, range(4))
    assert sorted(busy) == [1, 2, 3]


def test_a_forked_child_has_threads_of_its_own() -> None:
    """Work in a child of a process that has worked before comes to an end."""
    codings = Codings(Options())
    assert codings.each(abs, [-1, 2]) == [1, 2]
    child = os.fork()
    if child == 0:
        signal.alarm(SOON_S)
        os._exit(0 if codings.each(abs, [-3, 4]) == [3, 4] else 1)
    assert os.waitpid(child, 0)[1] == 0
