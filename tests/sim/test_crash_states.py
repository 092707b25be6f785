"""What a power failure may leave on a disk: the real NVMe store opens it and keeps every promise, whichever unsynced bytes survived.

Stories of seeded operations run on a simulated disk. Before some of its changes the disk is crashed, several times over with another
outcome each; each outcome is opened by the real code and looked at, and crashed once more while it is being opened.
CRASH_SEED=n runs the story of one seed, with every crash point.
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
"""One in so many changes of the disk is a crash point; more of those where the most is at stake, before a sync."""
OUTCOMES = 4
"""Of each crash point."""
STATES = count(test=400, nightly=20_000, weekly=100_000)
SEED = os.environ.get("CRASH_SEED")


@dataclass
class State:
    """A disk after a crash. at: number of the change that did not come about; outcome: which; depth: crashes of recovery before."""

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
    """Compactions and new marks are to be met often."""
    monkeypatch.setattr(ledger, "JOURNAL_LIMIT_BYTES", 3000)
    for module in (ledger, store_files):
        monkeypatch.setattr(module, "GENERATION_LEAP", 7)
        monkeypatch.setattr(module, "SEGMENT_LEAP", 2)


@contextmanager
def loop_of(seed: str) -> Iterator[SimLoop]:
    """A loop whose threads take their time, each another one."""
    chance = Random(seed)
    loop = SimLoop(chance)
    loop.pace = lambda _work: Pace(chance.random() * 1e-3, chance.random())
    try:
        yield loop
    finally:
        loop.shut()


def collect(states: list[State], story: Story, seed: str, *, every: int) -> None:
    """Runs the story, and adds what crashes would leave. Raises what the story itself raises, Violation where a promise is broken."""
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
    """Raises Violation. Gives what a crash in the middle of the recovery leaves, if there was one."""
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
    """How many states were looked at. Fails with the shortest story that breaks a promise."""
    story, states, seen, broken = Story(Random(seed)), list[State](), 0, ""
    try:
        collect(states, story, seed, every=every)
    except Exception as error:  # whatever it is, it is told with its seed
        broken = repr(error)
    for first in states:
        state: State | None = first
        while state is not None:
            last, seen = state, seen + 1
            try:
                state = recover(state, story.book, seed)
            except Exception as error:  # as above
                if every > 1:
                    run_story(seed, every=1)  # the first of all crash points that fails is the shortest story
                pytest.fail(told(seed, f"{error!r}; {last}", story.log[: last.operations]))
    if broken:
        pytest.fail(told(seed, broken, story.log))
    return seen


def told(seed: str, what: str, operations: list[str]) -> str:
    """A failure for people, with what it takes to see it again."""
    return "\n  ".join([f"CRASH_SEED={seed}: {what}", *operations])


@pytest.mark.timeout(7200)
def test_power_may_fail_at_any_moment() -> None:
    """Every block acknowledged durable and not removed is there with its bytes, no other bytes are served, no number is given twice."""
    if SEED:
        report("crash states", seed=SEED, states=run_story(SEED, every=1), violations=0)
        return
    states = stories = 0
    while states < STATES:
        states += run_story(str(stories))
        stories += 1
    report("crash states", states=states, stories=stories, violations=0)
