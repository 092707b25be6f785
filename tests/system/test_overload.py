"""Far more is asked of a daemon than it can do: what it can do it goes on doing, the rest is told at once, and it is over when it is over.

Figures are ratios of phases that follow each other on the same daemon, peak and overload in turns; times are reported, and asserted with
tenfold slack.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.depth import count, percentile, report
from tests.system.blocks import await_true, connected
from tests.system.overload_load import spec
from tierd.client import Client
from tierd.testing import Daemon, chain, content_of

MIB = 1 << 20
BLOCKS, BLOCK_BYTES = 64, 128 << 10
DELAY = "delay:0.05"
"""Of every read of a run of slots, at most 1 MiB, of which two are made at one time: an acquire needs nine, so about four acquires a second,
whatever else the machine does."""
PEAK_THREADS = (2, 8)
"""Of each closed client: few acquires in flight, or more than the queue of the disk takes."""
HEALTH_EVERY_S = 0.02
CLIENTS = 2
IDLE = 300
"""Connections, of three sorts."""
FLOODS, IN_FLIGHT = 2, 200
REFUSED = ("Overloaded", "nothing")
"""What is told at once, without waiting for the disk."""
CONFIG = """\
[server]
shutdown_deadline = "5 s"
session_share = 0.3
session_credits = 32

[[host]]
capacity = "{host} MiB"
segment = "8 MiB"

[[nvme]]
capacity = "{nvme} MiB"
segment = "16 MiB"
queue_depth = 2

[mover]
queue_time = "1 s"
"""


@dataclass
class Outcome:
    """What processes of load saw."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, printed: str) -> None:
        seen = json.loads(printed)
        self.counts.update(seen["counts"])
        for name, values in seen["seconds"].items():
            self.seconds.setdefault(name, []).extend(values)

    def merge(self, other: Outcome) -> None:
        """What another saw, too."""
        self.add(json.dumps({"counts": other.counts, "seconds": other.seconds}))

    def percentile_ms(self, *names: str, share: float = 0.99) -> float:
        """Over what came back under these names; of few, a smaller share says more than the one that was worst."""
        return round(1000 * percentile([s for name in names for s in self.seconds.get(name, [])], share), 1)


@dataclass
class Busy:
    """A daemon whose blocks are on its disk, mostly. seeds: of the sequences."""

    daemon: Daemon
    seeds: list[int]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def load(self, kind: str, seconds: float, **options: Any) -> subprocess.Popen[str]:
        """A process of load, begun."""
        if kind not in {"health", "idle"}:
            options = {"seeds": self.seeds, "blocks": BLOCKS} | options
        if kind in ("closed", "open", "lookups"):
            options["block_bytes"] = BLOCK_BYTES
        command = [
            sys.executable,
            "-m",
            "tests.system.overload_load",
            kind,
            self.daemon.target,
            str(seconds),
            json.dumps(options),
        ]
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return self.processes[-1]

    def end(self) -> None:
        """Of what a failed test left."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def memory_bytes(self) -> int:
        """The daemon's own memory: resident, without the arena and mapped files."""
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def ended(*processes: subprocess.Popen[str]) -> Outcome:
    """Their outcome together, once they have ended."""
    outcome = Outcome()
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        outcome.add(printed)
    return outcome


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Sequences of 8 MiB, twice what memory holds."""
    sequences = count(test=24, nightly=48, weekly=96)
    config = CONFIG.format(host=sequences // 2 * 8, nvme=sequences * 12 // 16 * 16)
    with Daemon(config, faults=True) as daemon, daemon.faults() as faults:
        busy = Busy(daemon, list(range(1, sequences + 1)))
        with Client(daemon.target, timeout_s=60.0) as client:
            space = client.open_namespace(spec(BLOCK_BYTES))
            for seed in busy.seeds:
                hashes = chain(seed, BLOCKS)
                assert client.put(space, hashes, [content_of(name, BLOCK_BYTES) for name in hashes], durable=True)
        faults.arm("nvme.slots.before_read", DELAY)
        yield busy
        busy.end()


def whole_per_s(outcome: Outcome, seconds: float) -> float:
    assert not outcome.counts["wrong"]
    return outcome.counts["whole"] / seconds


def peak(busy: Busy, seconds: float, threads: int) -> float:
    """Whole acquires a second of closed clients, which ask for as much as they are given."""
    return whole_per_s(ended(*[busy.load("closed", seconds, threads=threads) for _ in range(CLIENTS)]), seconds)


def recovery_s(busy: Busy) -> float:
    """Until three acquires in a row are whole, after the load has ended."""
    begun, good = time.monotonic(), 0
    with Client(busy.daemon.target) as client:
        space = client.open_namespace(spec(BLOCK_BYTES))

        def is_normal() -> bool:
            nonlocal good
            with client.acquire(space, chain(busy.seeds[good], BLOCKS)) as lease:
                good = good + 1 if len(lease) == BLOCKS else 0
            return good == 3

        await_true(is_normal, "three whole acquires in a row")
    return round(time.monotonic() - begun, 2)


def overload(busy: Busy, seconds: float, rate: float) -> tuple[Outcome, Outcome]:
    """Open clients at this rate in all, a polite one among them, readers that do not read, idle connections; and what health checks and a prober saw."""
    processes = [busy.load("open", seconds, rate=rate / CLIENTS) for _ in range(CLIENTS)]
    processes += [busy.load("closed", seconds, threads=8), busy.load("slow", seconds, count=2)]
    around = [busy.load("idle", seconds, count=IDLE), busy.load("greedy", seconds, in_flight=IN_FLIGHT)]
    checks = [busy.load("health", seconds, every_s=HEALTH_EVERY_S), busy.load("probe", seconds)]
    outcome = ended(*processes)
    outcome.counts["cut off"] = ended(*around).counts["cut off"]
    return outcome, ended(*checks)


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_disk_is_asked_for_ten_times_what_it_can(busy: Busy) -> None:
    """Goodput stays near the peak, refusals come at once with a hint, memory stays, health answers, and it is over with the load."""
    rounds, seconds = count(test=1, nightly=4, weekly=6), count(test=4, nightly=15, weekly=30)
    first = {threads: peak(busy, seconds, threads) for threads in PEAK_THREADS}
    threads = max(first, key=lambda number: first[number])
    peaks, goods, told, memory = [first[threads]], [], Outcome(), busy.memory_bytes()
    checks = Outcome()
    while len(goods) < rounds or (not told.counts["cut off"] and len(goods) < 3 * rounds):  # a slow machine offers less
        outcome, health = overload(busy, seconds, 10 * peaks[0])
        goods.append(whole_per_s(outcome, seconds))
        grown, recovered = busy.memory_bytes() - memory, recovery_s(busy)
        told.merge(outcome)
        checks.merge(health)
        peaks.append(peak(busy, seconds, threads))
    share = statistics.median(goods) / statistics.median(peaks)
    report(
        "overload of a disk",
        peak_per_s=round(statistics.median(peaks), 1),
        peak_threads=CLIENTS * threads,
        goodput_per_s=[round(good, 1) for good in goods],
        peaks_per_s=[round(value, 1) for value in peaks],
        goodput_share=round(share, 2),
        offered=told.counts.total(),
        counts=dict(told.counts),
        refusals=sum(checks.counts[name] for name in REFUSED),
        refusals_p90_ms=checks.percentile_ms(*REFUSED, share=0.9),
        refusals_p99_ms=checks.percentile_ms(*REFUSED),
        health_p99_ms=checks.percentile_ms("whole"),
        memory_grown_mib=round(grown / MIB, 1),
        normal_after_s=recovered,
    )
    assert told.counts["Overloaded"] > 10
    assert not told.counts["Overloaded-unhinted"]
    assert told.counts["cut off"] > 0
    assert share > 0.4, "the goal is 0.8; the slack is for a machine that others use too"
    assert grown < 64 * MIB
    late_ms, busy_ms = checks.percentile_ms(*REFUSED), checks.percentile_ms("whole")
    assert late_ms < 10 * max(50.0, busy_ms), "health checks say how busy the machine is"
    assert checks.percentile_ms("whole") < 1000
    assert set(checks.counts) <= {"whole", "served", *REFUSED}
    assert_nothing_stays(busy)


def assert_nothing_stays(busy: Busy) -> None:
    """No lease, no page and no call of the load is left."""
    with connected(busy.daemon) as client:
        await_true(lambda: client.status().leases == 0, "leases of the load come back")
        assert all(tier.pages_pinned == 0 for tier in client.tiers().values())


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_more_lookups_than_can_be_answered(busy: Busy) -> None:
    """With hundreds of lookups in flight as many are answered as before, or nearly; health answers, and memory stays."""
    rounds, seconds = count(test=1, nightly=3, weekly=6), count(test=3, nightly=10, weekly=20)
    memory = busy.memory_bytes()
    alone, among, told, checks = [], [], Outcome(), Outcome()
    for _ in range(rounds):
        alone.append(ended(busy.load("lookups", seconds, threads=8)).counts["whole"] / seconds)
        floods = [busy.load("flood", seconds, in_flight=IN_FLIGHT) for _ in range(FLOODS)]
        polite, health = busy.load("lookups", seconds, threads=8), busy.load("health", seconds, every_s=HEALTH_EVERY_S)
        kept = ended(polite)
        among.append(kept.counts["whole"] / seconds)
        assert set(kept.counts) <= {"whole", "Overloaded"}
        flooded = ended(*floods)
        among[-1] += flooded.counts["whole"] / seconds
        told.merge(flooded)
        checks.merge(ended(health))
    grown = busy.memory_bytes() - memory
    report(
        "overload by cheap calls",
        peak_per_s=round(statistics.median(alone)),
        goodput_share=round(statistics.median(among) / statistics.median(alone), 2),
        counts=dict(told.counts),
        health_p99_ms=checks.percentile_ms("whole"),
        memory_grown_mib=round(grown / MIB, 1),
    )
    assert statistics.median(among) > 0.25 * statistics.median(alone), "the goal is 0.5"
    assert checks.percentile_ms("whole") < 1000
    assert grown < 64 * MIB
