"""A shrunk script has only the events that the failure needs, and fails again by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.depth import report
from tests.sim.script import Script, write
from tests.sim.shrink import shrink
from tests.sim.test_notices import keeps_generations
from tests.sim.world import Result, run

SEEDS = 400
TRIES = 20
"""Enough for a daemon that uses a generation twice: from thirty events to three."""


def fails_with(guilty: set[int], whole: Script) -> Callable[[Script], Result]:
    """Carries out a script that breaks a promise at the last of these events, if it has all."""
    wanted = [whole.events[number] for number in sorted(guilty)]

    def carry_out(script: Script) -> Result:
        is_broken = all(event in script.events for event in wanted)
        return Result(
            seed=script.seed,
            violations=["broken"] * is_broken,
            trace="",
            struck=Counter(),
            counts=Counter(),
            virtual_s=0.0,
            cpu_s=0.0,
            wall_s=0.0,
            first_s=wanted[-1].at_s * is_broken,
        )

    return carry_out


@pytest.mark.parametrize(
    "guilty", [{0}, {9}, {0, 15}, {3, 4, 11}], ids=lambda guilty: "-".join(map(str, sorted(guilty)))
)
def test_what_is_not_needed_goes(guilty: set[int]) -> None:
    """The shorter script has exactly the events that the failure needs, and fails."""
    script = write(1)
    carry_out = fails_with(guilty, script)
    shorter, result = shrink(script, carry_out(script), carry_out=carry_out)
    assert shorter.events == tuple(script.events[number] for number in sorted(guilty))
    assert result.violations


def test_so_many_tries_and_no_more() -> None:
    """Shrinking stops at its number of tries, and the script found by then still fails."""
    script, tried = write(1), list[Script]()
    carry_out = fails_with({3}, script)

    def counted(shorter: Script) -> Result:
        tried.append(shorter)
        return carry_out(shorter)

    shorter, result = shrink(script, carry_out(script), tries=3, carry_out=counted)
    assert len(tried) == 3
    assert 1 < len(shorter.events) < len(script.events)
    assert result.violations


@pytest.mark.timeout(300)
def test_the_shorter_script_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing seed of a faulty daemon shrinks to half its events, which fail in the same way."""
    keeps_generations(monkeypatch)
    script, found = next((it, found) for it in map(write, range(SEEDS)) if (found := run(it)).violations)
    shorter, result = shrink(script, found, tries=TRIES)
    assert len(shorter.events) <= len(script.events) / 2
    assert result.violations == run(shorter).violations != []
    report("simulation shrinks", seed=script.seed, events=len(script.events), shorter=len(shorter.events))
