"""Cases and checks for faults in each call of a daemon's store, at its first to twentieth time.

Purpose: the code that `test_errno` and `test_errno_buffered` share. They are two files so that a
nightly run can run them in parallel. Non-purpose: a daemon on a disk that fails (trouble.py).
After each case the daemon lives, no byte is wrong, and no block acknowledged as durable is lost.
The last holds after SIGKILL without the arena, too. The daemon acknowledges no write whose sync
failed, never syncs such a file again, and goes on writing. The breaker's pauses are short, so that
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
"""The number of times at which each case strikes."""
LIFE_CASES = 60
"""After this many cases the test kills the daemon. The next one must read everything from the store."""
KEPT_SEEDS = 100
"""The newest chains, which each check looks up. The daemon may have evicted older ones."""
SEG, JOURNAL = "*/nvme-0/seg-*", "*/nvme-0/journal-*"
WIDE = 4096 * np.array([*range(1, 16), *range(17, 26, 2)])
"""Block lengths, each of its own size class and slot file: one sync of them touches twenty files."""
STRIKE_S = 10.0
"""At most this long a case waits for its fault. A store out of service may touch no file."""


@dataclass(frozen=True)
class Case:
    """A fault in these calls. "mend": failed files are replaced; "cut": a journal is cut back."""

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
"""For the page cache alone. With O_DIRECT slot files stay open from the start."""
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
        """Runs one case and every check except those after SIGKILL."""
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
        """Counts up until the fault has struck."""
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
            world.client.read(world.namespace, chain(recent[turn % 24], 1))  # a miss, or the right bytes
            if turn % 24 == 23:
                world.forget_memory()

    def _mend(self, case: Case, hit: int) -> None:
        """Fails a journal or `hit` slot files, in turns, until the fault strikes during their repair."""
        for turn in self._turns():
            self._break(files=0 if (hit + turn) % 2 else hit)
            if not turn:  # armed only now, so that the first hit is one of mending
                self._arm(case, hit)
            self.resumed.append(self.world.await_writes())

    def _break(self, *, files: int) -> None:
        """Fails the syncs of one put: those of `files` slot files, or of the journal."""
        world = self.world
        world.io.arm(SYNCS, "EIO", SEG if files else JOURNAL, rule=1)
        acknowledged = world.put(files, length=WIDE[:files]) if files else world.put()
        assert not acknowledged, "acknowledged although a sync failed"
        world.io.disarm(1)

    def _cut(self, case: Case, hit: int) -> None:
        """The store cuts a partly written journal back."""
        self._arm(case, hit)
        for _ in self._turns():
            self.world.io.arm(WRITES, "ENOSPC", JOURNAL, times=1, rule=1)
            self.world.put()
            self.world.io.disarm(1)


def _lives(world: Troubled, cases: list[tuple[Case, int]], run: Run) -> None:
    """Runs all cases, with a SIGKILL after every LIFE_CASES."""
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
    """Seeds of chains that still miss after STRIKE_S. A store out of service or busy gives misses too."""
    begun = time.monotonic()
    while (seeds := world.lost(seeds)) and time.monotonic() - begun < STRIKE_S:
        time.sleep(0.05)
    return seeds


def through(tmp_path: Path, direct: str, cases: list[tuple[Case, int]]) -> None:
    """Runs all these cases on this backend and reports them."""
    begun = time.monotonic()
    text = config(direct=direct).replace('"16 MiB"', '"256 MiB"').replace('"8 MiB"', '"64 MiB"') + QUICK
    text = text.replace('hang_limit = "1 s"', 'hang_limit = "10 s"')  # slow is not hung, on a shared machine
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
