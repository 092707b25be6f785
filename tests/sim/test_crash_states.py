"""The real NVMe store opens any disk that a power failure may leave, and keeps every promise.

Seeded operations run on a simulated disk. Before some of its changes the test crashes the disk
several times, with different outcomes. The real code opens each outcome; the test checks it and
crashes it once more during the open. CRASH_SEED=n runs the story of one seed with every crash
point.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import pytest

from tests.depth import count, report
from tests.sim.crash_story import Book, Promise, Story, judge
from tests.sim.disk import SimDisk
from tests.sim.loop import Pace, SimLoop
from tierd.tiers.store import ledger, store_files

STEPS = 70
EVERY, AT_SYNC = 24, 5
"""One in EVERY changes of the disk is a crash point; before critical syncs, one in AT_SYNC."""
OUTCOMES = 4
"""Outcomes of each crash point."""
STATES = count(test=400, nightly=20_000, weekly=100_000)
SEED = os.environ.get("CRASH_SEED")


@dataclass
class State:
    """A disk after a crash. at: the change that did not happen. depth: crashes of recovery
    before."""

    disk: SimDisk
    promise: Promise
    at: int
    outcome: int
    operations: int
    depth: int = 0

    def __str__(self) -> str:
        return f"crash before change {self.at}, outcome {self.outcome}, {self.depth} crashes in recovery"


@pytest.fixture(autouse=True)
def _small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes compactions and new marks frequent."""
    monkeypatch.setattr(ledger, "JOURNAL_LIMIT_BYTES", 3000)
    for module in (ledger, store_files):
        monkeypatch.setattr(module, "GENERATION_LEAP", 7)
        monkeypatch.setattr(module, "SEGMENT_LEAP", 2)


@contextmanager
def loop_of(seed: str) -> Iterator[SimLoop]:
    """A loop in which each job of a thread takes another time."""
    chance = Random(seed)
    loop = SimLoop(chance)
    loop.pace = lambda _work: Pace(chance.random() * 1e-3, chance.random())
    try:
        yield loop
    finally:
        loop.shut()


def collect(states: list[State], story: Story, seed: str, *, every: int) -> None:
    """Runs the story and adds disks that crashes leave. Raises its errors, and Violation."""
    dice = Random(f"points {seed}")

    def note(operation: str) -> None:
        one_in = min(every, AT_SYNC) if operation.startswith("sync") else every
        if dice.randrange(one_in) == 0:
            for outcome in range(OUTCOMES):
                disk = story.disk.crashed(Random(f"{seed} {story.disk.ops} {outcome}"))
                states.append(State(disk, story.promise.copy(), story.disk.ops, outcome, len(story.log)))

    story.disk.before_change = note
    with loop_of(f"story {seed}") as loop:
        loop.run(story.live(STEPS))


def recover(state: State, book: Book, seed: str) -> State | None:
    """Opens a disk and checks it. Returns a disk crashed in mid-recovery, if any. Raises
    Violation."""
    again: list[State] = []
    dice = Random(f"again {seed} {state.at} {state.outcome} {state.depth}")
    moment = dice.randrange(40) if state.depth < 2 else -1

    def note(_operation: str) -> None:
        if state.disk.ops == moment:
            again.append(replace(state, disk=state.disk.crashed(dice), depth=state.depth + 1))

    state.disk.before_change = note
    with loop_of(f"recover {seed} {state.at}") as loop:
        loop.run(judge(state.disk, state.promise, book))
    return again[0] if again else None


def run_story(seed: str, *, every: int = EVERY) -> int:
    """The number of checked states. Fails with the shortest story that breaks a promise."""
    story, states, seen, broken = Story(Random(seed)), list[State](), 0, ""
    try:
        collect(states, story, seed, every=every)
    except Exception as error:  # any error is reported with its seed
        broken = repr(error)
    for first in states:
        state: State | None = first
        while state is not None:
            last, seen = state, seen + 1
            try:
                state = recover(state, story.book, seed)
            except Exception as error:  # as above
                if every > 1:
                    run_story(seed, every=1)  # with all crash points, the first failure is the shortest story
                pytest.fail(told(seed, f"{error!r}; {last}", story.log[: last.operations]))
    if broken:
        pytest.fail(told(seed, broken, story.log))
    return seen


def told(seed: str, what: str, operations: list[str]) -> str:
    """A failure's text, with the seed that reproduces it."""
    return "\n  ".join([f"CRASH_SEED={seed}: {what}", *operations])


@pytest.mark.timeout(7200)
def test_power_may_fail_at_any_moment() -> None:
    """A crash loses no durable block, serves no other bytes and repeats no number."""
    if SEED:
        report("crash states", seed=SEED, states=run_story(SEED, every=1), violations=0)
        return
    states = stories = 0
    while states < STATES:
        states += run_story(str(stories))
        stories += 1
    report("crash states", states=states, stories=stories, violations=0)
