"""TierdConnector's loads in the step that computes with them: both sides, a real daemon, vLLM's pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from tests.engines.vllm.test_connector_parts import FULL, NAMES, TOKENS, config, kv_config
from tests.engines.vllm.test_connector_sides import WINDOW, Sides, request, step, told
from tests.still import stand_still
from tests.system.blocks import await_true
from tierd.integrations.loading import _copy
from tierd.integrations.vllm.plan import Done, Orders
from tierd.integrations.vllm.scheduler import _may_load_in_step
from tierd.testing import Daemon

IDS = [4, 5, 6]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def sides(daemon: Daemon) -> Iterator[Sides]:
    """With three blocks stored as r, and the pace of copies known."""
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0, load_deadline_s=20.0)
    asked = request("r", 3)
    assert sides.match(asked) == 0
    sides.tables["r"] = ([1, 2, 3],)
    sides.worker.begin_saves(sides.scheduler.orders(step({"r": 3 * TOKENS})))
    assert sides.worker._saving.drain(timeout_s=60)
    sides.scheduler.reported(told(kv_connector_worker_meta=sides.worker.take_saves()))
    sides.scheduler.finished(asked, ([1, 2, 3],))
    sides.scheduler._store.advice.copied(1 << 20, 1e-3)
    yield sides
    sides.close()


def ordered(sides: Sides, asked: Any, *, tokens: int = 1) -> Orders:
    """The step that loads three blocks of a request to IDS and computes so many tokens, as vLLM does
    it: it allocates the blocks and puts them into its prefix cache at once."""
    assert sides.match(asked) == 3 * TOKENS and sides.scheduler.loads_in_step(asked)
    blocks = [sides.pool.blocks[i] for i in IDS]
    sides.pool.touch(blocks)
    sides.pool.cache_full_blocks(asked, blocks, 0, 3, TOKENS, 0)
    sides.scheduler.allocated(asked, (IDS,), 3 * TOKENS)
    sides.tables[asked.request_id] = (IDS,)
    output = step({asked.request_id: tokens})
    output.scheduled_new_reqs[0].num_computed_tokens = 3 * TOKENS
    return sides.scheduler.orders(output)


def cached(sides: Sides, asked: Any) -> list[bool]:
    """Which of the request's blocks other requests hit in vLLM's prefix cache."""
    names = [make_block_hash_with_group_id(name, 0) for name in asked.block_hashes]
    return [sides.pool.cached_block_hash_to_block.get_one_block(name) is not None for name in names]


def are_equal(sides: Sides, layer: str) -> bool:
    return torch.equal(sides.caches[layer][IDS], sides.caches[layer][[1, 2, 3]])


def lost(orders: Orders) -> Orders:
    """The orders, as if their blocks had been evicted since the lookup."""
    object.__setattr__(orders.loads[0].groups[0], "names", (b"x", b"y", b"z"))
    return orders


def test_a_short_load_runs_in_its_step(sides: Sides) -> None:
    """All layers are there before the step computes. No other request hits the blocks before the step
    has reported, and all do afterwards."""
    asked = request("again", 3)
    orders = ordered(sides, asked)
    assert cached(sides, asked) == [False] * 3
    sides.worker.begin_early(orders)
    sides.worker.begin_loads(orders)
    assert all(are_equal(sides, name) for name in NAMES)
    ended = sides.worker.take_loads()
    assert ended.requests == ended.failed == ended.blocks == set()
    done = sides.worker.take_saves()
    assert done.waited_s > 0
    sides.scheduler.reported(told(kv_connector_worker_meta=done))
    assert cached(sides, asked) == [True] * 3
    assert sides.scheduler.take_counts()["step_loads"] == 1 and not sides.scheduler._entries["again"].is_loading


def test_what_fails_stays_out_of_the_prefix_cache(sides: Sides, daemon: Daemon) -> None:
    """Blocks that are gone when the step begins are reported in it. They are not hit by others, what
    the step completed is not saved, and computing them again saves all."""
    asked = request("again", 4)
    asked.block_hashes = [*request("r", 3).block_hashes, b"new"]
    ids = [*IDS, 7]
    asked.num_tokens = 4 * TOKENS + 1
    orders = ordered(sides, asked, tokens=TOKENS)
    sides.tables["again"] = (ids,)
    assert not orders.saves, "a step that loads saves nothing: the load may fail"
    daemon.restart()
    sides.worker.begin_loads(lost(orders))
    ended = sides.worker.take_loads()
    assert ended.blocks == set(IDS) and ended.requests == set()
    sides.scheduler.reported(told(invalid_block_ids=ended.blocks))
    assert cached(sides, asked)[:3] == [False] * 3
    saves = sides.scheduler.orders(step({"again": 4 * TOKENS})).saves
    assert [save.ids for save in saves] == [tuple(ids)]


def test_an_error_in_a_steps_load_is_a_miss(sides: Sides) -> None:
    """The step goes on, and the load's blocks are missing."""
    orders = ordered(sides, request("again", 3))
    sides.worker._memory = None
    sides.worker.begin_loads(orders)
    assert sides.worker.take_loads().blocks == set(IDS)


def test_a_request_that_ends_in_its_step_is_saved_after_it(sides: Sides) -> None:
    """vLLM ends a request before it tells of the step's failures: its blocks are saved if there are none."""
    for failed in (True, False):
        asked = request(f"ends {failed}", 3)
        asked.block_hashes = [*request("r", 3).block_hashes, f"{failed}".encode()]
        ordered(sides, asked, tokens=TOKENS)
        asked.num_computed_tokens = 4 * TOKENS
        sides.scheduler.finished(asked, ([*IDS, 7],))
        sides.scheduler.reported(told(invalid_block_ids={IDS[1]} if failed else set()))
        assert [save.ids for save in sides.scheduler._orders.saves] == ([] if failed else [(7,)])


@pytest.mark.parametrize("in_step", [True, False])
def test_a_load_that_hangs_ends_at_its_deadline(daemon: Daemon, in_step: bool) -> None:
    """While the daemon hangs, a load that needs it ends, and all its blocks are missing. When the
    daemon answers later, no block changes any more."""
    sides = Sides(daemon, kv_config(FULL), load_deadline_s=0.2, timeout_s=60.0, step_load_s=0.02)
    sides.store(request("r", 3), 3)
    if in_step:
        sides.scheduler._store.advice.copied(1 << 20, 1e-3)
    asked = request("again", 3)
    assert sides.match(asked) == 3 * TOKENS and sides.scheduler.loads_in_step(asked) == in_step
    sides.scheduler.allocated(asked, (IDS,), 3 * TOKENS)
    orders = lost(sides.scheduler.orders(step({"again": 1} if in_step else {})))
    for name in NAMES:
        sides.caches[name][IDS] = -1
    stand_still(daemon.pid)
    try:
        sides.worker.begin_loads(orders)
        missing = set[int]()

        def reported() -> bool:
            missing.update(sides.worker.take_loads().blocks)
            return bool(missing)

        assert reported() or not in_step
        await_true(reported, "a report of the load")
        assert missing == set(IDS) and sides.worker.take_counts()["late_loads"] == 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    await_true(lambda: sides.match(request("r", 3)) == 3 * TOKENS, "the daemon's answers")
    assert all((sides.caches[name][IDS] == -1).all() for name in NAMES)
    assert sides.worker.take_loads().blocks == set()
    sides.close()


def test_where_vllm_cannot_recover_loads_are_asynchronous() -> None:
    """With several groups, a window or async scheduling vLLM does not recover from a step's failure."""
    one = kv_config(FULL)
    assert _may_load_in_step(config(), one)
    assert not _may_load_in_step(config(async_scheduling=True), one)
    assert not _may_load_in_step(config(), kv_config(FULL, FULL))
    assert not _may_load_in_step(config(), kv_config(WINDOW))


def test_long_loads_and_many_loads_are_asynchronous(sides: Sides) -> None:
    """Loads in a step are expected to take step_load_s together, and come from memory alone."""
    scheduler, asked = sides.scheduler, request("again", 3)
    assert sides.match(asked) == 3 * TOKENS and scheduler.loads_in_step(asked)
    entry, most_s = scheduler._entries["again"], scheduler._options.step_load_s

    def is_short(load_s: float) -> bool:
        entry.claimed = replace(entry.claimed, load_s=load_s)
        return scheduler._is_short(entry)

    assert is_short(most_s) and not is_short(1.1 * most_s) and not is_short(0)
    scheduler._step_load_s = most_s / 2
    assert is_short(most_s / 2) and not is_short(0.6 * most_s)
    assert entry.found is not None
    entry.found.tier_of[0][0, 1] = len(scheduler._store.tiers)
    assert not is_short(most_s / 2), "a block is not in memory"


def test_a_step_that_reports_nothing_shifts_no_times(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advisor learns the time of each step with that step's tokens, also after silent steps. It
    learns nothing of the first that computes."""
    scheduler, seen = sides.scheduler, list[Any]()
    monkeypatch.setattr(scheduler._store.advice, "computed", lambda parts, _: seen.append(list(parts)))
    for tokens in (3, 5, 7):
        scheduler.orders(step({}))
        number = scheduler.orders(step({"r": tokens})).step
        scheduler.reported(told(kv_connector_worker_meta=Done({}, step=number)))
    assert seen == [[(0, 5)], [(0, 7)]] and not scheduler._steps


def test_an_old_answer_is_asked_again(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup of a request that queued for long is repeated, once."""
    asked = request("queued", 3)
    sides.scheduler.begin(asked)
    first = sides.scheduler._entries["queued"]
    assert sides.match(asked) == 3 * TOKENS and sides.scheduler._entries["queued"] is first
    first.begun -= 10
    assert sides.match(asked) == 3 * TOKENS
    second = sides.scheduler._entries["queued"]
    assert second is not first
    second.begun -= 10
    assert sides.match(asked) == 3 * TOKENS and sides.scheduler._entries["queued"] is second


class Stream:
    """Stands for a CUDA stream: it records what a load asks of it."""

    def __init__(self) -> None:
        self.said = list[str]()

    def synchronize(self) -> None:
        self.said.append("synchronized")


def test_on_a_device_the_stream_is_awaited() -> None:
    """Copies to a device have ended when the lease is checked."""
    stream, page = Stream(), torch.arange(8, dtype=torch.uint8).numpy()
    target = torch.zeros((2, 4), dtype=torch.uint8)
    _copy([(page, [*target])], stream)
    assert stream.said == ["synchronized"] and target.flatten().tolist() == page.tolist()
