"""The order that worth gives: against a plain sort of all blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.depth import count
from tierd.core.blocks import Blocks
from tierd.core.meta import new_meta
from tierd.policies.eviction.reuse_index import TICK_S, ReuseIndex

BLOCKS, GROUPS = 24, 4


class Priced:
    """A Traffic of which the worth is known: by group and whole minutes of age."""

    def __init__(self, table: np.ndarray) -> None:
        self.version, self.table = 0, table

    def worth(self, groups: np.ndarray, ages_s: np.ndarray) -> np.ndarray:
        return self.table[groups, np.minimum(ages_s // 60, self.table.shape[1] - 1).astype(int)].astype(np.float32)


def named_blocks() -> Blocks:
    blocks, metas = Blocks(), new_meta(BLOCKS)
    metas["hash"].view("<u8")[:, 0] = np.arange(1, BLOCKS + 1)
    blocks.add(metas, 0.0)
    return blocks


def steps(dice: np.random.Generator) -> Iterator[tuple[str, list[int], int, float]]:
    """What happens to which blocks, in which group, after which pause."""
    for _ in range(60):
        verb = str(dice.choice(["use", "use", "use", "forget", "ask", "reprice"]))
        names = dice.permutation(BLOCKS)[: dice.integers(1, 9)].tolist()
        yield verb, names, int(dice.integers(GROUPS)), float(dice.choice([0.0, 0.25, 0.25, 1.0, 70.0]))


@pytest.mark.parametrize("seed", range(count(test=40, nightly=1000, weekly=10_000)))
def test_the_order_is_a_sort_by_worth_then_by_run(seed: int) -> None:
    """At any moment the coldest first is: worth at the last tick, then the run's beginning, then the order of uses."""
    dice = np.random.default_rng(seed)
    traffic = Priced(dice.integers(0, 4, (GROUPS, 3)).astype(float))
    blocks = named_blocks()
    policy = ReuseIndex(blocks, traffic)  # type: ignore[arg-type]
    used: dict[int, tuple[int, float, int, int]] = {}  # block -> (group, second of use, run, use)
    opened: dict[tuple[int, float], int] = {}
    now, tick, uses, runs = 0.0, -np.inf, 0, 0
    for verb, names, group, pause in steps(dice):
        now += pause
        if verb == "reprice":
            traffic.table, traffic.version = dice.integers(0, 4, (GROUPS, 3)).astype(float), traffic.version + 1
        elif verb == "ask":
            policy.victims(len(policy) // 2, np.zeros(BLOCKS, bool))
        elif verb == "forget":
            gone = [name for name in names if name in used]
            policy.forget(np.array(gone, np.int64))
            for name in gone:
                del used[name]
            opened = {kin: run for kin, run in opened.items() if any(entry[2] == run for entry in used.values())}
        else:
            ids = np.array(names, np.int64)
            blocks.group[ids], blocks.last_used[ids] = group, now
            policy.touch(np.array([n for n in names if n in used], np.int64), now)
            policy.track(np.array([n for n in names if n not in used], np.int64), now)
            if now >= tick + TICK_S:
                tick, opened = now, {}
            for name in sorted(names, key=lambda n: n not in used):
                used.pop(name, None)
                kin = (group, float(int(now)))
                opened = {k: run for k, run in opened.items() if k == kin or any(e[2] == run for e in used.values())}
                if kin not in opened:
                    runs += 1
                    opened[kin] = runs
                uses += 1
                used[name] = (*kin, opened[kin], uses)
        worth = {
            name: float(traffic.worth(np.array([g]), np.array([max(tick - since, 0.0)]))[0])
            for name, (g, since, _, _) in used.items()
        }
        expected = sorted(used, key=lambda name: (worth[name], *used[name][2:]))
        victims = policy.victims(len(policy), np.zeros(BLOCKS, bool))
        assert victims is not None and victims.tolist() == expected
