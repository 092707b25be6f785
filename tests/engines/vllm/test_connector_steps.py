"""TierdConnector's loads in the step that computes with them: both sides, a real daemon, vLLM's pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from tests.engines.vllm.test_connector_parts import FULL, NAMES, TOKENS, config, kv_config
from tests.engines.vllm.test_connector_sides import WINDOW, Sides, request, step, told
from tests.system.blocks import await_true
from tierd.integrations.loading import LayerLoad
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


def test_each_layer_is_there_when_it_is_computed(sides: Sides) -> None:
    """Each layer's wait returns with its KV in place. No other request hits the blocks before the step
    has reported, and all do afterwards."""
    asked = request("again", 3)
    orders = ordered(sides, asked)
    assert cached(sides, asked) == [False] * 3
    sides.worker.begin_early(orders)
    sides.worker.begin_loads(orders)
    for name in NAMES:
        sides.worker.await_layer(name)
        assert are_equal(sides, name)
    sides.worker.await_layer("a layer that shares the KV of another")
    ended = sides.worker.take_loads()
    assert ended.requests == ended.failed == ended.blocks == set()
    done = sides.worker.take_saves()
    assert isinstance(done, Done) and done.waited_s > 0
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
    with_gone = Orders(orders.spaces, orders.loads)
    object.__setattr__(with_gone.loads[0].groups[0], "names", (b"x", b"y", b"z"))
    sides.worker.begin_loads(with_gone)
    for name in NAMES:
        sides.worker.await_layer(name)
    ended = sides.worker.take_loads()
    assert ended.blocks == set(IDS) and ended.requests == set()
    sides.scheduler.reported(told(invalid_block_ids=ended.blocks))
    assert cached(sides, asked)[:3] == [False] * 3
    saves = sides.scheduler.orders(step({"again": 4 * TOKENS})).saves
    assert [save.ids for save in saves] == [tuple(ids)]


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
    """While the daemon hangs, the load is given up and all its blocks are missing. When the daemon
    answers later, no block changes any more."""
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0, load_deadline_s=0.2, timeout_s=60.0)
    sides.store(request("r", 3), 3)
    if in_step:
        sides.scheduler._store.advice.copied(1 << 20, 1e-3)
    asked = request("again", 3)
    assert sides.match(asked) == 3 * TOKENS and sides.scheduler.loads_in_step(asked) == in_step
    sides.scheduler.allocated(asked, (IDS,), 3 * TOKENS)
    output = step({"again": 1} if in_step else {})
    orders = sides.scheduler.orders(output)
    for name in NAMES:
        sides.caches[name][IDS] = -1
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        sides.worker.begin_loads(orders)
        for name in NAMES if in_step else ():
            sides.worker.await_layer(name)
        missing = set[int]()

        def reported() -> bool:
            ended = sides.worker.take_loads()
            missing.update(ended.blocks)
            return bool(missing)

        await_true(reported, "a report of the load")
        assert missing == set(IDS) and sides.worker.take_counts()["late_loads"] == 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    loads = sides.worker._loads
    assert loads._now.drain(timeout_s=60) and loads._later.drain(timeout_s=60)
    assert all((sides.caches[name][IDS] == -1).all() for name in NAMES)
    assert sides.worker.take_loads().blocks == set()
    sides.close()


def test_layers_that_nobody_waited_for_are_missing(sides: Sides) -> None:
    """If a step computed without waiting, its blocks are missing, and later steps wait before they begin."""
    first, second = (ordered(sides, request(name, 3)) for name in ("one", "two"))
    sides.worker.begin_loads(first)
    sides.worker.await_layer(NAMES[0])
    assert sides.worker.take_loads().blocks == set(IDS)
    for name in NAMES:
        sides.caches[name][IDS] = -1
    sides.worker.begin_loads(second)
    assert all(are_equal(sides, name) for name in NAMES)
    assert sides.worker.take_loads().blocks == set()


def test_where_vllm_cannot_recover_loads_are_asynchronous() -> None:
    """With several groups, a window or async scheduling vLLM does not recover from a step's failure."""
    one = kv_config(FULL)
    assert _may_load_in_step(config(), one)
    assert not _may_load_in_step(config(async_scheduling=True), one)
    assert not _may_load_in_step(config(), kv_config(FULL, FULL))
    assert not _may_load_in_step(config(), kv_config(WINDOW))


def test_long_loads_and_many_loads_are_asynchronous(sides: Sides) -> None:
    """A step waits for loads of step_load_s together, and for longer ones if the engine has one request."""
    scheduler, most_s = sides.scheduler, sides.scheduler._options.step_load_s
    scheduler.begin(request("one", 3))
    assert scheduler._is_short(4 * most_s) and not scheduler._is_short(6 * most_s) and not scheduler._is_short(0)
    scheduler.begin(request("two", 3))
    assert scheduler._is_short(most_s) and not scheduler._is_short(1.1 * most_s)
    scheduler._step_load_s = most_s / 2
    assert scheduler._is_short(most_s / 2) and not scheduler._is_short(0.6 * most_s)


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

    def record_event(self) -> Any:
        self.said.append("event")
        return SimpleNamespace(wait=lambda: self.said.append("waited"))

    def synchronize(self) -> None:
        self.said.append("synchronized")


def test_on_a_device_the_stream_orders_layers() -> None:
    """Each layer has an event after its copies, for which the caller's stream waits. The stream is
    awaited before a result, and before a load that was given up is reported."""
    stream = Stream()
    load, page = LayerLoad(stream), torch.arange(8, dtype=torch.uint8).numpy()
    target = torch.zeros((2, 4), dtype=torch.uint8)
    load.copy([(page, [*target])])
    assert stream.said == ["event", "event", "synchronized"] and target.flatten().tolist() == page.tolist()
    assert load.wait(1, timeout_s=0) and stream.said[-1] == "waited"
    assert load.give_up() and stream.said[-1] == "synchronized"
