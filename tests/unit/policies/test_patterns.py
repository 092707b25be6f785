"""The default policy against LRU on synthetic traffic, through the real core, in one tier and in two."""

from __future__ import annotations

import numpy as np
import pytest

from tests.depth import DEPTH, count, report
from tools.bench.policies import against_lru, specs
from tools.bench.traffic import PATTERNS, Player, Step, chain

SIZE = 128 if DEPTH == "test" else 512
TIERS = {"one": (SIZE, 0), "two": (SIZE // 4, SIZE)}


@pytest.mark.parametrize("tiers", ["one", pytest.param("two", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_default_is_within_a_point_of_lru(pattern: str, tiers: str) -> None:
    """On any traffic, the default hits at most one block in a hundred less than LRU that writes all."""
    host, nvme = TIERS[tiers]
    for pace_s in (0.01, 1.0)[: count(test=1, nightly=2, weekly=2)]:
        for seed in range(count(test=1, nightly=2, weekly=4)):
            default, lru = against_lru(pattern, host=host, nvme=nvme, pace_s=pace_s, seed=seed)
            report("beside LRU", pattern=pattern, tiers=tiers, pace_s=pace_s, seed=seed, default=default, lru=lru)
            assert default >= lru - 1.0


@pytest.mark.parametrize("pace_s", [0.0, 0.001, 30.0])
def test_what_was_just_put_is_found(pace_s: float) -> None:
    """Full tiers lose no block between a put and the get after its batch, at any pace."""
    player, now = Player(specs(SIZE, SIZE, eviction="reuse-index", admission="learned")), 0.0
    for turn in range(40):
        batch = [chain(turn * 4 + number, 4) for number in range(4)]
        for verb in ("put", "get"):
            for blocks in batch:
                player.play(Step(verb, blocks), now)  # type: ignore[arg-type]
                now += pace_s
    assert player.found == player.asked == 40 * 16


def test_a_loop_that_is_too_large_is_left_to_the_learner() -> None:
    """If LRU hits nothing, the order by worth decides and hits much."""
    default, lru = against_lru("loop_1.25", host=SIZE, nvme=0, pace_s=1.0)
    assert lru == 0.0
    assert default > 20.0


def test_the_learner_hands_over_when_it_does_worse() -> None:
    """After a loop the learner decides; under puts and gets LRU decides again.
    Until then fewer blocks are lost than half of the tier holds."""
    player = Player(specs(SIZE, 0, eviction="reuse-index", admission="learned"))
    duel, dice, now = player.core._index.policies[0], np.random.default_rng(0), 0.0
    for step in PATTERNS["loop_1.25"](SIZE, dice):
        player.play(step, now := now + 1.0)
    assert duel._shadows.leads
    player.found = player.asked = 0
    for step in PATTERNS["put_get"](4 * SIZE, dice):
        player.play(Step(step.verb, step.blocks + (1 << 20)), now := now + 0.01)
    assert not duel._shadows.leads
    assert player.asked - player.found < SIZE / 2
