"""A failed best-effort call keeps no reference to its objects."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from tierd.client.best_effort import BestEffort
from tierd.errors import TierdError, Unavailable


@pytest.mark.parametrize("best_effort", [False, True])
@pytest.mark.parametrize("error", [Unavailable("gone"), TypeError("no number")])
def test_a_failed_call_keeps_nothing(error: Exception, best_effort: bool) -> None:
    """A failed call drops its objects at once, without a garbage collection: a lease pins pages."""

    class Held:
        pass

    def work() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise type(error)(*error.args)

    seen: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with contextlib.suppress(TierdError):
            BestEffort("x", best_effort=best_effort).shrunk(work, lambda: None)
        assert seen[0]() is None
    finally:
        gc.enable()
