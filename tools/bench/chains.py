"""Long prompts through full tiers: cost of a block, longest step of the daemon's loop, others'
wait.

Two instruments. One is the core alone: a step is a call, and its time is the processor's. It runs
every policy, with NVMe and without, and chains of 64 to 65,536 blocks in calls of PART_BLOCKS. Its
disks are a thousand blocks behind. The other is a real daemon: one client puts chains that do not
fit together. A second client looks up one block again and again, and is timed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from tierd.client import Client, NamespaceSpec
from tierd.client.splitting import PART_BLOCKS
from tierd.core.core import Core
from tierd.core.formats.model import PUT_BLOCK, ROOT, BlockStatus, TierKind, TierSpec
from tierd.core.plan import GroupQuery, PutQuery
from tierd.policies.eviction import EVICTION
from tierd.policies.named import NamedPolicies
from tierd.testing import Daemon
from tools.bench.index_scale import hashes
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of

T = TypeVar("T")

LENGTHS = (64, 1024, 8192, 65_536)
PAGE, TOKENS = 4096, 16
FLYING = 1024
ANSWER_S = 60.0
HOST_PAGES = 1 << 14
STEP_MS, WAIT_MS = 20.0, 50.0
"""Of a step of the loop, and of another client's call, at most."""
SPEC = NamespaceSpec(model="bench-chains", tokens_per_block=TOKENS, block_bytes=PAGE)
CONFIG = """\
[[host]]
capacity = "{host} MiB"
segment = "4 MiB"
eviction = "{policy}"
"""
FAR = """
[[nvme]]
capacity = "{nvme} MiB"
segment = "16 MiB"
"""


class Books:
    """A core, and a disk that is behind. took_s, longest_s: processor seconds of all, of one call."""

    def __init__(self, policy: str, pages: int, *, far: bool) -> None:
        size = 1024 * PAGE
        specs = [TierSpec(TierKind.HOST, 0, pages * PAGE, size, writer_owned=True, eviction=policy)]
        specs += [TierSpec(TierKind.NVME, 0, 2 * pages * PAGE, size, eviction=policy)] if far else []
        self.core = Core(specs, policies=NamedPolicies())
        self.core.open_session(1, domain=1)
        self.now, self.flying, self.longest_s, self.took_s = 0.0, deque[int](), 0.0, 0.0

    def put(self, first: int, count: int) -> None:
        """Puts a chain in calls of PART_BLOCKS blocks, and gets its first half, one call at most."""
        names = hashes(first, count)
        self.now += 0.5
        for at in range(0, count, PART_BLOCKS):
            part = names[at : at + PART_BLOCKS]
            blocks = np.zeros(len(part), PUT_BLOCK)
            blocks["hash"], blocks["tokens"], blocks["length"] = part, TOKENS, PAGE
            query = PutQuery(1, names[at - 1].tobytes() if at else ROOT, at, blocks)
            self._store(query)
            self._demote()
        asked = names[: min(PART_BLOCKS, count // 2)]
        group = GroupQuery((1,), asked, TOKENS, TOKENS * len(asked))
        got = self._step(lambda: self.core.acquire(1, groups=[group], kind=TierKind.HOST, now=self.now))
        self.flying.extend(got.plan.transfers["id"].tolist())
        if got.lease:
            self._land(len(self.flying))
            self._step(lambda: self.core.settle(got.lease, now=self.now))
            self._step(lambda: self.core.release(1, leases=[got.lease], now=self.now))

    def _store(self, query: PutQuery) -> None:
        held = self._step(lambda: self.core.reserve(1, groups=[query], kind=TierKind.HOST, now=self.now))
        if held.reservation:
            begun = self._step(
                lambda: self.core.begin_commit(1, reservation=held.reservation, blocks=None, now=self.now)
            )
            digests, ok = np.zeros((len(begun.indices), 16), np.uint8), np.ones(len(begun.indices), bool)
            self._step(
                lambda: self.core.finish_commit(
                    begun, digests=digests, ok=ok, lease=False, keep_open=False, now=self.now
                )
            )

    def _demote(self) -> None:
        self._land(len(self.flying) - FLYING // 2)
        while len(self.flying) < FLYING:
            plan = self._step(lambda: self.core.demote(self.now))
            if not len(plan.transfers):
                break
            self.flying.extend(plan.transfers["id"].tolist())

    def _land(self, count: int) -> None:
        if count > 0:
            ids = np.array([self.flying.popleft() for _ in range(count)], np.uint64)
            statuses = np.full(count, BlockStatus.READY, np.uint16)
            self._step(lambda: self.core.finish(ids, statuses=statuses, now=self.now))

    def _step(self, call: Callable[[], T]) -> T:
        begun = time.thread_time()
        answer = call()
        took_s = time.thread_time() - begun
        self.took_s += took_s
        self.longest_s = max(self.longest_s, took_s)
        return answer


def of_core(policy: str, length: int, pages: int, *, far: bool) -> tuple[float, float]:
    """Microseconds of a block in full tiers, milliseconds of the longest step."""
    pages = max(pages, 2 * length)
    books, first = Books(policy, pages, far=far), 0
    while first < pages * (3 if far else 1):
        books.put(first, length)
        first += length
    books.longest_s, books.took_s, begun = 0.0, 0.0, first
    while first < begun + pages:
        books.put(first, length)
        first += length
    return books.took_s / (first - begun) * 1e6, books.longest_s * 1e3


def waits_s(policy: str, length: int, pages: int, *, far: bool) -> list[float]:
    """Times of lookups while another client puts long chains through a daemon's full tiers."""
    host_mib = pages * PAGE >> 20
    near = CONFIG.format(host=host_mib, policy=policy)
    config = near + FAR.format(nvme=4 * host_mib) if far else "nvme = []\n" + near
    block, first = bytes(PAGE), 0
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=60) as client:
        mine = client.open_namespace(SPEC)

        def put(count: int) -> None:
            nonlocal first
            until = first + count
            while first < until:
                client.put(mine, hashes(first, length), [block] * length)
                first += length

        put(max(2 * pages, 2 * length))
        here, there = (context := multiprocessing.get_context("spawn")).Pipe()
        other = context.Process(target=ask, args=(daemon.target, there), daemon=True)
        other.start()
        told(here)
        put(max(2 * pages, 2 * length))
        here.send(None)
        took: list[float] = told(here)
        other.join(ANSWER_S)
    return took


def told(pipe: Connection) -> Any:
    """Waits at most ANSWER_S for the other client's message. Raises TimeoutError."""
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"chains: the other client did not answer within {ANSWER_S:g} s; is the machine busy?")
    return pipe.recv()


def ask(target: str, pipe: Connection) -> None:
    """The other client, a separate process. It sends its lookups' times when it is asked to end."""
    with Client(target, timeout_s=60) as client:
        space, nobody, took = client.open_namespace(SPEC), hashes(1 << 40, 1), list[float]()
        client.lookup(space, nobody)
        pipe.send(None)
        while not pipe.poll(0.002):
            begun = time.perf_counter()
            client.lookup(space, nobody)
            took.append(time.perf_counter() - begun)
        pipe.send(took)


def rows(effort: Effort) -> list[Row]:
    """Cost, step and wait for each length; the worst of all policies, tiers."""
    pages = effort.pick(HOST_PAGES, 1 << 11)
    lengths = effort.pick(LENGTHS, (64, 1024))
    policies = effort.pick(sorted(EVICTION), ["lru", "reuse-index"])
    return [*_of_core(policies, lengths, pages), *_of_daemon(lengths, pages)]


def _of_core(policies: list[str], lengths: tuple[int, ...], pages: int) -> Iterator[Row]:
    kinds = [(policy, far) for policy in policies for far in (True, False)]
    short_us: list[float] = []
    for length in lengths:
        found = [of_core(policy, length, pages, far=far) for policy, far in kinds]
        costs_us, steps_ms = [cost for cost, _ in found], [step for _, step in found]
        short_us = short_us or costs_us
        worst = max(range(len(kinds)), key=lambda row: costs_us[row] / short_us[row])
        yield row_of(
            f"chain_cost_{length}",
            [costs_us[worst]],
            unit="us",
            limits=[short_us[worst]],
            meaning=f"a block of a chain of {length} through full tiers, of one of {lengths[0]}: {_named(kinds[worst])}, the worst",
        )
        longest = max(range(len(kinds)), key=lambda row: steps_ms[row])
        yield row_of(
            f"chain_step_{length}",
            [steps_ms[longest]],
            unit="ms",
            limits=[STEP_MS],
            meaning=f"the longest step of the loop, processor time: {_named(kinds[longest])}, the worst",
        )


def _of_daemon(lengths: tuple[int, ...], pages: int) -> Iterator[Row]:
    for length in lengths:
        took = {far: waits_s("reuse-index", length, max(pages, 2 * length, 1 << 11), far=far) for far in (True, False)}
        p99_ms = {far: statistics.quantiles(each, n=100)[98] * 1e3 for far, each in took.items() if len(each) > 1}
        worst = max(p99_ms, key=lambda far: p99_ms[far])
        yield row_of(
            f"chain_wait_{length}",
            [p99_ms[worst]],
            unit="ms",
            limits=[WAIT_MS],
            meaning=f"p99 of another client's lookup while chains of {length} are put: {_named(('reuse-index', worst))}, the worse; "
            f"longest {max(map(max, took.values())) * 1e3:.0f} ms",
        )


def _named(kind: tuple[str, bool]) -> str:
    policy, far = kind
    return f"{policy} {'over NVMe' if far else 'alone'}"
