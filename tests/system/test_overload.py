"""Overload: the daemon keeps its goodput, refuses the excess at once, and recovers afterwards.

Figures are ratios of alternating peak and overload phases on one daemon. Times are reported, and
asserted with tenfold slack. A peak is the highest rate over several numbers of closed clients. Each
page that the disk reads for whole answers counts once per phase. So no share comes from memory, and
no figure exceeds the limit of the delays.
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
from tierd._proto import admin_pb2 as apb
from tierd.client import Client
from tierd.testing import Daemon, chain, content_of
from tierd.tiers.store.slots import HEADER_BYTES, RUN_BYTES, RUN_SLOTS

MIB = 1 << 20
BLOCKS, BLOCK_BYTES = 64, 128 << 10
DELAY_S, READS = 0.2, 2
"""The delay of each read of a run of slots, and the number of reads at a time."""
READ_BLOCKS = min(RUN_SLOTS, RUN_BYTES["read"] // (BLOCK_BYTES + HEADER_BYTES))
"""Maximum blocks of a run."""
CEILING_PER_S = READS / DELAY_S * READ_BLOCKS / BLOCKS
"""Whole acquires that the disk allows on any machine: about four a second."""
PEAK_THREADS = (2, 4, 8)
"""Threads of each closed client."""
PEAK_LOOKUPS = (1, 8, 16)
"""Calls in flight of each closed client of cheap calls."""
HEALTH_EVERY_S = 0.02
CLIENTS = 2
IDLE = 300
"""Idle connections, of three sorts."""
FLOODS, IN_FLIGHT = 2, 200
REFUSED = ("Overloaded", "nothing")
"""Answers that come at once, without waiting for the disk."""
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
    """Results of load processes."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    in_time: int = 0
    pages: set[int] = field(default_factory=set)

    def merge(self, other: Outcome) -> None:
        """Adds another process's results."""
        self.counts.update(other.counts)
        for name, values in other.seconds.items():
            self.seconds.setdefault(name, []).extend(values)
        self.in_time += other.in_time
        self.pages |= set(other.pages)

    def percentile_ms(self, *names: str, share: float = 0.99) -> float:
        """A percentile over these outcomes. With few samples, a share below the maximum is more robust."""
        return round(1000 * percentile([s for name in names for s in self.seconds.get(name, [])], share), 1)


@dataclass
class Busy:
    """A daemon whose blocks are mostly on disk. seeds: of the sequences."""

    daemon: Daemon
    seeds: list[int]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def load(self, kind: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a load process, which waits for its end time."""
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
            json.dumps(options),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes.append(subprocess.Popen(command, **pipes, text=True))
        return self.processes[-1]

    def forget(self) -> None:
        """Empties host memory, so that the next acquires read the disk."""
        with connected(self.daemon) as client:
            await_true(lambda: client.status().leases == 0, "leases of the load come back")
            client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))

    def end(self) -> None:
        """Kills the processes that a failed test left."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def memory_bytes(self) -> int:
        """The daemon's own memory: resident, without the arena and mapped files."""
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def begin(*processes: subprocess.Popen[str], seconds: float) -> None:
    """Starts all processes at once, when the last is ready."""
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    end = time.monotonic() + seconds
    for process in processes:
        assert process.stdin
        process.stdin.write(f"{end}\n")
        process.stdin.flush()


def ended(*processes: subprocess.Popen[str]) -> Outcome:
    """Their merged outcome, once they have ended."""
    outcome = Outcome()
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        outcome.merge(Outcome(**json.loads(printed)))
    return outcome


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Sequences of 8 MiB, twice the capacity of memory."""
    sequences = count(test=48, nightly=48, weekly=96)
    config = CONFIG.format(host=sequences // 2 * 8, nvme=sequences * 12 // 16 * 16)
    with Daemon(config, faults=True) as daemon, daemon.faults() as faults:
        busy = Busy(daemon, list(range(1, sequences + 1)))
        with Client(daemon.target, timeout_s=60.0) as client:
            space = client.open_namespace(spec(BLOCK_BYTES))
            for seed in busy.seeds:
                hashes = chain(seed, BLOCKS)
                assert client.put(space, hashes, [content_of(name, BLOCK_BYTES) for name in hashes], durable=True)
        faults.arm("nvme.slots.before_read", f"delay:{DELAY_S}")
        yield busy
        busy.end()


def good_per_s(outcome: Outcome, seconds: float) -> float:
    """Whole acquires per second, by the pages that the disk read for them."""
    assert not outcome.counts["wrong"]
    good = len(outcome.pages) / BLOCKS / seconds
    assert good <= 1.05 * CEILING_PER_S, "more than a disk with these delays can give: it was not read"
    return good


def closed(busy: Busy, threads: int) -> list[subprocess.Popen[str]]:
    """Clients that always ask for more, each for its own sequences."""
    return [busy.load("closed", threads=threads, seeds=busy.seeds[i::CLIENTS]) for i in range(CLIENTS)]


def peak(busy: Busy, seconds: float, threads: int) -> float:
    """The peak of the disk in whole acquires per second."""
    busy.forget()
    clients = closed(busy, threads)
    begin(*clients, seconds=seconds)
    return good_per_s(ended(*clients), seconds)


def recovery_s(busy: Busy) -> float:
    """Seconds from the end of the load until three consecutive whole acquires, mostly disk time."""
    busy.forget()
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
    """The outcomes of open, closed, slow, idle and greedy clients, and of health checks and a probe."""
    busy.forget()
    asking = [busy.load("open", rate=rate / CLIENTS, seeds=busy.seeds[i::CLIENTS]) for i in range(CLIENTS)]
    asking += [busy.load("closed", threads=8), busy.load("slow", count=2)]
    around = [busy.load("idle", count=IDLE), busy.load("greedy", in_flight=IN_FLIGHT)]
    checks = [busy.load("health", every_s=HEALTH_EVERY_S), busy.load("probe")]
    begin(*asking, *around, *checks, seconds=seconds)
    outcome = ended(*asking)
    outcome.counts["cut off"] = ended(*around).counts["cut off"]
    return outcome, ended(*checks)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_a_disk_is_asked_for_ten_times_what_it_can(busy: Busy) -> None:
    """Under tenfold load goodput stays above 0.4 of the peak, and refusals come at once with a
    hint. Memory is bounded, health answers, and the daemon recovers when the load ends."""
    rounds, seconds = count(test=1, nightly=4, weekly=6), count(test=4, nightly=15, weekly=30)
    first = {threads: peak(busy, seconds, threads) for threads in PEAK_THREADS}
    threads = max(first, key=lambda number: first[number])
    peaks, goods, told, memory = [first[threads]], list[float](), Outcome(), busy.memory_bytes()
    checks, grown, recovered = Outcome(), list[int](), list[float]()
    while len(goods) < rounds or (not told.counts["cut off"] and len(goods) < 3 * rounds):  # a slow machine offers less
        outcome, health = overload(busy, seconds, 10 * peaks[0])
        goods.append(good_per_s(outcome, seconds))
        grown.append(busy.memory_bytes() - memory)
        recovered.append(recovery_s(busy))
        told.merge(outcome)
        checks.merge(health)
        peaks.append(peak(busy, seconds, threads))
    share = statistics.median(goods) / statistics.median(peaks)
    late_ms, busy_ms = checks.percentile_ms(*REFUSED), checks.percentile_ms("whole")
    report(
        "overload of a disk",
        ceiling_per_s=round(CEILING_PER_S, 2),
        peak_per_s=round(statistics.median(peaks), 2),
        peaks_by_clients={CLIENTS * number: round(value, 2) for number, value in first.items()},
        peaks_per_s=[round(value, 2) for value in peaks],
        goodput_per_s=[round(good, 2) for good in goods],
        goodput_share=round(share, 2),
        offered=told.counts.total(),
        counts=dict(told.counts),
        refusals=sum(checks.counts[name] for name in REFUSED),
        refusals_p90_ms=checks.percentile_ms(*REFUSED, share=0.9),
        refusals_p99_ms=late_ms,
        health_p99_ms=busy_ms,
        memory_grown_mib=round(max(grown) / MIB, 1),
        normal_after_s=max(recovered),
    )
    assert told.counts["Overloaded"] > 10
    assert not told.counts["Overloaded-unhinted"]
    assert told.counts["cut off"] > 0
    assert share > 0.4, "the goal is 0.8; the slack is for a machine that others use too"
    assert max(grown) < 64 * MIB
    assert max(recovered) < 20
    assert late_ms < 10 * max(50.0, busy_ms), "health checks say how busy the machine is"
    assert busy_ms < 1000
    assert set(checks.counts) <= {"whole", "served", *REFUSED}
    assert_nothing_stays(busy)


def assert_nothing_stays(busy: Busy) -> None:
    """No lease and no pinned page of the load remains."""
    with connected(busy.daemon) as client:
        await_true(lambda: client.status().leases == 0, "leases of the load come back")
        await_true(
            lambda: not any(tier.pages_pinned for tier in client.tiers().values()), "pins of the load and of transfers"
        )


def lookups_per_s(busy: Busy, seconds: float, at_once: int) -> float:
    """Whole answers per second of closed clients, each with `at_once` calls in flight within its credits."""
    clients = [busy.load("flood", in_flight=at_once) for _ in range(CLIENTS)]
    begin(*clients, seconds=seconds)
    return ended(*clients).in_time / seconds


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_more_lookups_than_can_be_answered(busy: Busy) -> None:
    """Hundreds of lookups in flight keep a quarter of the peak rate; health answers, memory is bounded."""
    rounds, seconds = count(test=1, nightly=3, weekly=6), count(test=3, nightly=10, weekly=20)
    memory = busy.memory_bytes()
    first = {at_once: lookups_per_s(busy, seconds, at_once) for at_once in PEAK_LOOKUPS}
    at_once = max(first, key=lambda number: first[number])
    alone, among, told, checks = [first[at_once]], list[float](), Outcome(), Outcome()
    for _ in range(rounds):
        floods = [busy.load("flood", in_flight=IN_FLIGHT) for _ in range(FLOODS)]
        polite, health = busy.load("lookups", threads=8), busy.load("health", every_s=HEALTH_EVERY_S)
        begin(*floods, polite, health, seconds=seconds)
        kept, flooded = ended(polite), ended(*floods)
        among.append((kept.in_time + flooded.in_time) / seconds)
        assert set(kept.counts) <= {"whole", "Overloaded"}
        told.merge(flooded)
        checks.merge(ended(health))
        alone.append(lookups_per_s(busy, seconds, at_once))
    grown = busy.memory_bytes() - memory
    report(
        "overload by cheap calls",
        peak_per_s=round(statistics.median(alone)),
        peaks_by_calls={CLIENTS * number: round(value) for number, value in first.items()},
        goodput_per_s=[round(good) for good in among],
        goodput_share=round(statistics.median(among) / statistics.median(alone), 2),
        counts=dict(told.counts),
        health_p99_ms=checks.percentile_ms("whole"),
        memory_grown_mib=round(grown / MIB, 1),
    )
    assert statistics.median(among) > 0.25 * statistics.median(alone), "the goal is 0.5"
    assert checks.percentile_ms("whole") < 1000
    assert grown < 64 * MIB
