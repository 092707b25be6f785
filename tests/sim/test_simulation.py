"""The daemon on a virtual clock: clients, faults, crashes and restarts break no promise.

A failure prints its seed and a shorter script. `SIM_SEED=` runs it again, alone; so does
`python -m tests.sim --seed N`.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections import Counter
from functools import partial

import pytest

from tests.depth import DEPTH, count, report
from tests.sim.script import FAULTS, MEDIUM_FAULTS, SECONDS, write
from tests.sim.shrink import shrink
from tests.sim.world import Result, run

SEEDS = count(test=50, nightly=2_000, weekly=10_000)
FIRST = int(os.environ.get("SIM_SEED", "0"))
TIMES_REAL = 200
"""Target: virtual seconds per second of CPU; reported, and asserted with tenfold slack."""
LONG_DEPTH = 1024 if DEPTH == "test" else 8192
"""Blocks of long chains."""
LEAST_HITS = 100
"""Strikes of each fault in a night."""


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """The result of every seed; a broken promise is shrunk and printed."""
    seeds = [FIRST] if "SIM_SEED" in os.environ else range(SEEDS)
    return [_run(seed) for seed in seeds]


def _run(seed: int) -> Result:
    script = write(seed)
    result = run(script)
    if result.violations:
        shorter, again = shrink(script, result)
        print(f"SIM_SEED={seed}: {result.violations}; in {len(shorter.events)} events:")
        print(*shorter.events, *again.violations, sep="\n")
    return result


@pytest.mark.timeout(3600)
def test_no_promise_is_broken(results: list[Result]) -> None:
    """Reads are committed bytes or misses, durable blocks stay, calls end in time, nothing is
    held."""
    assert {result.seed: result.violations for result in results if result.violations} == {}
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    report(
        "simulation",
        seeds=len(results),
        virtual_s=round(sum(result.virtual_s for result in results)),
        blocks_read=counts["blocks read"],
        durable_checked=counts["durable checked"],
        violations=0,
    )
    if len(results) > 1:
        assert counts["blocks read"] > 10 * len(results)
        assert counts["durable checked"] > 10 * len(results)
        assert counts["copies that asked nobody"] > len(results)  # from directories that commits write


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(count(test=1, nightly=8, weekly=40)))
def test_long_chains_keep_every_promise(seed: int) -> None:
    """Chains of 16,384 tokens, at night 131,072, each one segment and one call, keep every
    promise."""
    assert run(write(seed, depth=LONG_DEPTH)).violations == []


def test_a_reader_of_an_ended_epoch_keeps_its_page_over_a_restart() -> None:
    """A page of an ended epoch that a client holds, alone in its segment, survives a restart."""
    assert run(write(5781)).violations == []


@pytest.mark.timeout(3600)
def test_every_fault_strikes(results: list[Result]) -> None:
    """Every kind of fault strikes; in a night each strikes a hundred times."""
    struck: Counter[str] = sum((result.struck for result in results), Counter())
    report("simulation faults", **{name: struck[name] for name in (*FAULTS, *MEDIUM_FAULTS)})
    if len(results) >= SEEDS:
        least = LEAST_HITS if DEPTH != "test" and SEEDS >= 2_000 else 1
        assert {name: struck[name] for name in (*FAULTS, *MEDIUM_FAULTS) if struck[name] < least} == {}


@pytest.mark.timeout(3600)
def test_time_flies(results: list[Result]) -> None:
    """A script of half a minute takes a small part of a second."""
    speeds = [result.virtual_s / result.cpu_s for result in results]
    report(
        "simulation speed",
        median_times_real_by_cpu=round(statistics.median(speeds)),
        median_times_real_by_wall=round(statistics.median(result.virtual_s / result.wall_s for result in results)),
        target=TIMES_REAL,
    )
    assert min(result.virtual_s for result in results) >= SECONDS
    assert statistics.median(speeds) > TIMES_REAL / 10


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_decides_everything(results: list[Result], seed: int) -> None:
    """The same seed gives the same trace, to the last turn, in any order of seeds."""
    again = run(write(seed))
    assert again.trace == run(write(seed)).trace
    known = {result.seed: result for result in results}
    assert seed not in known or (again.trace, again.violations) == (known[seed].trace, known[seed].violations)


@pytest.mark.parametrize("seed", [10, 11])
def test_chance_comes_from_the_seed_alone(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """No code asks the machine for random bytes: they differ from run to run."""
    for name in ("token_bytes", "token_hex", "randbits", "randbelow"):
        monkeypatch.setattr(secrets, name, partial(_refuse, name))
    monkeypatch.setattr(os, "urandom", partial(_refuse, "urandom"))
    assert run(write(seed)).violations == []


def _refuse(name: str, *_: object) -> None:
    pytest.fail(f"{name} was called in a simulation")
