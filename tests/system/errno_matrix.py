"""A daemon through a list of faults, each in one call of its store and at its first to its twentieth time: the cases, and what must hold after each.

Purpose: what `test_errno` and `test_errno_buffered` share; they are two files so that a night can run them side by side. Non-purpose: a daemon on a
disk that fails (trouble.py).

After each case: the daemon lives, no byte is wrong, nothing that was acknowledged durable is lost (also after SIGKILL, with its memory gone), nothing was
acknowledged whose sync failed, no file whose sync failed was synced again, and writes go on. The pauses of the breaker are short here, so that
thousands of cases fit a night.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.depth import count, percentile, report
from tests.system.blocks import connected
from tests.system.shim.iofault import READS, SYNCS, WRITES
from tests.system.test_restart import wipe_arena
from tests.system.trouble import STORE, Troubled, config, troubled
from tierd.testing import chain

HITS = count(test=1, nightly=20, weekly=20)
"""The first so many of each case."""
LIFE_CASES = 60
"""After so many the daemon is killed, and its successor has to have everything from the store."""
KEPT_SEEDS = 100
"""Chains that are looked for; older ones may have been evicted."""
SEG, JOURNAL = "*/nvme-0/seg-*", "*/nvme-0/journal-*"
WIDE = 4096 * np.array([*range(1, 16), *range(17, 26, 2)])
"""Lengths of blocks of which each is of a size class, and so in a slot file, of its own: one sync of them all touches twenty files."""
STRIKE_S = 10.0
"""For so long is the store driven until the fault has struck: while it is out of service a call may come to no file."""


@dataclass(frozen=True)
class Case:
    """A fault in the first to twentieth of these calls. when: "put", "get", "mend": while files that failed are replaced, "cut": a journal is cut back."""

    when: str
    calls: str
    fault: str
    pattern: str = STORE


LIVE = [
    *(Case("put", WRITES, fault) for fault in ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "short")),
    *(Case("put", SYNCS, fault) for fault in ("EIO", "ENOSPC", "EDQUOT", "EINTR")),
    *(Case("get", READS, fault) for fault in ("EIO", "EINTR", "EAGAIN", "short")),
    *(Case("cut", "ftruncate", fault) for fault in ("EIO",)),
]
OPENING = [
    *(Case(when, "open", fault) for when in ("put", "get") for fault in ("EMFILE", "ENFILE", "EIO")),
    *(Case(when, "close", "EIO") for when in ("put", "get")),
]
"""For the page cache alone: with O_DIRECT a slot file is opened when its place is made, and stays open, so a put or a get opens and closes nothing."""
MENDING = [
    *(Case("mend", WRITES, fault) for fault in ("EIO", "ENOSPC", "short")),
    *(Case("mend", SYNCS, fault) for fault in ("EIO", "ENOSPC")),
    *(Case("mend", READS, fault) for fault in ("EIO", "short")),
    *(Case("mend", "open", fault) for fault in ("EIO", "ENOSPC", "EMFILE", "ENFILE")),
    *(Case("mend", "rename", fault) for fault in ("EIO", "ENOSPC")),
    *(Case("mend", "unlink", fault) for fault in ("EIO",)),
    *(Case("mend", "fallocate", fault) for fault in ("EIO", "ENOSPC", "EDQUOT", "EINTR")),
    *(Case("mend", "close", fault) for fault in ("EIO", "EINTR")),
]
QUICK = 'retry_pause = "0.01 s"\nretry_pause_limit = "0.05 s"\n'


class Run:
    """One daemon after another through a list of cases."""

    def __init__(self, world: Troubled) -> None:
        self.world = world
        self.resumed: list[float] = []
        self.missed: Counter[str] = Counter()
        self.fired = self.cases = 0

    def case(self, case: Case, hit: int) -> None:
        """One case to its end, with everything looked at but what SIGKILL leaves."""
        world = self.world
        {"put": self._put, "get": self._get, "mend": self._mend, "cut": self._cut}[case.when](case, hit)
        has_fired = world.io.fired() > 0
        self.fired += has_fired
        self.missed[f"{case.when} {case.calls}"] += not has_fired
        self.cases += 1
        world.io.disarm()
        self.resumed.append(world.await_writes())
        recent = list(world.durable)[-5:]
        world.forget_memory()
        assert _lost(world, recent) == [], f"{case}, hit {hit}: lost"
        assert world.io.synced_again == 0, f"{case}, hit {hit}: a file was synced again after its sync had failed"
        world.durable = dict(list(world.durable.items())[-KEPT_SEEDS:])

    def _arm(self, case: Case, hit: int) -> None:
        self.world.io.arm(case.calls, case.fault, case.pattern, first=hit, times=1)

    def _turns(self) -> Iterator[int]:
        """Numbers, until the fault has struck."""
        begun = time.monotonic()
        for turn in itertools.count():
            yield turn
            if self.world.io.fired() or time.monotonic() - begun > STRIKE_S:
                return

    def _put(self, case: Case, hit: int) -> None:
        self._arm(case, hit)
        for _ in self._turns():
            acknowledged = self.world.put()
            is_fatal = case.calls == SYNCS and case.fault != "EINTR" and self.world.io.fired()
            assert not (is_fatal and acknowledged), f"{case}, hit {hit}: acknowledged although a sync failed"

    def _get(self, case: Case, hit: int) -> None:
        world = self.world
        world.forget_memory()
        self._arm(case, hit)
        recent = list(world.durable)[-24:]
        for turn in self._turns():
            world.client.read(world.namespace, chain(recent[turn % 24], 1))  # a miss, or right
            if turn % 24 == 23:
                world.forget_memory()

    def _mend(self, case: Case, hit: int) -> None:
        """Makes a journal or as many slot files fail, in turns, until the fault has struck while they are replaced."""
        for turn in self._turns():
            self._break(files=0 if (hit + turn) % 2 else hit)
            if not turn:  # only now, so that the first hit is one of mending
                self._arm(case, hit)
            self.resumed.append(self.world.await_writes())

    def _break(self, *, files: int) -> None:
        """The syncs of one put fail: those of so many slot files, or of the journal."""
        world = self.world
        world.io.arm(SYNCS, "EIO", SEG if files else JOURNAL, rule=1)
        acknowledged = world.put(files, length=WIDE[:files]) if files else world.put()
        assert not acknowledged, "acknowledged although a sync failed"
        world.io.disarm(1)

    def _cut(self, case: Case, hit: int) -> None:
        """A journal that was written in part is cut back."""
        self._arm(case, hit)
        for _ in self._turns():
            self.world.io.arm(WRITES, "ENOSPC", JOURNAL, times=1, rule=1)
            self.world.put()
            self.world.io.disarm(1)


def _lives(world: Troubled, cases: list[tuple[Case, int]], run: Run) -> None:
    """All the cases, with a SIGKILL now and then."""
    for start in range(0, len(cases), LIFE_CASES):
        with connected(world.daemon) as world.client:
            pid = world.daemon.pid
            assert _lost(world) == [], f"lost over a SIGKILL after {cases[max(0, start - LIFE_CASES) : start]}"
            for _ in range(24 - min(24, len(world.durable))):
                assert world.put() == 1
            for case, hit in cases[start : start + LIFE_CASES]:
                run.case(case, hit)
            assert (world.client.status().pid, world.client.status().state) == (pid, "serving")
        world.daemon.kill()
        wipe_arena(world.daemon)
        world.daemon.start()
    with connected(world.daemon) as world.client:
        assert _lost(world) == []


def _lost(world: Troubled, seeds: list[int] | None = None) -> list[int]:
    """Seeds of chains that are not to be had for a while: a store that is out of service, or busy, gives misses too."""
    begun = time.monotonic()
    while (seeds := world.lost(seeds)) and time.monotonic() - begun < STRIKE_S:
        time.sleep(0.05)
    return seeds


def through(tmp_path: Path, direct: str, cases: list[tuple[Case, int]]) -> None:
    """All of these cases on this backend, reported."""
    begun = time.monotonic()
    text = config(direct=direct).replace('"16 MiB"', '"256 MiB"').replace('"8 MiB"', '"64 MiB"') + QUICK
    text = text.replace('hang_limit = "1 s"', 'hang_limit = "10 s"')  # slow is not hung, on a machine that is shared
    with troubled(tmp_path, text) as world:
        run, world.block_bytes = Run(world), int(WIDE.max())
        _lives(world, cases, run)
    report(
        "errno matrix",
        direct=direct,
        armed=run.cases,
        fired=run.fired,
        missed=dict(+run.missed),
        resume_p50_s=round(percentile(run.resumed, 0.5), 3),
        resume_p99_s=round(percentile(run.resumed, 0.99), 3),
        resume_most_s=round(max(run.resumed), 3),
        seconds=round(time.monotonic() - begun),
    )
    assert run.fired >= 0.98 * len(cases), f"the load did not come to the calls: {+run.missed}"


def matrix(direct: str) -> list[tuple[Case, int]]:
    """Each case of a backend, at each of its hits."""
    cases = LIVE + (OPENING if direct == "off" else []) + MENDING
    return [(case, hit) for case in cases for hit in range(1, HITS + 1)]
