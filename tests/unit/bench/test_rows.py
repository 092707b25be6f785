"""The arithmetic of benchmark rows: medians, ratios run by run, and their promises."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tools.bench.measure import Cost, Sums, cost_of, cpus, interleaved, measured, medians, rates, take_turns
from tools.bench.plot import draw
from tools.bench.promises import PROMISES, Verdict
from tools.bench.rows import Row, quartiles, row_of
from tools.bench.table import cells_of, counts_of, short


def row(name: str, ratio: float) -> Row:
    return row_of(name, [ratio], unit="x", limits=[1.0], meaning="")


def test_a_ratio_is_the_median_of_the_runs_ratios() -> None:
    """A machine whose speed changes between runs changes value and limit, not the ratio."""
    found = row_of("a", [8.0, 4.0, 2.0], unit="GB/s", limits=[10.0, 5.0, 2.5], meaning="")
    assert (found.value, found.limit, found.ratio, found.runs) == (4.0, 5.0, pytest.approx(0.8), 3)
    assert (found.low, found.high) == (pytest.approx(0.8), pytest.approx(0.8))


def test_the_spread_is_between_quartiles() -> None:
    """One outlier of nine runs does not change the spread."""
    found = row_of("a", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1000.0], unit="s", limits=[1.0] * 9, meaning="")
    assert found.spread == pytest.approx((7.0 - 3.0) / 5.0)
    assert (found.low, found.high) == (3.0, 7.0)
    assert quartiles([4.0]) == (4.0, 4.0)


def test_every_value_has_its_limit() -> None:
    """Values without as many limits are an error, not a shorter row."""
    with pytest.raises(ValueError, match="shorter"):
        row_of("a", [1.0, 2.0], unit="s", limits=[1.0], meaning="")


@pytest.mark.parametrize(
    ("name", "ratio", "verdict"),
    [
        ("put_2MiB_x16", 0.899, Verdict.BELOW_BAR),
        ("put_2MiB_x16", 0.90, Verdict.BELOW_GOAL),
        ("put_2MiB_x16", 1.1, Verdict.GOAL),
        ("lookup_empty", 1.31, Verdict.BELOW_BAR),
        ("lookup_empty", 1.30, Verdict.BELOW_GOAL),
        ("lookup_empty", 1.10, Verdict.GOAL),
        ("clients_4", 0.99, Verdict.BELOW_BAR),
        ("clients_4", 1.0, Verdict.GOAL),
        ("put_2MiB_p50", 20.0, Verdict.NOTHING_PROMISED),
        ("of which nothing is promised", 0.0, Verdict.NOTHING_PROMISED),
    ],
)
def test_a_verdict_is_bar_then_goal(name: str, ratio: float, verdict: Verdict) -> None:
    """A share must reach its bar and a price must not pass it; the goal lies beyond."""
    assert row(name, ratio).verdict is verdict


def test_a_goal_lies_beyond_its_bar() -> None:
    """No promise has a goal that is easier than its bar."""
    for name, promise in PROMISES.items():
        if promise.goal is not None and promise.bar is not None:
            assert (promise.goal < promise.bar) == promise.at_most, name


def test_processor_seconds_are_per_gigabyte() -> None:
    """`cpu_s_per_gb` is the median of the runs' seconds over the bytes of one run."""
    found = row("put_2MiB_x16", 1.0).with_cpu([0.1, 0.2, 9.0], gigabytes=0.5)
    assert found.cpu_s_per_gb == pytest.approx(0.4)
    assert cells_of(found)[5] == "0.40"


def test_costs_become_rates() -> None:
    """A rate is the amount over the wall time of each run. `medians` takes a few runs each."""
    costs = [Cost(wall_s=0.5, cpu_s=0.1), Cost(wall_s=0.25, cpu_s=0.3)]
    assert (rates(costs, 2.0), cpus(costs)) == ([4.0, 8.0], [0.1, 0.3])
    assert medians([1.0, 5.0, 2.0, 7.0, 9.0, 8.0], of=3) == [2.0, 8.0]


def test_works_take_turns() -> None:
    """Each run begins with the next work, every work gets every run's number, and warm runs do not count."""
    seen: list[tuple[str, int]] = []
    works = {name: lambda n, name=name: lambda: seen.append((name, n)) for name in "ab"}
    costs = interleaved(works, runs=2, warm=1)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(each) for each in costs.values()] == [2, 2]


def test_runs_are_numbered_from_where_they_begin() -> None:
    """Run numbers begin at `first`, and warm runs do not count."""
    costs = take_turns({"a": lambda n: Cost(n, 0.0), "b": lambda n: Cost(-n, 0.0)}, runs=2, warm=1, first=5)
    assert {name: [cost.wall_s for cost in each] for name, each in costs.items()} == {"a": [6, 7], "b": [-6, -7]}


def test_a_look_afterwards_is_no_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`then` gets the run's number after the work, and its time does not count."""
    seen: list[int] = []
    monkeypatch.setattr(time, "perf_counter", lambda: float(sum(seen)))
    measure = measured(lambda n: lambda: seen.append(n), then=lambda n: seen.append(100 * n))
    assert measure(3).wall_s == 3.0
    assert seen == [3, 300]


def test_other_bytes_are_noticed() -> None:
    """A batch passes the sums of its number; another batch, exchanged blocks or a flipped bit do not."""
    batch = np.random.default_rng(0).integers(0, 256, (2, 4096), dtype=np.uint8)
    sums = Sums()
    sums.note(1, batch)
    sums.note(2, batch + 1)
    sums.check(1, batch)
    flipped = batch.copy()
    flipped[1, 4000] ^= 1
    for number, other in ((2, batch), (1, batch[::-1]), (1, flipped)):
        with pytest.raises(RuntimeError, match=f"batch {number} came back"):
            sums.check(number, other)


def test_processor_time_of_both_processes_counts() -> None:
    """A cost has the work's CPU time, apart from its waits."""
    cost = cost_of(lambda: sum(range(1_000_000)))
    assert 0 < cost.cpu_s <= 10 * cost.wall_s


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn_of_any_rows(suffix: str, tmp_path: Path) -> None:
    """`draw` draws any rows, also beyond the axis, in the format of the file's ending."""
    rows = [row("put_2MiB_x16", 0.5), row("lookup_empty", 400.0), row("anything", 3.0)]
    draw(rows, tmp_path / f"picture.{suffix}", title="here")
    head = (tmp_path / f"picture.{suffix}").read_bytes()[:5]
    assert head == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]


def test_a_line_tells_ratio_bar_and_goal() -> None:
    """The promise stands beside the ratio, with its direction; a row without a promise has none."""
    assert cells_of(row("lookup_empty", 1.2))[4] == "≤ 1.30, 1.10"
    assert "yellow" in cells_of(row("lookup_empty", 1.2))[3]
    assert cells_of(row("anything", 1.2))[4] == ""
    assert counts_of([row("put_2MiB_x16", 0.5), row("anything", 1.0)]) == "1 reported, 1 below its bar"


def test_numbers_are_short() -> None:
    """A number has three digits, and no powers of ten."""
    assert [short(value) for value in (0.12345, 12.345, 999.4, 1234.5, 46_500.0)] == [
        *("0.123", "12.3", "999", "1,234", "46,500")
    ]
