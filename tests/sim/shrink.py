"""Finds a script with fewer events that still fails.

Purpose: `shrink` cuts events from a script's end and out of its middle. Non-purpose: the cause. A
cut changes the order of later turns, so another failure may replace the first: any broken promise
counts. (After Zeller, Hildebrandt: "Simplifying and isolating failure-inducing input", TSE 2002.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.sim.script import Event, Script
from tests.sim.world import Result, run

TRIES = 200
"""Shrinking stops after this many shorter scripts. A time limit would differ between machines."""

Events = tuple[Event, ...]


def shrink(
    script: Script, found: Result, *, tries: int = TRIES, carry_out: Callable[[Script], Result] = run
) -> tuple[Script, Result]:
    """The smallest failing script within this many tries, with its result. found: the whole
    script's result."""
    best, left = (script, found), tries

    def still_fails(events: Events) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        shorter = replace(script, events=events)
        result = carry_out(shorter)
        if result.violations:
            best = shorter, result
        return bool(result.violations)

    # events after the first broken promise did not cause it
    still_fails(tuple(event for event in script.events if event.at_s <= found.first_s))
    size = max(1, len(best[0].events) // 2)
    while left > 0:
        is_shorter = _cut_once(best[0].events, size, still_fails)
        if size == 1 and not is_shorter:
            break
        size = size if is_shorter else max(1, size // 2)
    return best


def _cut_once(events: Events, size: int, still_fails: Callable[[Events], bool]) -> bool:
    """Tries to omit each piece of size events; True if a piece was not needed."""
    pieces = (events[:start] + events[start + size :] for start in range(0, len(events), size))
    return any(map(still_fails, pieces))
