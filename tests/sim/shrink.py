"""Tells a failure in fewer events.

Purpose: `shrink`: a script that still fails, with events cut from its end and out of its middle. Non-purpose: finding why. What is cut changes the order
of turns behind it, so another failure may take the first one's place: any broken promise counts. (After Zeller, Hildebrandt: "Simplifying and
isolating failure-inducing input", TSE 2002.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.sim.script import Event, Script
from tests.sim.world import Result, run

TRIES = 200
"""Shrinking ends after so many shorter scripts with what it has. Not after some time: a seed is told in the same events on every machine."""

Events = tuple[Event, ...]


def shrink(
    script: Script, found: Result, *, tries: int = TRIES, carry_out: Callable[[Script], Result] = run
) -> tuple[Script, Result]:
    """The smallest failing script that was found within so many tries, and what it comes to. found: what the whole script came to."""
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

    # what comes after the first broken promise has not caused it
    still_fails(tuple(event for event in script.events if event.at_s <= found.first_s))
    size = max(1, len(best[0].events) // 2)
    while left > 0:
        is_shorter = _cut_once(best[0].events, size, still_fails)
        if size == 1 and not is_shorter:
            break
        size = size if is_shorter else max(1, size // 2)
    return best


def _cut_once(events: Events, size: int, still_fails: Callable[[Events], bool]) -> bool:
    """Tries to do without each piece of so many events; True once one was not needed."""
    pieces = (events[:start] + events[start + size :] for start in range(0, len(events), size))
    return any(map(still_fails, pieces))
