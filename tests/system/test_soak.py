"""Hours of all kinds of calls at half a core: no byte is wrong and memory does not grow.

The measure is the memory that the daemon has from malloc after a garbage collection, read over its
fault socket. PYTHONMALLOC=malloc makes Python objects count too. Caches of numpy and CPython fill
for hours and would look like 4 MiB an hour, so the first query fills them. Resident memory is
reported and bounded, but shows no leak: it varies by a MiB with the arenas of threads and the pools
of Python. Threads have no tcache, which would count as allocated and fill for an hour. Calls in
progress do not affect a window's lowest sample; Theil and Sen's slope goes through these samples.
Rings (the event log) are small, so that they are full when the warm-up ends.

SOAK_SECONDS sets the duration; SOAK_SEED repeats a seed. `-s` prints progress every ten seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.depth import count, report
from tests.system.blocks import await_true, connected
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, NamespaceSpec
from tierd.client.values import OpenedNamespace
from tierd.errors import RetryError, StaleHandle
from tierd.testing import Daemon, chain, content_of, is_content
from tierd.testing.faults import Faults

SECONDS = float(os.environ.get("SOAK_SECONDS", "0")) or count(test=5, nightly=600, weekly=3600)
SEED = int(os.environ.get("SOAK_SEED", "0")) or random.randrange(1 << 30)
WARM_UP_SHARE = 0.4
SAMPLE_S = 1.0
WINDOW_SAMPLES = 10
SLOPE_SECONDS = 1800.0
"""In shorter runs the slope is only reported and the growth bounded. The books grow in steps: one
within ten minutes makes MiB an hour of some hundred KiB."""
GAINED_BYTES = 2 << 20
"""The limit of malloc's growth after the warm-up, for a run too short for a slope."""
SLOPE_MIB_PER_H = 1.0
GROWTH_BYTES = 8 << 20
"""The limit of resident memory's growth after the warm-up."""
TURNS_PER_S = 14.0
"""The rate of each worker, which keeps the total at about half a core."""
WORKERS = 3
SPECS = (
    NamespaceSpec(model="small", tokens_per_block=16, block_bytes=4096),
    NamespaceSpec(model="large", tokens_per_block=16, block_bytes=128 << 10),
)
EPOCH_TURNS = 12
"""An operator bumps an epoch once per this many turns of five seconds; its record stays, about 3 KiB."""
CHAINS, MOST_BLOCKS = 300, 24
LENGTHS, ROUNDS, LEFT_BYTES = 240, 4, 300
"""Lookups and rounds, and the bytes that each may keep: hundreds of ended timers are kept, 60 KiB."""
MIB = 1 << 20
CONFIG = """\
[server]
shutdown_deadline = "5 s"
watch_queue_events = 200

[[host]]
capacity = "48 MiB"
segment = "2 MiB"

[[nvme]]
capacity = "256 MiB"
segment = "8 MiB"
"""
COUNTED = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
CHURN = """
import sys, time
from tierd.client import Client, NamespaceSpec
from tierd.testing import chain
client = Client(sys.argv[1])
space = client.open_namespace(NamespaceSpec(model="small", tokens_per_block=16, block_bytes=4096))
held = [client.acquire(space, chain(seed, 8)) for seed in range(1, 5)]
print("holding", flush=True)
time.sleep(60)
"""


@dataclass(frozen=True)
class Sample:
    """memory_bytes: from malloc; resident_bytes: without the arena; threads: without pools; reads: so far."""

    at: float
    memory_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int
    reads: int


@dataclass
class Soak:
    """State that the workers share. Counts are of calls; `reads` and `wrong` of blocks."""

    daemon: Daemon
    faults: Faults
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, number: int = 1) -> None:
        with self.turn:
            self.counts[what] += number

    def sample(self, begun: float) -> Sample:
        proc = Path(f"/proc/{self.daemon.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return Sample(
            at=time.monotonic() - begun,
            memory_bytes=self.faults.allocated_bytes(),
            resident_bytes=int(status["RssAnon"].split()[0]) * 1024,
            descriptors=len(list((proc / "fd").iterdir())),
            threads=int(status["Threads"]) - sum(map(is_pooled, self.faults.threads())),
            reads=self.counts["reads"],
        )


def is_pooled(thread: str) -> bool:
    """Whether the thread belongs to a pool, which grows to its full size under load."""
    return thread.rpartition("_")[2].isdigit()


class Worker:
    """A client that makes all kinds of calls."""

    def __init__(self, soak: Soak, seed: int) -> None:
        self.soak = soak
        self.chance = random.Random(seed)
        self.client = Client(soak.daemon.target)
        self.spaces: list[OpenedNamespace] = []
        self.held: list[tuple[np.ndarray, list[np.ndarray]]] = []

    def fill(self) -> None:
        """Puts every chain once, so that the books reach their full size."""
        self.spaces = [self.client.open_namespace(spec) for spec in SPECS]
        for seed in range(1, CHAINS + 1):
            with self.forgiven():
                self.put(seed, durable=True)

    def run(self) -> None:
        """Runs until the end. An epoch bump or a full queue that interrupts a turn is no fault."""
        verbs: list[Callable[[], None]] = [self.put, self.get, self.copy, self.durable, self.look, self.churn]
        try:
            self.spaces = [self.client.open_namespace(spec) for spec in SPECS]
            while time.monotonic() < self.soak.end:
                begun = time.monotonic()
                with self.forgiven():
                    self.chance.choices(verbs, (3, 6, 4, 1, 3, 0.3))[0]()
                time.sleep(max(0.0, begun + 1 / TURNS_PER_S - time.monotonic()))
        except BaseException as error:
            self.soak.failures.append(error)
        finally:
            self.held.clear()
            self.client.close()

    @contextlib.contextmanager
    def forgiven(self) -> Iterator[None]:
        try:
            yield
        except (RetryError, StaleHandle) as error:
            self.soak.add(type(error).__name__)
            if isinstance(error, StaleHandle):  # an epoch has ended
                self.spaces = [self.client.open_namespace(spec) for spec in SPECS]

    def pick(self) -> tuple[OpenedNamespace, np.ndarray]:
        """A chain, popular ones more often."""
        return self.wanted(1 + int(CHAINS * self.chance.random() ** 2))

    def wanted(self, seed: int) -> tuple[OpenedNamespace, np.ndarray]:
        """The chain of a seed, with its namespace."""
        return self.spaces[seed % len(SPECS)], chain(seed, 1 + seed * 7 % MOST_BLOCKS)

    def put(self, seed: int = 0, *, durable: bool = False) -> None:
        space, hashes = self.wanted(seed) if seed else self.pick()
        blocks = [content_of(name, space.spec.block_bytes) for name in hashes]
        self.client.put(space, hashes, blocks, durable=durable)
        self.soak.add("durable" if durable else "puts")

    def durable(self) -> None:
        self.put(durable=True)

    def get(self) -> None:
        """Gets by view; keeps some views for a while and checks them again before it drops them."""
        space, hashes = self.pick()
        got = self.client.get(space, hashes)
        self.check(hashes, list(got.views))
        self.held.append((hashes, list(got.views)))
        if len(self.held) > 3:
            self.check(*self.held.pop(self.chance.randrange(len(self.held))))

    def copy(self) -> None:
        space, hashes = self.pick()
        out = [np.empty(space.spec.block_bytes, dtype=np.uint8) for _ in hashes]
        self.check(hashes, out[: self.client.get(space, hashes, out=out).blocks])

    def look(self) -> None:
        space, hashes = self.pick()
        self.client.lookup(space, hashes)
        self.client.prefetch(space, hashes)
        self.soak.add("lookups")

    def churn(self) -> None:
        """Ends the session and begins another."""
        self.held.clear()
        self.client.close()
        self.client = Client(self.soak.daemon.target)
        self.spaces = [self.client.open_namespace(spec) for spec in SPECS]
        self.soak.add("sessions")

    def check(self, hashes: np.ndarray, views: list[np.ndarray]) -> None:
        right = sum(is_content(view, name) for view, name in zip(views, hashes, strict=False))
        self.soak.add("reads", len(views))
        self.soak.add("wrong", len(views) - right)


def operate(soak: Soak) -> None:
    """Bumps epochs, evicts, and kills clients that hold leases."""
    try:
        with connected(soak.daemon) as client:
            for turn in itertools.count():
                if time.monotonic() > soak.end - 2:
                    return
                client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
                if turn % EPOCH_TURNS == 0:
                    client.call(client.admin.BumpEpoch, apb.BumpEpochRequest(model="small"))
                    soak.add("epochs")
                kill_one(soak)
                time.sleep(min(5.0, max(0.0, soak.end - time.monotonic())))
    except BaseException as error:
        soak.failures.append(error)


def kill_one(soak: Soak) -> None:
    process = subprocess.Popen([sys.executable, "-c", CHURN, soak.daemon.target], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    soak.add("killed")


def slope_per_hour(samples: list[Sample], value: Callable[[Sample], float]) -> tuple[float, float, float]:
    """Theil and Sen: the median of the slopes between all pairs, with its 95 % interval after Sen (1968)."""
    at, values = np.array([s.at for s in samples]), np.array([value(s) for s in samples])
    first, second = np.triu_indices(len(samples), k=1)
    slopes = np.sort((values[second] - values[first]) / (at[second] - at[first])) * 3600
    spread = 1.96 * np.sqrt(len(samples) * (len(samples) - 1) * (2 * len(samples) + 5) / 18)
    low, high = int((len(slopes) - spread) / 2), int((len(slopes) + spread) / 2)
    return float(np.median(slopes)), float(slopes[max(0, low)]), float(slopes[min(len(slopes) - 1, high)])


def floors(samples: list[Sample]) -> list[Sample]:
    """The lowest sample of each window."""
    windows = (samples[i : i + WINDOW_SAMPLES] for i in range(0, len(samples), WINDOW_SAMPLES))
    return [min(window, key=lambda s: s.memory_bytes) for window in windows]


def watched(soak: Soak) -> list[Sample]:
    """Samples until the end; prints progress."""
    begun, samples = time.monotonic(), [soak.sample(time.monotonic())]
    while (now := time.monotonic()) < soak.end:
        samples.append(soak.sample(begun))
        if len(samples) % 10 == 0:
            last = samples[-1]
            print(
                f"soak {now - begun:.0f} s: {last.memory_bytes / MIB:.2f} MiB of {last.resident_bytes / MIB:.1f}, "
                f"{last.descriptors} descriptors, {dict(soak.counts)}",
                flush=True,
            )
        time.sleep(min(SAMPLE_S, max(0.0, soak.end - now)))
    return samples


def test_slope_finds_a_leak() -> None:
    """The fit distinguishes a leak of 2 MiB an hour from none, despite noise and a jump at the start."""
    noise = np.random.default_rng(1).normal(0, 0.2 * MIB, 1800)
    flat = [Sample(i * 2.0, int(60 * MIB + noise[i]), 0, 0, 0, 0) for i in range(1800)]
    leaky = [Sample(s.at, int(s.memory_bytes + s.at * 2 * MIB / 3600), 0, 0, 0, 0) for s in flat]
    mid, low, high = slope_per_hour(floors(flat), lambda s: s.memory_bytes / MIB)
    assert low < 0 < high
    assert abs(mid) < 0.2
    mid, low, high = slope_per_hour(floors(leaky), lambda s: s.memory_bytes / MIB)
    assert 1.0 < low < mid < high < 3.0


def test_lookups_of_every_length_leave_nothing_behind() -> None:
    """Lookups of new lengths allocate arrays; less memory stays per lookup than a timer takes."""
    with Daemon(CONFIG, faults=True, env=COUNTED) as daemon, daemon.faults() as faults, Client(daemon.target) as client:
        space, hashes = client.open_namespace(SPECS[0]), chain(1, LENGTHS)
        client.put(space, hashes, [content_of(name, space.spec.block_bytes) for name in hashes])
        client.lookup(space, hashes[:1])
        before = faults.allocated_bytes()
        for length in [*range(1, LENGTHS + 1)] * ROUNDS:
            client.lookup(space, hashes[:length])
        left = (faults.allocated_bytes() - before) / (LENGTHS * ROUNDS)
    report("lookups leave behind", calls=LENGTHS * ROUNDS, bytes_a_call=round(left))
    assert left < LEFT_BYTES


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_is_wrong_and_nothing_grows() -> None:
    """Puts, views, copies, durable puts, prefetches, evictions, epochs and dying clients for the duration."""
    print(f"SOAK_SEED={SEED} SOAK_SECONDS={SECONDS:g}")
    with Daemon(CONFIG, faults=True, env=COUNTED) as daemon, daemon.faults() as faults:
        soak = Soak(daemon, faults, end=0.0)
        workers = [Worker(soak, SEED + i) for i in range(WORKERS)]
        workers[0].fill()
        soak.end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=worker.run) for worker in workers]
        threads.append(threading.Thread(target=operate, args=(soak,)))
        for thread in threads:
            thread.start()
        samples = watched(soak)
        for thread in threads:
            thread.join(60)
        assert soak.failures == []
        assert_clean(soak)
    judge(soak, samples)


def assert_clean(soak: Soak) -> None:
    """When the clients have ended, no lease, reservation or pin of theirs remains."""
    with connected(soak.daemon) as client:
        await_true(lambda: client.status().leases + client.status().reservations == 0, "leases come back")
        await_true(lambda: all(t.pages_pinned == 0 for t in client.tiers().values()), "pins come back")


def judge(soak: Soak, samples: list[Sample]) -> None:
    """Reports the figures and asserts the limits."""
    steady = [s for s in samples if s.at >= WARM_UP_SHARE * SECONDS]
    memory, low, high = slope_per_hour(floors(steady), lambda s: s.memory_bytes / MIB)
    half = len(steady) // 2
    descriptors = [max(s.descriptors for s in part) for part in (steady[:half], steady[half:])]
    threads = [max(s.threads for s in part) for part in (steady[:half], steady[half:])]
    report(
        "soak",
        seconds=SECONDS,
        memory_mib=round(steady[-1].memory_bytes / MIB, 1),
        resident_mib=[round(s.resident_bytes / MIB, 1) for s in (samples[0], steady[0], steady[-1])],
        slope_mib_per_h=round(memory, 2),
        slope_95=f"{low:.2f} to {high:.2f}",
        descriptors=descriptors,
        threads=threads,
        **soak.counts,
    )
    assert soak.counts["wrong"] == 0
    assert soak.counts["reads"] > SECONDS
    assert memory < SLOPE_MIB_PER_H or SECONDS < SLOPE_SECONDS, "memory grows"
    gained = floors(steady)
    assert gained[-1].memory_bytes - gained[0].memory_bytes < GAINED_BYTES or SECONDS >= SLOPE_SECONDS, "memory grows"
    resident = [min(s.resident_bytes for s in part) for part in (steady[:WINDOW_SAMPLES], steady[-WINDOW_SAMPLES:])]
    assert resident[1] - resident[0] < GROWTH_BYTES
    assert descriptors[1] <= descriptors[0] + 8
    assert threads[1] <= threads[0] + 2
