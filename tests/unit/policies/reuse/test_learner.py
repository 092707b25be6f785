"""The learner behind `reuse-index`: it learns synthetic traffic, stays bounded and is deterministic."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from tests.depth import count, report
from tierd.policies.reuse import features
from tierd.policies.reuse.hazard import AFRESH, AGES, EDGES_S, Counts, Logs, blend, worth
from tierd.policies.reuse.learner import (
    HALF_LIFE,
    KINDS,
    NEW,
    OLD,
    REFIT_EVERY,
    REQUESTS,
    SHARED,
    Groups,
    Learner,
    Request,
)
from tierd.policies.reuse.prior import TABLE, encode, prior_hazards

SEED = int(os.environ.get("LEARNER_SEED", "20261122"))


def flat(*, requests: int = REQUESTS, half_life: float = HALF_LIFE) -> Learner:
    """A learner without a prior."""
    return Learner(np.full((1, features.GROUPS, AGES), 0.01), trust=AFRESH, half_life=half_life, requests=requests)


def asks(blocks: int, before: Groups | None = None, *, known: int | None = None, sessions: int = 1) -> Request:
    """A request for `blocks` blocks, of which `known` (default: all of `before`) belong to `before`."""
    parts = np.zeros(0, np.int64) if before is None else before.parts[: len(before.parts) if known is None else known]
    return Request(blocks, np.full(len(parts), sessions), parts)


def traffic(learner: Learner, requests: int, *, pause_s: float, chance: float, begin_s: float = 0.0) -> float:
    """Each second a session asks for 9 blocks; with this chance it returns once after `pause_s`, for 10.
    Returns the end time."""
    dice, now = np.random.default_rng(SEED), begin_s
    waiting: list[tuple[float, Groups]] = []
    for number in range(requests):
        now = begin_s + number
        while waiting and waiting[0][0] <= now:
            due, first = waiting.pop(0)
            learner.observe(asks(10, first), due)
        first = learner.observe(asks(9), now)
        if dice.random() < chance:
            waiting.append((now + pause_s, first))
        if number % REFIT_EVERY == 0:
            learner.refit(now)
    learner.refit(now)
    return now


def test_a_known_hazard_is_learnt() -> None:
    """Four of ten sessions return after 60 s: the chance is 0.4, and worth peaks before 60 s."""
    learner, first = flat(), np.array([features.first_group(9)])
    traffic(learner, count(test=4000, nightly=20_000, weekly=20_000), pause_s=60.0, chance=0.4)
    chance = float(learner.chance(first, np.array([0.0]))[0])
    worth = learner.worth[first[0]]
    peak = float(EDGES_S[worth.argmax()])
    report("learnt hazard", chance=chance, peak_s=peak)
    assert abs(chance - 0.4) < 0.06
    assert 30.0 <= peak <= 60.0
    assert learner.chance(first, np.array([300.0]))[0] < 0.1
    assert worth[0] > 5 * worth[int(np.searchsorted(EDGES_S, 200.0))]


def test_the_day_may_change() -> None:
    """After a change of traffic, the learner is nearer to the new traffic than to the old."""
    half = count(test=2000, nightly=10_000, weekly=20_000)
    learner, first = flat(half_life=half / 2), np.array([features.first_group(9)])
    end_s = traffic(learner, half, pause_s=60.0, chance=0.9)
    before = float(learner.chance(first, np.zeros(1))[0])
    traffic(learner, 3 * half, pause_s=60.0, chance=0.1, begin_s=end_s + 10_000)
    after = float(learner.chance(first, np.zeros(1))[0])
    report("a changed day", before=before, after=after)
    assert before > 0.8
    assert after < 0.25


def test_the_fresh_may_be_worth_less_than_the_waiting() -> None:
    """If no session returns within 100 s, blocks of age 90 s exceed fresh ones in worth: LRU reversed."""
    learner, first = flat(), features.first_group(9)
    traffic(learner, 4000, pause_s=110.0, chance=0.5)
    worth = learner.worth[first]
    assert worth[int(np.searchsorted(EDGES_S, 90.0)) - 1] > 2 * worth[0]


def wild(dice: np.random.Generator, learner: Learner, requests: int) -> list[list[int]]:
    """Random traffic with inconsistent parts and counts. Returns the answers."""
    answers, now = [], 0.0
    for number in range(requests):
        blocks = int(dice.integers(0, 40))
        known = int(dice.integers(0, blocks + 1))
        parts = dice.integers(-1, KINDS * (number + 2), known)
        now += float(dice.exponential(5.0)) - 0.5 * float(dice.random() < 0.01)
        groups = learner.observe(Request(blocks, dice.integers(1, 200, known), parts), now)
        answers.append([groups.start, *groups.groups, *groups.parts])
        if number % REFIT_EVERY == 0:
            learner.refit(now)
    return answers


def test_any_traffic_leaves_worth_finite_and_never_negative() -> None:
    """Worth is always finite and not negative, group 0 is worth 0, and chances are in [0, 1]."""
    learner = Learner()
    wild(np.random.default_rng(SEED), learner, count(test=2000, nightly=20_000, weekly=20_000))
    groups = np.arange(features.GROUPS)
    assert np.isfinite(learner.worth).all()
    assert (learner.worth >= 0).all()
    assert not learner.worth[features.NOTHING].any()
    for age_s in (0.0, 50.0, 1e9):
        chance = learner.chance(groups, np.full(len(groups), age_s))
        assert ((chance >= 0) & (chance <= 1)).all()


def test_equal_calls_give_equal_answers() -> None:
    """Two learners with the same calls give bit-identical answers."""
    one, other = Learner(), Learner()
    requests = count(test=1000, nightly=10_000, weekly=10_000)
    assert wild(np.random.default_rng(SEED), one, requests) == wild(np.random.default_rng(SEED), other, requests)
    assert one.worth.tobytes() == other.worth.tobytes()


def test_a_restart_goes_on_where_it_was() -> None:
    """A restored learner answers like the original, and saving changes nothing."""
    one, other = Learner(), Learner()
    wild(np.random.default_rng(SEED), one, 700)
    one.refit(4000.0)
    other.restore(one.state())
    assert other.worth.tobytes() == one.worth.tobytes()
    assert wild(np.random.default_rng(SEED + 1), one, 700) == wild(np.random.default_rng(SEED + 1), other, 700)
    assert other.worth.tobytes() == one.worth.tobytes()


def test_a_state_of_another_version_is_refused() -> None:
    """The error names the column; the learner keeps what it had."""
    learner = Learner()
    state = learner.state() | {"used": np.zeros((2, 2))}
    with pytest.raises(ValueError, match="lacks used"):
        learner.restore(state)
    assert learner.state()["used"].shape == (features.GROUPS, AGES)


def test_memory_is_bounded_and_the_overwritten_is_unknown() -> None:
    """A full ring of requests overwrites the first session, whose next request is new. No column grows."""
    learner = flat(requests=1000)
    first = learner.observe(asks(9), 0.0)
    sizes = {name: column.nbytes for name, column in learner.state().items()}
    second = learner.observe(asks(10, first), 10.0)
    assert second.start == 9
    for number in range(1000):
        learner.observe(asks(3), 20.0 + number / 1000)
    assert learner.observe(asks(11, second), 100.0).start == 0
    assert {name: column.nbytes for name, column in learner.state().items()} == sizes


def kinds(groups: Groups) -> list[int]:
    return [part % KINDS for part in groups.parts.tolist()]


def test_a_session_is_followed_and_an_application_is_not_one() -> None:
    """A longer request continues a session; a shared prefix with another end begins a new one.
    Blocks are shared from the second session on."""
    learner = flat()
    first = learner.observe(asks(6), 0.0)
    assert kinds(first) == [NEW] * 6
    second = learner.observe(asks(8, first), 30.0)
    assert second.start == 6
    assert kinds(second) == [OLD] * 6 + [NEW] * 2
    other = learner.observe(asks(8, second, known=2), 40.0)
    assert other.start == 0
    assert kinds(other) == [SHARED] * 2 + [NEW] * 6
    third = learner.observe(asks(9, other, known=6, sessions=2), 50.0)
    assert third.start == 0


@pytest.mark.parametrize("sessions", [64, 65, 127, 128, 300, 65_535])
def test_what_very_many_share_is_in_the_last_group(sessions: int) -> None:
    """A block of very many sessions is in the last shared group."""
    learner = flat()
    first = learner.observe(asks(3), 0.0)
    other = learner.observe(asks(3, first, known=3, sessions=sessions), 1.0)
    assert other.groups.tolist() == [int(features.SHARED[-1])] * 3


def test_a_part_is_used_when_half_of_it_is_whoever_asks() -> None:
    """Another session uses a part if it asks for at least half of it, and not if it asks for less."""
    learner, group = flat(), features.first_group(9)
    for known, uses in ((4, 0), (5, 1)):
        first = learner.observe(asks(9), 0.0)
        other = learner.observe(asks(12, first, known=known, sessions=2), 10.0)
        assert other.start == 0
        assert learner.counts().used[group].sum() == uses


def test_an_expert_in_the_shipped_table_is_recency() -> None:
    """The last expert is LRU: it treats all groups alike, and its worth never rises with age."""
    recency = worth(prior_hazards()[-1])
    assert np.ptp(recency, axis=0).max() == 0.0
    assert (np.diff(recency[0]) <= 0).all()
    assert recency[0, -1] < recency[0, 0] / 10


def test_what_was_replaced_belongs_to_the_session_still() -> None:
    """A request that returns to the start of the last new part continues the session without that part."""
    learner = flat()
    first = learner.observe(asks(4), 0.0)
    searched = learner.observe(asks(40, first), 30.0)
    assert learner.observe(asks(6, searched, known=4), 60.0).start == 4


def test_groups_are_few_and_only_like_parts_are_near() -> None:
    """At most 512 groups and 40 ages. Levels go from kind to group, and no node holds two kinds."""
    assert features.GROUPS <= 512
    assert AGES <= 40
    kind, *between, group = features.LEVELS
    assert group.tolist() == list(range(features.GROUPS))
    for nodes in between:
        for node in np.unique(nodes):
            assert len(np.unique(kind[nodes == node])) == 1


def test_experts_are_believed_where_they_are_right() -> None:
    """Each node follows the expert that its data confirms, and weighs both equally without data."""
    nodes, experts = np.array([0, 0, 1]), np.stack([np.full((3, AGES), 0.01), np.full((3, AGES), 0.2)])
    nothing = np.zeros((3, AGES))
    assert np.allclose(blend(Counts(nothing, nothing), Logs.of(experts), nodes), np.sqrt(0.01 * 0.2))
    seen = np.full((3, AGES), 100.0)
    used = seen * np.array([0.01, 0.01, 0.2])[:, None]
    assert np.allclose(blend(Counts(used, seen), Logs.of(experts), nodes), used / seen, rtol=0.01)


def test_the_shipped_table_reads_as_it_was_written() -> None:
    """Encoding the shipped table gives the same text, and all hazards are in (0, 1)."""
    shipped = prior_hazards()
    assert shipped.shape[1:] == (features.GROUPS, AGES)
    assert ((shipped > 0) & (shipped < 1)).all()
    assert encode(shipped) == TABLE.read_text(encoding="ascii")


def test_worth_is_the_best_rate_over_all_horizons() -> None:
    """Worth is the greatest P(used by the horizon) / E(time kept until then) over all horizons.
    A use counts as half-way in its age."""
    hazard = np.random.default_rng(SEED).uniform(0.0, 0.9, (3, AGES))
    widths_s = np.diff(EDGES_S)
    for group, age in itertools.product(range(3), range(AGES)):
        alive, gain, cost_s, best = 1.0, 0.0, 0.0, 0.0
        for later in range(age, AGES):
            used = float(hazard[group, later])
            gain, cost_s = gain + alive * used, cost_s + alive * (1 - used / 2) * float(widths_s[later])
            alive, best = alive * (1 - used), max(best, gain / cost_s)
        assert worth(hazard)[group, age] == pytest.approx(best, rel=1e-5)


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    """A clock that goes back never makes counts negative."""
    learner = flat(half_life=1.0)
    learner.observe(asks(9), 0.0)
    learner.refit(1000.0)
    learner.refit(0.0)
    assert learner.counts().seen.min() >= 0.0
    assert learner.counts().seen.max() > 0.0
