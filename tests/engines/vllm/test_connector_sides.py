"""TierdConnector's two sides, a real daemon, vLLM's block pool, no engine: waits and retained blocks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.depth import report
from tests.engines.vllm.test_connector_parts import BLOCKS, FULL, HEAD, HEADS, NAMES, TOKENS, caches, config, kv_config
from tests.system.blocks import await_true
from tierd.integrations.loading import Loaded
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.plan import NULL_BLOCK, GroupLoad, Load, Orders
from tierd.integrations.vllm.scheduler import SchedulerSide
from tierd.integrations.vllm.spaces import block_bytes
from tierd.integrations.vllm.worker import WorkerSide, _missing
from tierd.testing import Daemon

WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32, sliding_window=65
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def request(name: str, blocks: int, **more: Any) -> Any:
    """The fields of a vLLM request that tierd reads; its prompt is so many blocks and a token."""
    nothing = dict.fromkeys(("lora_request", "cache_salt", "mm_features", "prompt_embeds"))
    return SimpleNamespace(
        request_id=name,
        num_preemptions=0,
        num_tokens=blocks * TOKENS + 1,
        num_prompt_tokens=blocks * TOKENS + 1,
        num_computed_tokens=blocks * TOKENS,
        num_output_placeholders=0,
        block_hashes=[f"{i}".encode() for i in range(blocks)],
        all_token_ids=list(range(blocks * TOKENS + 1)),
        **nothing | more,
    )


def step(tokens: dict[str, int]) -> Any:
    """The fields of a SchedulerOutput that tierd reads, for new requests."""
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in tokens]
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens)


def outcome(worker: WorkerSide) -> Any:
    """The fields of a KVConnectorOutput that tierd reads, after all saves have ended."""
    assert worker._saving.drain(timeout_s=60)
    return SimpleNamespace(
        kv_connector_worker_meta=worker.take_saves(),
        invalid_block_ids=set(),
        failed_recving=set(),
        finished_recving=set(),
    )


class Sides:
    """The scheduler's and the worker's side, over one memory and one block pool."""

    def __init__(self, daemon: Daemon, kv: Any, *, role: str = "kv_both", **options: Any) -> None:
        # A busy machine must not look like a dead daemon. Short loads run in their step.
        patient = {"lookup_timeout_s": 20.0, "timeout_s": 20.0, "step_load_s": 0.9}
        setup = config(is_kv_consumer=role != "kv_producer", is_kv_producer=role != "kv_consumer")
        words = ConnectorOptions(target=daemon.target, **patient | options)
        self.pool = BlockPool(kv.num_blocks, enable_caching=True, hash_block_size=TOKENS)
        self.scheduler = SchedulerSide(setup, kv, words)
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.scheduler.bind(SimpleNamespace(block_pool=self.pool, get_block_ids=self.tables.__getitem__))
        self.worker = WorkerSide(setup, kv, words, rank=0)
        self.caches = caches(KVCacheLayout.LBNHC)
        self.worker.register(self.caches)

    def match(self, asked: Any) -> int:
        """Asks until the lookup has an answer."""
        found: list[int] = []

        def known() -> bool:
            tokens = self.scheduler.match(asked, 0)
            found.extend([] if tokens is None else [tokens])
            return bool(found)

        await_true(known, "a lookup's answer")
        return found[0]

    def compute(self, asked: Any, blocks: int) -> Orders:
        """Runs a step that computes so many blocks of a new request, and returns its orders."""
        assert self.match(asked) == 0
        given = self.pool.get_new_blocks(blocks)
        self.tables[asked.request_id] = ([block.block_id for block in given],)
        orders = self.scheduler.orders(step({asked.request_id: blocks * TOKENS}))
        self.pool.free_blocks(given)
        return orders

    def store(self, asked: Any, blocks: int) -> None:
        """Computes so many blocks and saves them."""
        self.worker.begin_saves(self.compute(asked, blocks))
        self.scheduler.reported(outcome(self.worker))

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def test_blocks_are_retained_until_they_are_copied(daemon: Daemon) -> None:
    """Blocks being saved, at most the share, are not reused before the worker reports. Until then
    vLLM's pool refuses a reset."""
    sides = Sides(daemon, kv_config(FULL), retained_share=0.5)
    asked, blocks = request("r", 6), sides.pool.get_new_blocks(6)
    assert sides.match(asked) == 0
    sides.tables["r"] = ([block.block_id for block in blocks],)
    orders = sides.scheduler.orders(step({"r": 6 * TOKENS}))
    assert [len(save.ids) for save in orders.saves] == [BLOCKS // 2] and sides.scheduler.is_retaining
    sides.pool.free_blocks(blocks)
    assert sides.pool.get_num_free_blocks() == BLOCKS - 1 - BLOCKS // 2 and not sides.pool.reset_prefix_cache()
    sides.worker.begin_saves(orders)
    sides.scheduler.reported(outcome(sides.worker))
    assert sides.pool.get_num_free_blocks() == BLOCKS - 1 and not sides.scheduler.is_retaining
    assert sides.pool.reset_prefix_cache()
    assert sides.match(request("again", 6)) == BLOCKS // 2 * TOKENS
    sides.close()


def test_a_window_asks_for_its_last_blocks(daemon: Daemon) -> None:
    """Blocks that a window has passed are neither saved nor looked up; both groups load to vLLM's blocks."""
    sides = Sides(daemon, kv_config(FULL, WINDOW), retained_share=1.0)
    asked, full = request("r", 3), [1, 2, 3]
    assert sides.match(asked) == 0
    sides.tables["r"] = (full, [NULL_BLOCK, 4, 5])
    orders = sides.scheduler.orders(step({"r": 3 * TOKENS}))
    assert [(save.group, save.position, save.ids) for save in orders.saves] == [(0, 0, (1, 2, 3)), (1, 1, (4, 5))]
    kept = {name: tensor.clone() for name, tensor in sides.caches.items()}
    sides.worker.begin_saves(orders)
    sides.scheduler.reported(outcome(sides.worker))
    again = request("again", 3)
    assert sides.match(again) == 3 * TOKENS
    for name in NAMES:
        sides.caches[name][1:6] = 0
    sides.scheduler.allocated(again, (full, [NULL_BLOCK, 4, 5]), 3 * TOKENS)
    sides.worker.begin_loads(sides.scheduler.orders(step({})))
    assert sides.worker._loading.drain(timeout_s=60)
    ended = sides.worker.take_loads()
    assert ended.requests == {"again"} and not ended.failed and not ended.blocks
    assert all(torch.equal(sides.caches[name], kept[name]) for name in NAMES)
    sides.close()


class Late:
    """A device event that the test completes by `reach`. waiters: how many threads waited for it."""

    def __init__(self) -> None:
        self._reached, self.waiters = threading.Event(), 0

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        self.waiters += 1
        assert self._reached.wait(60)


def test_the_device_has_read_a_block_before_it_is_loaded_or_saved(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save reads, and a load writes, only after the device's work so far has finished."""
    sides, events = Sides(daemon, kv_config(FULL), retained_share=1.0), [Late(), Late()]
    asked = request("r", 3)
    orders = sides.compute(asked, 3)
    assert sides.worker._memory is not None
    sides.worker._memory.is_on_device = True
    given = iter(events)
    monkeypatch.setattr("tierd.integrations.vllm.worker._now", lambda: next(given))
    saved, loaded = events
    ids = list(orders.saves[0].ids)
    kept = {name: tensor.clone() for name, tensor in sides.caches.items()}
    sides.worker.begin_saves(orders)
    await_true(lambda: saved.waiters == 1, "a save that waits")
    assert not sides.worker.take_saves().saves
    saved.reach()
    sides.scheduler.reported(outcome(sides.worker))
    again = request("again", 3)
    assert sides.match(again) == 3 * TOKENS
    sides.scheduler.allocated(again, (ids,), 3 * TOKENS)
    orders = sides.scheduler.orders(step({}))
    for name in NAMES:
        sides.caches[name][ids] = -1  # stands for values that a running step still reads
    sides.worker.begin_loads(orders)
    await_true(lambda: loaded.waiters == 1, "a load that waits")
    assert all((sides.caches[name][ids] == -1).all() for name in NAMES)
    loaded.reach()
    assert sides.worker._loading.drain(timeout_s=60)
    assert sides.worker.take_loads().requests == {"again"}
    assert all(torch.equal(sides.caches[name][ids], kept[name][ids]) for name in NAMES)
    sides.close()


def test_blocks_that_a_need_passes_over_are_missing() -> None:
    """A block that vLLM wants and tierd did not copy is reported, or vLLM would use it as valid."""
    part = GroupLoad((b"a", b"b", b"c", b"d"), 1, (5, 6, NULL_BLOCK))
    assert _missing(part, Loaded(128, (4,), (0,)), 0) == []
    assert _missing(part, Loaded(128, (4,), (2,)), 0) == [5]
    assert _missing(part, Loaded(64, (2,), (0,)), 0) == [6]
    assert _missing(part, Loaded(), 0) == [5, 6]


def test_what_is_not_there_is_told_once(daemon: Daemon) -> None:
    """A load of unstored blocks reports each once. With several groups or a window it reports the
    request: vLLM would go on before the gap, without its window."""
    several, window = kv_config(FULL, FULL), kv_config(WINDOW)
    for kv, failed, blocks in ((kv_config(FULL), set(), {5, 6}), (several, {"r"}, set()), (window, {"r"}, set())):
        sides = Sides(daemon, kv)
        sides.scheduler.begin(request("r", 2))
        part = GroupLoad((b"x", b"y"), 0, (5, 6))
        spaces = sides.scheduler._spaces
        sides.worker.begin_loads(Orders(spaces, [Load("r", (part,) * len(spaces))]))
        assert sides.worker._loading.drain(timeout_s=60)
        ended = sides.worker.take_loads()
        assert (ended.requests, ended.failed, ended.blocks) == ({"r"}, failed, blocks)
        assert sides.worker.take_loads().requests == set()
        sides.close()


def told(**more: Any) -> Any:
    """The fields of a KVConnectorOutput that tierd reads, for loads."""
    nothing = {"invalid_block_ids": set(), "failed_recving": set(), "finished_recving": set()}
    return SimpleNamespace(**{"kv_connector_worker_meta": None} | nothing | more)


def test_what_one_rank_missed_is_saved_again(daemon: Daemon) -> None:
    """If one rank reports missing blocks before other ranks end, the request's blocks are saved again."""
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0)
    asked, ids = request("r", 3), [1, 2, 3]
    assert sides.match(asked) == 0
    sides.tables["r"] = (ids,)
    sides.worker.begin_saves(sides.scheduler.orders(step({"r": 3 * TOKENS})))
    sides.scheduler.reported(outcome(sides.worker))
    counts = sides.worker.take_counts()
    assert counts["saved_bytes"] == 3 * block_bytes(kv_config(FULL).kv_cache_groups[0])
    for name, failure in (("early", {"invalid_block_ids": {2}}), ("whole", {})):
        again = request(name, 3)
        assert sides.match(again) == 3 * TOKENS
        sides.scheduler.allocated(again, (ids,), 3 * TOKENS)
        sides.scheduler.orders(step({}))
        sides.scheduler.reported(told(**failure))
        sides.scheduler.reported(told(finished_recving={name}))
        sides.tables[name] = (ids,)
        saves = sides.scheduler.orders(step({name: 3 * TOKENS + 1})).saves
        assert [save.ids for save in saves] == ([(1, 2, 3)] if failure else [])
    sides.close()


def test_an_adapters_files_divide(daemon: Daemon, tmp_path: Path) -> None:
    """vLLM's hashes hold a LoRA adapter's name and path only. An engine that loads changed files
    misses the old blocks. One with the old files hits, until it loads anew in place."""
    weights, adapter = tmp_path / "adapter_model.safetensors", LoRARequest("one", 1, str(tmp_path))
    weights.write_bytes(b"old")
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0)
    assert sides.match(request("r", 3, lora_request=adapter)) == 0
    sides.tables["r"] = ([1, 2, 3],)
    sides.worker.begin_saves(sides.scheduler.orders(step({"r": 3 * TOKENS})))
    sides.scheduler.reported(outcome(sides.worker))
    weights.write_bytes(b"trained anew")
    again = request("again", 3, lora_request=adapter)
    assert sides.match(again) == 3 * TOKENS
    sides.scheduler.allocated(again, ([4, 5, 6],), 3 * TOKENS)
    sides.worker.begin_loads(sides.scheduler.orders(step({})))
    assert sides.worker._loading.drain(timeout_s=60)
    assert sides.worker.take_loads().blocks == set()
    assert all(torch.equal(layer[4:7], layer[1:4]) for layer in sides.caches.values())
    anew = Sides(daemon, kv_config(FULL))
    assert anew.match(request("other", 3, lora_request=adapter)) == 0
    in_place = LoRARequest("one", 1, str(tmp_path), load_inplace=True)
    assert sides.match(request("in place", 3, lora_request=in_place)) == 0
    sides.close()
    anew.close()


def test_a_daemon_that_hangs_is_not_waited_for(daemon: Daemon) -> None:
    """With a hung daemon the scheduler gets `ask again` at once, and a miss after the lookup's timeout."""
    sides = Sides(daemon, kv_config(FULL), lookup_grace_s=0.001, lookup_timeout_s=0.2)
    assert sides.match(request("first", 4)) == 0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        asked, answers, times = request("r", 4), [], []
        until = time.monotonic() + 20
        while (not answers or answers[-1] is None) and time.monotonic() < until:
            began = time.monotonic()
            answers.append(sides.scheduler.match(asked, 0))
            times.append(time.monotonic() - began)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report(
        "vLLM connector, hung daemon",
        asked=len(answers),
        longest_s=f"{max(times):.4f}",
        median_s=f"{np.median(times):.4f}",
    )
    assert answers[0] is None and answers[-1] == 0
    assert np.median(times) < 0.05
    sides.close()


def test_many_requests_wait_no_longer_than_one(daemon: Daemon) -> None:
    """With a hung daemon each step waits its lookup grace once, for all requests together."""
    sides = Sides(daemon, kv_config(FULL), lookup_grace_s=0.3)
    assert sides.match(request("first", 4)) == 0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        asked, took = [request(f"r{i}", 4) for i in range(40)], []
        for _ in range(2):
            sides.scheduler.orders(step({}))
            began = time.monotonic()
            assert {sides.scheduler.match(one, 0) for one in asked} <= {None, 0}
            took.append(time.monotonic() - began)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report("vLLM connector, hung daemon, 40 requests in a step", grace_s=0.3, steps_s=[f"{s:.3f}" for s in took])
    assert all(seconds < 3.0 for seconds in took)  # 12 s if each request waited
    sides.close()


def test_a_reset_drops_saves_that_were_not_begun(daemon: Daemon) -> None:
    """A reset drops blocks computed on old weights that were not handed to the workers yet."""
    sides = Sides(daemon, kv_config(FULL))
    asked, blocks = request("r", 3), sides.pool.get_new_blocks(3)
    assert sides.match(asked) == 0
    sides.scheduler.finished(asked, ([block.block_id for block in blocks],))
    sides.pool.free_blocks(blocks)
    assert sides.scheduler.is_retaining
    sides.scheduler.forget()
    assert not sides.scheduler.orders(step({})).saves and not sides.scheduler.is_retaining
    assert sides.pool.get_num_free_blocks() == BLOCKS - 1
    sides.close()


def test_a_lookup_answers_who_asked(daemon: Daemon) -> None:
    """The answer to a lookup from before a reset, or of an earlier request of that name, is not used."""
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0)
    sides.store(request("r", 3), 3)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        early = request("again", 3)
        early.num_computed_tokens = 0
        sides.scheduler.begin(early)
        sides.scheduler.forget()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert sides.match(early) == 0
    sides.close()


def test_a_load_that_fails_on_one_rank_is_saved_again(daemon: Daemon) -> None:
    """Blocks that one rank could not load are saved once computed, though other ranks end later."""
    sides = Sides(daemon, kv_config(FULL), retained_share=1.0)
    sides.store(request("r", 3), 3)
    again = request("again", 3)
    assert sides.match(again) == 3 * TOKENS
    sides.tables["again"] = ([1, 2, 3],)
    sides.scheduler.allocated(again, sides.tables["again"], 3 * TOKENS)
    assert len(sides.scheduler.orders(step({})).loads) == 1
    for invalid, ended in (({2}, set()), (set(), {"again"})):
        told = {"kv_connector_worker_meta": None, "failed_recving": set()}
        sides.scheduler.reported(SimpleNamespace(**told, invalid_block_ids=invalid, finished_recving=ended))
    orders = sides.scheduler.orders(step({"again": 3 * TOKENS}))
    assert [save.ids for save in orders.saves] == [(1, 2, 3)]
    sides.close()


def test_roles(daemon: Daemon) -> None:
    """A producer only saves (vLLM does not keep its freed blocks from writes); a consumer only loads."""
    both, producer, consumer = (
        Sides(daemon, kv_config(FULL), role=role) for role in ("kv_both", "kv_producer", "kv_consumer")
    )
    assert not consumer.compute(request("r", 3), 3).saves
    producer.store(request("r", 3), 3)
    assert both.match(request("again", 3)) == consumer.match(request("again", 3)) == 3 * TOKENS
    assert producer.match(request("again", 3)) == 0
    for sides in (both, producer, consumer):
        sides.close()


def test_only_a_step_that_computes_nothing_waits_for_loads(daemon: Daemon) -> None:
    """The step's orders decide: vLLM's newer model runner has left its context when loads begin."""
    sides = Sides(daemon, kv_config(FULL))
    assert sides.scheduler.orders(step({})).is_idle
    assert not sides.compute(request("r", 3), 3).is_idle
    sides.close()


def test_without_a_daemon_nothing_is_kept_waiting(daemon: Daemon) -> None:
    """After the daemon has died lookups miss, and saves end and release their blocks."""
    sides = Sides(daemon, kv_config(FULL))
    assert sides.match(request("first", 4)) == 0
    daemon.kill()
    asked, blocks = request("r", 3), sides.pool.get_new_blocks(3)
    assert sides.match(asked) == 0
    sides.tables["r"] = ([block.block_id for block in blocks],)
    orders = sides.scheduler.orders(step({"r": 3 * TOKENS}))
    sides.pool.free_blocks(blocks)
    sides.worker.begin_saves(orders)
    sides.scheduler.reported(outcome(sides.worker))
    assert sides.pool.get_num_free_blocks() == BLOCKS - 1
    sides.close()
