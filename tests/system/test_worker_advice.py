"""The worker computes what a slow store would delay, and loads the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.system.blocks import BlockClient
from tests.system.shim.iofault import READS, IoFaults
from tests.system.test_by_layer import FIRST_HIT
from tests.system.test_encoded_stores import evict
from tests.system.test_worker_by_layer import OPTIONS, SPEC, TOKENS
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client
from tierd.worker.advisor import LOOKS
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages

BLOCKS, TAIL = 3, 10
MARK = BLOCKS * TOKENS + TAIL + 1
"""Stored tokens of a request of two tokens: the last one has no keys."""
FAST_S, SLOW_S, SLOWED_S = 1e-6, 0.3, 0.05
"""Seconds of a pass by the engine's clock; a prompt has two passes. FAST_S is less than any load.
SLOW_S is more than a load from a good store, SLOWED_S less than one that DELAY_S slows."""
DELAY_S = 1.0
"""Of each read."""
RNG = np.random.default_rng(7)
PROMPTS = [tuple(RNG.integers(0, 64, BLOCKS * TOKENS + TAIL).tolist()) for _ in range(3)]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(random_checkpoint(SPEC, seed=3))


@pytest.fixture(scope="module")
def alone(model: Llama) -> list[list[int]]:
    """The tokens of PROMPTS without a cache."""
    with Engine(model, LocalPages(page_shape(model, tokens_per_block=TOKENS)), options=OPTIONS) as engine:
        return [report.tokens for report in serve(engine, *PROMPTS)]


@pytest.fixture(scope="module")
def daemon(model: Llama) -> Iterator[Daemon]:
    """A daemon whose store has PROMPTS."""
    with Daemon(FIRST_HIT) as daemon:
        store(daemon, model)
        yield daemon


@pytest.fixture
def io(tmp_path: Path) -> Iterator[IoFaults]:
    with IoFaults(tmp_path) as io:
        yield io


@pytest.fixture
def slowing(io: IoFaults, model: Llama) -> Iterator[Daemon]:
    """Another one, whose store `io` can slow down."""
    with Daemon(FIRST_HIT, env=io.env) as daemon:
        store(daemon, model)
        yield daemon


@contextmanager
def worker(daemon: Daemon, model: Llama, *, pass_s: float, **given: Any) -> Iterator[tuple[Engine, TierdPages]]:
    """An engine whose passes take so long by its clock, as its advisor knows. No block is near. given: of
    TierdOptions."""
    leave_to_the_store(daemon)
    clock = (pass_s * tick for tick in itertools.count()).__next__
    shape, options = page_shape(model, tokens_per_block=TOKENS), TierdOptions(durable=True, **given)
    with Client(daemon.target) as client:
        source = TierdPages(client, model, name="m", shape=shape, options=options)
        for _ in range(4):
            source.computed([(0, 256)], pass_s)
            source.computed([(256, BLOCKS * TOKENS + TAIL - 256)], pass_s)
        with Engine(model, source, options=OPTIONS, clock=clock) as engine:
            yield engine, source


def store(daemon: Daemon, model: Llama) -> None:
    with worker(daemon, model, pass_s=SLOW_S) as (engine, _):
        serve(engine, *PROMPTS)


def serve(engine: Engine, *prompts: tuple[int, ...], mark: int = 0) -> list[Report]:
    """One after another."""
    return [engine.generate([Request(each, 2, marks=(mark,) if mark else ())])[0] for each in prompts]


def leave_to_the_store(daemon: Daemon) -> None:
    """No block is near, and no prefetch is under way."""
    settle(daemon)
    evict(daemon)


def settle(daemon: Daemon) -> None:
    """Waits for the daemon's transfers."""
    with BlockClient(daemon.target) as operator:
        operator.call(operator.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))


def lookup_calls(daemon: Daemon) -> int:
    """Of all clients so far."""
    with BlockClient(daemon.target) as operator:
        counters = operator.status().counters
    return sum(n for name, n in counters.items() if "calls" in name and "Lookup" in name)


def bring_near(source: TierdPages, tokens: tuple[int, ...]) -> None:
    source._client.acquire(source.namespace, source.namespace.hash(tokens)).release()


def test_a_store_that_is_faster_is_loaded(daemon: Daemon, model: Llama, alone: list[list[int]]) -> None:
    """A slow engine loads all blocks of a good store."""
    with worker(daemon, model, pass_s=SLOW_S) as (engine, source):
        reports, counts = serve(engine, *PROMPTS), source.advice.take_counts()
    assert [report.tokens for report in reports] == alone
    assert [report.tier_tokens["nvme.0"] for report in reports] == [BLOCKS * TOKENS] * len(PROMPTS)
    assert (counts["advised_loads"], counts["advised_computes"], counts["advised_compute_tokens"]) == (
        len(PROMPTS),
        0,
        0,
    )
    assert sum(report.advised_compute_tokens for report in reports) == 0


def test_what_is_faster_to_compute_is_computed(daemon: Daemon, model: Llama, alone: list[list[int]]) -> None:
    """A fast engine takes the blocks that are near, and computes those on a store: the same tokens."""
    with worker(daemon, model, pass_s=FAST_S) as (engine, source):
        bring_near(source, PROMPTS[0][: 2 * TOKENS])
        reports, counts = serve(engine, *PROMPTS[:2]), source.advice.take_counts()
    assert [report.tokens for report in reports] == alone[:2]
    assert [report.reused_tokens for report in reports] == [2 * TOKENS, 0]
    assert [report.advised_compute_tokens for report in reports] == [TOKENS, BLOCKS * TOKENS]
    assert (counts["advised_loads"], counts["advised_computes"]) == (1, 1)
    assert counts["advised_compute_tokens"] == (1 + BLOCKS) * TOKENS


def test_what_was_computed_is_near_for_the_next_request(daemon: Daemon, model: Llama) -> None:
    """The daemon reads blocks that one request computes, so that the next one finds them in memory."""
    with worker(daemon, model, pass_s=FAST_S) as (engine, _):
        first = serve(engine, PROMPTS[0])[0]
        settle(daemon)
        second = serve(engine, PROMPTS[0])[0]
    assert (first.reused_tokens, second.reused_tokens) == (0, BLOCKS * TOKENS)
    assert second.tier_tokens == {"host.0": BLOCKS * TOKENS} and first.tokens == second.tokens


def test_a_block_that_is_on_a_store_keeps_its_computed_page(daemon: Daemon, model: Llama) -> None:
    """A computed block that was left on a store is not read there when it is committed, and is there
    still. Its page is used again."""
    with worker(daemon, model, pass_s=FAST_S) as (engine, source):
        reports = serve(engine, *PROMPTS)
        assert [report.advised_compute_tokens for report in reports] == [BLOCKS * TOKENS] * len(PROMPTS)
        assert [report.recomputed_tokens for report in reports] == [0] * len(PROMPTS)
        assert source._spare and not any(page.hash for page in source._spare)
        assert not source._advisor.declined and not source.faults


def test_a_short_block_is_decided_too(daemon: Daemon, model: Llama, alone: list[list[int]]) -> None:
    """A turn's short last block on a store is loaded by a slow engine and computed by a fast one."""
    turn = (*PROMPTS[0], *alone[0], 1, 2)
    with worker(daemon, model, pass_s=FAST_S) as (engine, source):
        computed = serve(engine, turn, mark=MARK)[0]
        assert (computed.reused_tokens, computed.advised_compute_tokens) == (0, BLOCKS * TOKENS)
        leave_to_the_store(daemon)
        bring_near(source, turn[: BLOCKS * TOKENS])
        mixed = serve(engine, turn, mark=MARK)[0]
        assert (mixed.reused_tokens, mixed.advised_compute_tokens) == (BLOCKS * TOKENS, TAIL + 1)
    with worker(daemon, model, pass_s=SLOW_S) as (engine, _):
        loaded = serve(engine, turn, mark=MARK)[0]
        assert (loaded.reused_tokens, loaded.advised_compute_tokens) == (MARK, 0)
    assert loaded.tokens == mixed.tokens == computed.tokens


def test_a_store_that_becomes_slow_costs_one_load(
    slowing: Daemon, model: Llama, alone: list[list[int]], io: IoFaults
) -> None:
    """When a good store becomes slow, one load is given up. Then nothing waits for the store, and all
    tokens stay the same."""
    with worker(slowing, model, pass_s=SLOWED_S) as (engine, source):
        with io.armed(READS, f"delay:{DELAY_S}", "*.slots"):
            reports, counts = serve(engine, *PROMPTS), source.advice.take_counts()
        assert not source.faults
    assert [report.tokens for report in reports] == alone
    assert [report.reused_tokens for report in reports] == [0] * len(PROMPTS)
    assert (counts["advised_loads"], counts["advised_computes"]) == (1, len(PROMPTS))


def test_after_a_load_was_given_up_nothing_is_read(
    slowing: Daemon, model: Llama, alone: list[list[int]], io: IoFaults
) -> None:
    """A request whose load was given up takes nothing else from the store, although waiting as long again
    would seem to be faster than computing."""
    with worker(slowing, model, pass_s=SLOW_S, load_s=0.1) as (engine, source):
        with io.armed(READS, "hang", "*.slots"):
            report, counts = serve(engine, PROMPTS[0])[0], source.advice.take_counts()
        assert not source.faults
    assert (report.tokens, report.reused_tokens, report.tier_tokens) == (alone[0], 0, {})
    assert (counts["advised_loads"], counts["advised_computes"]) == (1, 1)


def test_a_load_that_took_longer_than_computing_is_regret(slowing: Daemon, model: Llama, io: IoFaults) -> None:
    """Regret counts the time that a load took beyond what computing was expected to take."""
    with worker(slowing, model, pass_s=SLOW_S) as (_, source):
        source.release(source.acquire(PROMPTS[0]).pages)
        assert source.advice.take_counts()["regret_us"] == 0
        with io.armed(READS, f"delay:{DELAY_S}", "*.slots"):
            source.release(source.acquire(PROMPTS[1]).pages)
        counts = source.advice.take_counts()
    assert counts["advised_loads"] == 1 and counts["regret_us"] > 0


def test_waits_for_layers_are_not_computing(daemon: Daemon, model: Llama) -> None:
    """Passes that waited for layers do not make the engine look slow."""
    with worker(daemon, model, pass_s=FAST_S) as (engine, source):
        for _ in range(100):
            source._advisor.waited_s = SLOW_S
            source.computed([(0, 256)], SLOW_S + FAST_S)
        assert serve(engine, PROMPTS[0])[0].advised_compute_tokens == BLOCKS * TOKENS


def test_near_blocks_cost_no_lookup(daemon: Daemon, model: Llama) -> None:
    """A worker that finds no block on a store stops looking up, until it finds one there."""
    longer = PROMPTS[0] * 2
    with worker(daemon, model, pass_s=SLOW_S) as (_, source):

        def lookups(acquires: int) -> int:
            """Lookups during so many acquires."""
            before = lookup_calls(daemon)
            for _ in range(acquires):
                source.release(source.acquire(longer).pages)
            return lookup_calls(daemon) - before

        assert lookups(1) == 1
        assert lookups(LOOKS + 1) == LOOKS
        leave_to_the_store(daemon)
        assert lookups(1) == 0
        assert lookups(2) == 2


def test_without_the_advisor_everything_is_loaded(daemon: Daemon, model: Llama) -> None:
    """The option advisor=False loads what is stored, decides nothing, and asks nothing before."""
    with worker(daemon, model, pass_s=FAST_S, advisor=False) as (engine, source):
        before = lookup_calls(daemon)
        report = serve(engine, PROMPTS[0])[0]
        assert report.reused_tokens == BLOCKS * TOKENS and not source.advice.take_counts()
        assert lookup_calls(daemon) == before
