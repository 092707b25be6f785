"""The order by worth, against a plain sort of all blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.depth import count, report
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import StructArray
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction import ranking, reuse_index, runs
from tierd.policies.eviction.reuse_index import TICK_S, ReuseIndex
from tierd.policies.eviction.runs import RUN_BLOCKS
from tierd.policies.reuse.traffic import ABOVE, KEPT

BLOCKS, GROUPS = 40, 4


class Priced:
    """A Traffic with a known worth per group and whole minute of age."""

    def __init__(self, table: np.ndarray) -> None:
        self.version, self.table = 0, table
        self.thresholds: list[Callable[[], float]] = []
        self.above: list[Callable[[np.ndarray], None]] = []

    def worth(self, groups: np.ndarray, ages_s: np.ndarray) -> np.ndarray:
        shares = np.where(groups & KEPT, np.float32(0.25), np.float32(1.0))
        ages = np.minimum(ages_s // 60, self.table.shape[1] - 1).astype(int)
        return self.table[groups % ABOVE, ages].astype(np.float32) * shares

    def prices(self, groups: np.ndarray, ages_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.worth(groups, ages_s), (ages_s // 60 + 1) * 60

    def price(self, group: int, age_s: float) -> tuple[float, float]:
        worths, changes_s = self.prices(np.array([group]), np.array([age_s]))
        return worths.item(), changes_s.item()


def numbered_metas(count: int) -> StructArray:
    metas = new_meta(count)
    metas["hash"].view("<u8")[:, 0] = np.arange(1, count + 1)
    return metas


def named_blocks() -> Blocks:
    blocks = Blocks()
    blocks.add(numbered_metas(BLOCKS), 0.0)
    return blocks


def steps(dice: np.random.Generator) -> Iterator[tuple[str, list[int], list[int], float]]:
    """Random verbs with their blocks, groups and pauses."""
    for _ in range(90):
        verb = str(dice.choice(["use", "use", "use", "forget", "ask", "reprice"]))
        names = dice.permutation(BLOCKS)[: dice.choice([1, 2, 8, 20])].tolist()
        groups = dice.integers(dice.integers(1, GROUPS + 1), size=len(names)).tolist()
        yield verb, names, groups, float(dice.choice([0.0, 0.25, 0.25, 1.0, 70.0]))


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The path of single-block calls, with frequent merges of single blocks."""
    patch.setattr(runs, "FEW", 100)
    patch.setattr(reuse_index, "FEW", 100)
    patch.setattr(ranking, "MOST_SINGLE", 2)


def many_at_once(patch: pytest.MonkeyPatch) -> None:
    """The path of batches and of thousands of runs."""
    patch.setattr(runs, "FEW", 0)
    patch.setattr(reuse_index, "FEW", 0)
    patch.setattr(reuse_index, "_SORTED_RUNS", 0)
    patch.setattr(reuse_index, "_SCANNED_RUNS", 1)


def as_after_years(patch: pytest.MonkeyPatch) -> None:
    """Serials wrap now and then, and runs are packed at once."""
    patch.setattr(reuse_index, "SERIAL_BITS", 7)
    patch.setattr(runs, "SLACK", 0)


def as_it_is(_patch: pytest.MonkeyPatch) -> None:
    """Nothing is changed."""


@pytest.mark.parametrize("way", [as_it_is, one_by_one, many_at_once, as_after_years])
@pytest.mark.parametrize("seed", range(count(test=8, nightly=250, weekly=2_500)))
def test_the_order_is_a_sort_by_worth_then_by_run(
    seed: int, way: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpinned victims are ordered by worth at the last tick, then the run's begin, then use, on every
    path."""
    way(monkeypatch)
    dice = np.random.default_rng(seed)
    traffic = Priced(dice.integers(0, 4, (GROUPS, 3)).astype(float))
    blocks = named_blocks()
    policy = ReuseIndex(blocks, traffic)  # type: ignore[arg-type]
    used: dict[int, tuple[int, float, int, int]] = {}  # block -> (group, second of use, run, use)
    opened: dict[tuple[int, float], int] = {}
    now, tick, uses, begun = 0.0, -np.inf, 0, 0
    for verb, names, groups, pause in steps(dice):
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
            blocks.group[ids], blocks.last_used[ids] = groups, now
            held = [name in used for name in names]
            for call, calls in ((policy.touch, held), (policy.track, [not one for one in held])):
                part = [(name, group) for name, group, mine in zip(names, groups, calls, strict=True) if mine]
                call(np.array([name for name, _ in part], np.int64), now)
                if part and now >= tick + TICK_S:
                    tick, opened = now, {}
                for name, _ in part:
                    used.pop(name, None)
                opened = {kin: run for kin, run in opened.items() if any(entry[2] == run for entry in used.values())}
                for name, group in part:
                    kin = (group, float(int(now)))
                    if kin not in opened:
                        begun += 1
                        opened[kin] = begun
                    uses += 1
                    used[name] = (*kin, opened[kin], uses)
        worth = {
            name: float(traffic.worth(np.array([g]), np.array([max(tick - since, 0.0)]))[0])
            for name, (g, since, _, _) in used.items()
        }
        expected = sorted(used, key=lambda name: (worth[name], *used[name][2:]))
        for most in dice.permutation([1, 2, 5, BLOCKS]).tolist():
            pinned = dice.random(BLOCKS) < dice.choice([0.0, 0.3, 0.9])
            free = [name for name in expected if not pinned[name]]
            victims = policy.victims(min(most, len(free)), pinned)
            assert victims is not None and victims.tolist() == free[:most]
            assert len(free) >= most or policy.victims(most, pinned) is None


def filled(blocks: int) -> ReuseIndex:
    """A policy that tracks `blocks` blocks, used in one second."""
    names = Blocks()
    names.add(numbered_metas(blocks), 0.0)
    policy = ReuseIndex(names, Priced(np.ones((GROUPS, 3))))  # type: ignore[arg-type]
    policy.track(np.arange(blocks), 0.0)
    return policy


def test_no_run_is_longer_than_what_one_look_may_cost() -> None:
    """Blocks of one second and group, as after a restart, are cut into runs, and leave in use order."""
    policy = filled(5 * RUN_BLOCKS)
    assert max(map(len, policy._runs._members)) <= RUN_BLOCKS
    for start in range(0, 5 * RUN_BLOCKS, 512):
        victims = policy.victims(512, np.zeros(5 * RUN_BLOCKS, bool))
        assert victims is not None and victims.tolist() == list(range(start, start + 512))
        policy.forget(victims)


def test_members_stay_in_proportion_to_blocks() -> None:
    """Without evictions, runs remember at most about twice the tracked blocks, plus open runs."""
    policy, dice = filled(3_000), np.random.default_rng(3)
    for now in range(1, 60):
        policy._blocks.last_used[:] = now
        for _ in range(3):
            policy.touch(dice.permutation(3_000)[: dice.integers(1, 1_500)], float(now))
        sizes = [len(one) for row, one in enumerate(policy._runs._members) if row not in policy._runs._open.values()]
        assert sum(sizes) <= 2 * 3_000 + runs.SLACK * len(sizes) + 1_500


def test_a_block_at_a_time_costs_about_as_much_as_promised() -> None:
    """A use, a choice and an arrival take ten microseconds of CPU time together, with tenfold slack."""
    policy, held, dice = filled(20_000), np.zeros(20_000, bool), np.random.default_rng(4)
    turns = [
        (number, dice.integers(20_000, size=1)) for number in range(count(test=1_000, nightly=10_000, weekly=10_000))
    ]
    policy.victims(1, held)
    begun = time.thread_time()
    for number, block in turns:
        policy.touch(block, number * 0.01)
        victim = policy.victims(1, held)
        assert victim is not None
        policy.forget(victim)
        policy.track(victim, number * 0.01)
    took_us = (time.thread_time() - begun) / len(turns) * 1e6
    report("a block at a time", us=round(took_us, 2))
    assert took_us <= 100


@pytest.mark.parametrize(("is_above", "thresholds"), [(True, [lambda: 0.5]), (True, []), (False, [lambda: 0.5])])
def test_what_a_store_has_leaves_first_above_it(is_above: bool, thresholds: list[Callable[[], float]]) -> None:
    """Above a store with a budget, a block is worth less while the store holds it, and nowhere else."""
    traffic, blocks = Priced(np.array([[3.0], [2.0]])), Blocks()
    traffic.thresholds = thresholds
    ids = blocks.add(numbered_metas(6), 0.0)
    policy = ReuseIndex(blocks, traffic, is_above=is_above)  # type: ignore[arg-type]
    blocks.group[ids], blocks.last_used[ids] = [0, 0, 0, 1, 1, 1], 1.0
    policy.track(ids, 1.0)
    for kept in ([], [0, 4], [4], [], [5, 1, 0]):
        changed = np.flatnonzero(blocks.kept[ids] != np.isin(ids, kept))
        blocks.kept[ids] = np.isin(ids, kept)
        for hear in traffic.above:
            hear(ids[changed[::-1]])
        if not (is_above and thresholds):
            policy.touch(ids, 1.0)
        victims = policy.victims(6, np.zeros(6, bool))
        assert victims is not None
        worths = np.array([3.0, 3, 3, 2, 2, 2]) * np.where(
            blocks.kept[ids] & (is_above and bool(thresholds)), 0.25, 1.0
        )
        assert np.all(np.diff(worths[victims]) >= 0)
        assert (is_above and thresholds) or victims.tolist() == [3, 4, 5, 0, 1, 2]


def test_a_store_may_speak_of_blocks_that_are_not_here() -> None:
    """The policy ignores blocks that it does not track."""
    traffic, blocks = Priced(np.array([[1.0]])), Blocks()
    traffic.thresholds = [lambda: 0.5]
    ids = blocks.add(numbered_metas(6), 0.0)
    policy = ReuseIndex(blocks, traffic, is_above=True)  # type: ignore[arg-type]
    policy.track(ids[2:3], 0.0)
    blocks.kept[ids] = True
    traffic.above[0](np.array([0, 2, 1 << 24]))
    assert len(policy) == 1
    assert policy.victims(1, np.zeros(6, bool)).tolist() == [2]  # type: ignore[union-attr]


def test_a_run_that_is_left_at_once_is_over() -> None:
    """Runs whose blocks come and leave by the hundred free their rows."""
    index = runs.Runs(400)
    index.make_room(400)
    blocks, rows = np.arange(400), len(index.alive)
    for turn in range(3 * rows):
        index.join(blocks, np.full(400, turn))
        assert index.alive.sum() == 400
        for part in (blocks,) if turn % 2 else (blocks[:150], blocks[150:]):
            index.leave(part)
        assert index.alive.sum() == 0
    assert len(index.alive) == rows
