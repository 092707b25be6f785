"""Deaths at each fault point, during recovery too: no durable block is lost and no byte is wrong."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time

import pytest

from tests.depth import count, report
from tests.system.busy import CONFIG, Busy
from tests.system.warm import Daemon, WarmDaemon
from tierd.errors import Unavailable
from tierd.failpoint import POINTS

AT_START = (
    "arena.open.after_recovery",
    "arena.open.before_recovery",
    "arena.recovery.before_removal",
    "assembly.before_adoption",
    "assembly.before_parts",
    "lifecycle.before_ready",
    "nvme.load.before_piece",
    "nvme.open.before_directory_sync",
    "nvme.open.before_index",
    "nvme.open.before_settle",
    "nvme.settle.before_journal",
    "nvme.settle.before_removal",
)
"""Every start passes these."""
AT_END = (
    "lifecycle.before_settle",
    "nvme.close.before_sync",
    "nvme.compact.before_journal",
    "nvme.compact.before_removal",
    "nvme.compact.before_snapshot",
    "nvme.journal.before_first",
)
"""SIGTERM passes these after something was stored."""
RARE = ("holds.grow.before_map",)
"""Only many leases pass these."""
ONCE = {
    "arena.begin.before_discard": "arena.begin.before_discard=kill",
    "arena.prepare.before_memory": "arena.spare.before_file=delay:0.3;arena.prepare.before_memory=kill",
    "arena.spare.before_file": "arena.spare.before_file=kill@3",
}
"""Passed early in a life or never, so armed at its start. Only the first needs former segments."""
OF_A_GPU = {name for name in POINTS if name.startswith(("cuda.", "mover.device.", "mover.direct."))}
"""Only a device tier of kind cuda passes these: see `test_device_tier_deaths.py`."""
ELSEWHERE = {
    "arena.close.before_catalogue",
    "arena.close.before_discard",
    "cache.acquire.before_promise",
    "loads_by_layer.note.before_note",
    "mover.load.before_decode",
    "mover.store.before_encode",
}
"""Passed by large blocks, encoded stores and a tier that shrinks: see `test_by_layer.py`,
`test_encoded_stores.py`, `test_resize.py`."""
CHOSEN = (
    "arena.publish.before_seal",
    "cache.commit.before_hold",
    "file.replace.before_rename",
    "holds.append.before_seal",
    "nvme.journal.before_sync",
    "nvme.settle.before_removal",
    "nvme.compact.before_removal",
)
"""The fault points of `make test`."""
TURNS = 12
"""A fault point must be passed within this many turns."""
RECENT = 30
"""The newest chains, which are checked after each death. The end checks all."""


class Deaths:
    """A daemon, its load, and the number of its deaths."""

    def __init__(self, daemon: Daemon, chance: random.Random) -> None:
        self.daemon = daemon
        self.chance = chance
        self.busy = Busy(daemon.target)
        self.deaths = self.in_recovery = 0

    def die_at(self, point: str) -> None:
        """The daemon dies at the point, its successor perhaps in recovery; the next one serves right bytes."""
        if point in AT_START:
            self.daemon.kill()
            self._die_in_start(point)
        elif point in ONCE:
            self._die_early(point)
        else:
            self._die_in_life(point)
        self.deaths += 1
        if self.chance.random() < 0.7:
            self._die_in_start(self.chance.choice(AT_START))
            self.in_recovery += 1
        self.daemon.start()
        self.busy.check(self.busy.durable[-RECENT:])
        self.busy.await_room()

    def _die_in_start(self, point: str) -> None:
        self.daemon.start(wait=False, failpoints=f"{point}=kill")
        assert self.daemon.await_end() == -9, f"{point} was not passed by a start"

    def _die_early(self, point: str) -> None:
        self.daemon.kill()
        if point != "arena.begin.before_discard":
            shutil.rmtree(self.daemon.arena)
            self.daemon.arena.mkdir()
        with contextlib.suppress(Unavailable):  # it may die before it serves
            self.daemon.start(failpoints=ONCE[point])
        for _ in range(TURNS):
            if self.daemon.has_ended or self.busy.turn(many_leases=False):
                break
        assert self.daemon.await_end() == -9, f"{point} was not passed within {TURNS} turns"

    def _die_in_life(self, point: str) -> None:
        hits = self._hits_of_a_turn(point)
        with self.daemon.faults() as faults:
            faults.arm(point, f"kill@{self.chance.randint(1, max(1, hits))}")
            for _ in range(TURNS):
                if self.busy.turn(many_leases=point in RARE):
                    break
                if point in AT_END:
                    self.daemon.terminate()
                    break
        assert self.daemon.await_end() == -9, f"{point} was not passed within {TURNS} turns"

    def _hits_of_a_turn(self, point: str) -> int:
        if point in AT_END or point in RARE:
            return 1
        with self.daemon.faults() as faults:
            faults.arm(point, "count")
            ended_by = self.busy.turn(many_leases=False)
            assert not ended_by, ended_by
            return faults.hits()[point]


def die_often(points: list[str], *, seed: int, kind: type[Daemon] = Daemon) -> None:
    """A daemon that dies at all these points in turn."""
    begun = time.monotonic()
    with kind(CONFIG, faults=True) as daemon:
        run = Deaths(daemon, random.Random(seed))
        point = ""
        try:
            assert not run.busy.turn(many_leases=False)  # so that the first start has blocks to recover
            for point in points:
                run.die_at(point)
            daemon.restart()
            run.busy.check(run.busy.durable)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"seed {seed}, {point}: {error}\n{daemon.log[-6000:]}") from error
        finally:
            run.busy.close()
            _report(run, seed=seed, points=len(set(points)), seconds=round(time.monotonic() - begun))
        assert "Traceback" not in daemon.log, daemon.log[-6000:]


def _report(run: Deaths, **figures: int) -> None:
    """Reports the oracle's counts, even of a failed run."""
    busy = run.busy
    report(
        "death at fault points",
        **figures,
        deaths=run.deaths,
        in_recovery=run.in_recovery,
        chains_durable=len(busy.durable),
        blocks_checked=busy.checked,
        lost=len(busy.lost),
        wrong=len(busy.wrong),
    )


def _seed() -> int:
    return int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))


@pytest.mark.timeout(200)
def test_death_at_some_fault_points() -> None:
    """A death at each of seven critical points loses no durable block and no byte is wrong."""
    die_often(list(CHOSEN), seed=_seed())


@pytest.mark.slow
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("part", range(4))
def test_death_at_each_fault_point(part: int) -> None:
    """The same holds for deaths at every fault point that needs no GPU."""
    seed = _seed()
    points = sorted(POINTS.keys() - OF_A_GPU - ELSEWHERE)[part::4] * count(nightly=5, weekly=25)
    random.Random(seed).shuffle(points)
    die_often(points, seed=seed, kind=WarmDaemon)
