"""`TierdTier` under vLLM's own tiering code (spec, host tier, factory, manager), without a model."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.depth import report
from tests.engines.vllm.tiered import VERIFIED, flushed
from tests.system.blocks import await_true
from tierd.errors import ConfigError, Unsupported
from tierd.testing import Daemon

ROW, ROWS, TOKENS = 8192, 16, 32
STEP = ScheduleEndContext((), ())
PROMPT_S = 1.0
"""A call that never waits for the daemon takes microseconds."""

BACK_S = 60.0
"""A client that gave up on a daemon retries after at most 5 s, and again if the daemon is too slow."""


def key(name: int, group: int = 0) -> Any:
    return make_offload_key(name.to_bytes(32, "big"), group)


def request(keys: Sequence[Any] = (), *, name: str = "r") -> ReqContext:
    """A request that has these keys as its sequence."""
    context = ReqContext(name)
    for i, one in enumerate(keys):
        context.set_offload_key_position(one, (i + 1) * TOKENS)
    return context


class Stack:
    """vLLM's manager over one TierdTier; it steps as vLLM's scheduler does."""

    def __init__(
        self, target: str, *, groups: int = 1, events: bool = False, dtype: str = "float32", **tier: Any
    ) -> None:
        self.engine_id = f"tierd-{uuid.uuid4().hex}"
        entry = {"type": "TierdTier", "module_path": "tierd.integrations.vllm", "target": target} | tier
        self.spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer.{i}",), i) for i in range(groups)),
                worker_kv_bytes_per_block=ROW,
                enable_kv_cache_events=events,
                extra_config={"cpu_bytes_to_use": ROW * ROWS, "secondary_tiers": [entry]},
                engine_id=self.engine_id,
                model=OffloadingModelConfig("m", dtype),
                cache=OffloadingCacheConfig(TOKENS, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
            )
        )
        self.manager: Any = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    @property
    def mapping(self) -> Path:
        return Path(f"/dev/shm/vllm_offload_{self.engine_id}.mmap")

    def settle(self) -> None:
        """Steps until no transfer is pending."""

        def at_rest() -> bool:
            self.manager.on_schedule_end(STEP)
            return not self.manager.has_pending_work()

        await_true(at_rest, "transfers")

    def offload(self, context: ReqContext, keys: Sequence[Any], *, seed: int = 0) -> np.ndarray:
        """Writes chunks to the host tier, which offloads them to tierd; returns the bytes, uint8 [n, ROW]."""
        kv = np.random.default_rng(seed).integers(0, 255, (len(keys), ROW), dtype=np.uint8)
        self.manager.on_new_request(context)
        self.rows[self.manager.prepare_store(keys, context).store_spec.chunk_ids] = kv
        self.manager.complete_store(keys, context)
        self.settle()
        self.manager.on_request_finished(context)
        return kv

    def forget(self) -> None:
        """Empties the host tier and overwrites its memory."""
        self.manager.reset_cache()
        self.rows[:] = 0

    def find(self, context: ReqContext, keys: Sequence[Any]) -> list[LookupResult]:
        """Looks up until all results are final; hits are promoted by then."""
        self.manager.on_new_request(context)
        results: list[LookupResult] = []

        def settled() -> bool:
            results[:] = [self.manager.lookup(one, context) for one in keys]
            self.manager.on_schedule_end(STEP)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(results)

        await_true(settled, "lookups")
        return results

    def restored(self, context: ReqContext, keys: Sequence[Any]) -> np.ndarray:
        """The host tier's bytes for these keys."""
        return self.rows[self.manager.prepare_load(keys, context).chunk_ids].copy()

    def ask(self, context: ReqContext, keys: Sequence[Any]) -> list[LookupResult]:
        """The tier's own answers, in one step."""
        answers = [self.tier.lookup(one, context) for one in keys]
        self.tier.on_schedule_end(STEP)
        return answers

    def load(self, keys: Sequence[Any], *, job: int = 900) -> list[Any]:
        """Promotes from the tier itself into rows 0, 1, ...; returns its reports."""
        self.tier.submit_load(TransferJob(job, list(keys), np.arange(len(keys)), True, request()))
        results: list[Any] = []
        await_true(lambda: bool(results.extend(self.tier.get_finished_jobs()) or results), "the promotion")
        return results

    def close(self) -> None:
        self.rows = np.zeros(0)
        self.manager.shutdown()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.fixture
def stack(daemon: Daemon) -> Iterator[Callable[..., Stack]]:
    """stack(...): a Stack that closes when the test ends."""
    with contextlib.ExitStack() as ends:

        def make(**given: Any) -> Stack:
            made = Stack(daemon.target, **given)
            ends.callback(lambda: made.mapping.exists() and made.close())
            return made

        yield make


@contextlib.contextmanager
def hung(daemon: Daemon) -> Iterator[None]:
    """Stops the daemon's process for the length of the context."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_chunks_go_and_come(daemon: Daemon, stack: Callable[..., Stack]) -> None:
    """Chunks come back bit by bit to the host tier. The first lookup is RETRY, a key never stored
    misses, and the daemon maps nothing of vLLM's."""
    one, keys = stack(), [key(i) for i in range(100, 105)]
    kv = one.offload(request(keys, name="a"), keys)
    one.forget()
    probe = request(keys, name="probe")
    one.manager.on_new_request(probe)
    assert one.manager.lookup(keys[0], probe) is LookupResult.RETRY
    again = request(keys, name="b")
    assert one.find(again, [*keys, key(1)]) == [LookupResult.HIT] * 5 + [LookupResult.MISS]
    assert (one.restored(again, keys) == kv).all()
    ours, theirs = (Path(f"/proc/{pid}/maps").read_text() for pid in ("self", daemon.pid))
    assert one.mapping.name in ours and one.mapping.name not in theirs


def test_groups_do_not_meet(stack: Callable[..., Stack]) -> None:
    """One block hash in two groups is two chunks, and a chunk after a gap is found."""
    one = stack(groups=2)
    keys = [key(200, 0), key(200, 1), key(202, 1)]
    kv = one.offload(request(name="a"), keys)
    one.forget()
    again = request(name="b")
    wanted = [*keys[:2], key(201, 1), keys[2]]
    assert one.find(again, wanted) == [LookupResult.HIT] * 2 + [LookupResult.MISS, LookupResult.HIT]
    assert (one.restored(again, keys) == kv).all()


def test_only_the_same_engine_shares(stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal engine hits the chunks; one with another dtype, other weights or other hashes misses."""
    keys = [key(i) for i in range(300, 303)]
    stack().offload(request(keys, name="a"), keys)
    assert stack().find(request(keys), keys) == [LookupResult.HIT] * 3
    assert stack(dtype="float16").find(request(keys), keys) == [LookupResult.MISS] * 3
    assert stack(weights_digest="other").find(request(keys), keys) == [LookupResult.MISS] * 3
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another seed", raising=False)
    assert stack().find(request(keys), keys) == [LookupResult.MISS] * 3


def test_part_of_a_promotion(stack: Callable[..., Stack]) -> None:
    """A promotion that meets a missing chunk reports those before it, and the rest misses from then on."""
    one, keys = stack(), [key(i) for i in range(400, 404)]
    kv = one.offload(request(keys, name="a"), keys)
    context, wanted = request(name="b"), [keys[0], keys[1], key(2), keys[3]]
    await_true(lambda: LookupResult.RETRY not in one.ask(context, wanted), "lookups")
    assert one.ask(context, wanted)[3] is LookupResult.HIT
    (result,) = one.load(wanted)
    assert not result.success and tuple(result.successful_keys) == (keys[0], keys[1])
    assert (one.rows[:2] == kv[:2]).all() and result.transfer_bytes == 2 * ROW
    assert one.ask(context, wanted) == [LookupResult.HIT] * 2 + [LookupResult.MISS] * 2


def test_a_chain_is_recovered(daemon: Daemon, stack: Callable[..., Stack]) -> None:
    """Chunks are stored as the request's sequence, over several jobs in any order; unknown keys
    begin chains."""
    before = {place for place, _ in flushed(daemon)}
    one, keys = stack(), [key(i) for i in range(500, 506)]
    one.offload(request(keys, name="a"), [keys[1], keys[0]])
    one.offload(request(keys, name="b"), [keys[4], keys[2], keys[3]])
    one.offload(request(name="c"), [key(510)])
    metas = [meta for place, meta in flushed(daemon) if place not in before]
    assert len(metas) == 6
    chain = sorted((m for m in metas if m["position"] or m["parent"].any()), key=lambda m: int(m["position"]))
    roots = [m for m in metas if not m["parent"].any()]
    assert [int(m["position"]) for m in chain] == [1, 2, 3, 4] and len(roots) == 2
    parents = {m["hash"].tobytes() for m in metas}
    assert all(m["parent"].tobytes() in parents for m in chain)
    assert len({m["parent"].tobytes() for m in chain}) == 4


def test_a_hung_daemon_is_never_waited_for(daemon: Daemon, stack: Callable[..., Stack]) -> None:
    """No call of the scheduler waits for a hung daemon; jobs end as misses, and hits return later."""
    one, keys = stack(timeout_s=1.0), [key(i) for i in range(600, 604)]
    kv = one.offload(request(keys, name="a"), keys)
    one.forget()
    context = request(keys, name="b")
    slowest = 0.0
    with hung(daemon):
        one.manager.on_new_request(context)
        for i in range(20):
            began = time.monotonic()
            one.manager.lookup(keys[i % 4], context)
            one.tier.submit_store(TransferJob(1000 + i, [key(610 + i)], np.array([0]), False, context))
            one.tier.on_schedule_end(STEP)
            slowest = max(slowest, time.monotonic() - began)
        began = time.monotonic()
        one.tier.drain_jobs()
        drained = time.monotonic() - began
        jobs = list(one.tier.get_finished_jobs())
    assert len(jobs) == 20 and not any(job.success for job in jobs) and not one.tier.has_pending_work()
    assert slowest < PROMPT_S and drained < 30
    report("vLLM tier, hung daemon", slowest_step_s=slowest, drain_s=drained)
    one.manager.on_request_finished(context)
    fresh = itertools.count()

    def served() -> bool:
        again = request(keys, name=f"c{next(fresh)}")
        if one.find(again, keys) == [LookupResult.HIT] * 4:
            return bool((one.restored(again, keys) == kv).all())
        one.manager.on_request_finished(again)  # a request's miss stays a miss as long as the request lives
        return False

    until = time.monotonic() + BACK_S
    while not served():
        assert time.monotonic() < until, "no hits after the daemon went on"
        time.sleep(0.01)


def test_too_many_jobs_are_refused(daemon: Daemon, stack: Callable[..., Stack]) -> None:
    """Beyond the queue's bound a store is dropped and a load misses at once; each is reported once,
    and counted."""
    one = stack(threads=1, queue_limit=2, timeout_s=1.0)
    one.offload(request(name="a"), [key(700)])
    with hung(daemon):
        for i in range(6):
            one.tier.submit_store(TransferJob(10 + i, [key(710 + i)], np.array([0]), False, request()))
            one.tier.submit_load(TransferJob(20 + i, [key(720 + i)], np.array([1]), True, request()))
        at_once = list(one.tier.get_finished_jobs())
        one.tier.drain_jobs()
    rest = list(one.tier.get_finished_jobs())
    assert len(at_once) >= 8 and sorted(job.job_id for job in at_once + rest) == [*range(10, 16), *range(20, 26)]
    assert "vllm:kv_offload_tierd_refused_jobs" in one.tier.get_stats().reduce().__repr__()


def test_without_a_daemon(tmp_path: Path) -> None:
    """An engine starts, misses and ends without a daemon."""
    one = Stack(str(tmp_path / "nobody"), timeout_s=1.0)
    keys = [key(i) for i in range(3)]
    one.offload(request(keys, name="a"), keys)
    one.forget()
    assert one.find(request(keys), keys) == [LookupResult.MISS] * 3
    one.close()


def test_the_end_lets_go(stack: Callable[..., Stack]) -> None:
    """Shutdown ends stores in flight, unmaps vLLM's mapping and removes its file."""
    one, keys = stack(), [key(i) for i in range(800, 804)]
    one.offload(request(keys, name="a"), keys)
    one.tier.submit_store(TransferJob(77, [key(805)], np.array([3]), False, request()))
    one.close()
    assert not one.mapping.exists() and one.mapping.name not in Path("/proc/self/maps").read_text()
    assert stack().find(request(name="b"), [key(805)]) == [LookupResult.HIT]


def test_events_and_metrics(stack: Callable[..., Stack]) -> None:
    """With events on, each stored chunk is published once, by its key; vLLM exports only defined counters."""
    one, keys = stack(events=True, enable_kv_events=True), [key(i) for i in range(850, 853)]
    one.offload(request(keys, name="a"), keys)
    ours = [event for event in one.manager.take_events() if event.medium is one.tier.medium]
    assert [event.keys for event in ours] == [keys] and not ours[0].removed
    assert not [event for event in one.manager.take_events() if event.medium is one.tier.medium]
    counted = one.tier.get_stats()
    assert counted is not None and one.tier.get_stats() is None
    names = {name.split(":(")[0] for name in counted.reduce()}
    assert names <= set(one.spec.build_metric_definitions(one.spec.extra_config)) and len(names) >= 1


def test_what_is_wrong_is_said_at_the_start(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown option and an unsupported vLLM are refused with a sentence."""
    with pytest.raises(ConfigError, match="secondary_tiers.TierdTier.tarket"):
        Stack(daemon.target, tarket="x")
    monkeypatch.setattr(vllm, "__version__", "0.30.1")
    with pytest.raises(Unsupported, match=r"vllm 0\.30\.1: tierd supports vllm>=0\.31"):
        Stack(daemon.target)
