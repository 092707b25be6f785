"""The worker over a real daemon: the daemon's behaviour never changes the worker's tokens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest

from tests.system.raw import RawClient
from tests.system.sdk import held
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, Reservation
from tierd.errors import ConfigError, DeadlineExceeded, Overloaded
from tierd.worker.backend import Backend
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdOptions, TierdPages

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    max_positions=4096,
    tied=True,
)
ROOMY = """
[server]
shutdown_deadline = "5 s"
[[device]]
kind = "cpu"
capacity = "16 MiB"
segment = "1 MiB"
[[host]]
capacity = "16 MiB"
segment = "1 MiB"
"""
HOST_ONLY = ROOMY.partition("[[device]]")[0] + "[[host]]" + ROOMY.partition("[[host]]")[2]
# A block of 16 tokens has 16 KiB: 32 fit the device tier, and a session may hold half of them.
NARROW = """
[server]
shutdown_deadline = "5 s"
[[device]]
kind = "cpu"
capacity = "512 KiB"
segment = "64 KiB"
[[host]]
capacity = "512 KiB"
segment = "64 KiB"
[[nvme]]
capacity = "2 MiB"
segment = "1 MiB"
"""
RNG = np.random.default_rng(5)
OPTIONS = EngineOptions(chunk_tokens=32)


def prompt(count: int) -> tuple[int, ...]:
    """A random prompt, so that no other prompt has its prefix."""
    return tuple(int(t) for t in RNG.integers(0, 64, count))


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random weights with clearly different logits."""
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2))


@pytest.fixture(scope="module")
def roomy() -> Iterator[Daemon]:
    """A daemon with room for everything."""
    with Daemon(ROOMY) as daemon:
        yield daemon


def plain(model: Llama, *requests: Request) -> list[list[int]]:
    """Tokens without a cache."""
    reports = Engine(model, LocalPages(page_shape(model)), options=OPTIONS).generate(requests)
    return [report.tokens for report in reports]


class Worker:
    """An engine with a separate session."""

    def __init__(self, daemon: Daemon, model: Llama, kv_dtype: str = "float32", **options: Any) -> None:
        self.client = Client(daemon.target, name="worker", timeout_s=20)
        shape = page_shape(model, kv_dtype=kv_dtype)
        self.source = TierdPages(self.client, model, name="random", shape=shape, options=TierdOptions(**options))
        self.engine = Engine(model, self.source, options=OPTIONS)

    def serve(self, *requests: Request) -> list[Report]:
        """Reports of these requests."""
        return self.engine.generate(requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.client.close()


def test_a_second_worker_reuses_what_the_first_computed(roomy: Daemon, model: Llama) -> None:
    """Another session reads the first one's pages in place and computes only the rest; tokens are equal."""
    request = Request(prompt(100), 30)
    with Worker(roomy, model) as one, Worker(roomy, model) as two:
        first, second = one.serve(request)[0], two.serve(request)[0]
    assert first.tokens == second.tokens == plain(model, request)[0]
    assert (first.reused_tokens, second.reused_tokens, second.computed_tokens) == (0, 96, 4)
    assert second.tier_tokens == {"device.0": 96}
    assert not one.source.faults + two.source.faults


def test_a_conversation_goes_on_in_the_middle_of_a_block(roomy: Daemon, model: Llama) -> None:
    """The tokens after a turn's last full block are reused through their short block."""
    with Worker(roomy, model) as worker:
        start = prompt(50)
        first = worker.serve(Request(start, 6))[0]
        assert first.stored_tokens == 55
        longer = Request((*start, *first.tokens, 7, 8), 6, marks=(first.stored_tokens,))
        second = worker.serve(longer)[0]
    assert (second.reused_tokens, second.computed_tokens) == (55, 3)
    assert second.tokens == plain(model, longer)[0]
    assert not worker.source.faults


def test_a_turn_shorter_than_a_block_is_found_by_its_mark(roomy: Daemon, model: Llama) -> None:
    """A conversation shorter than a block reuses its short block by the mark."""
    with Worker(roomy, model) as worker:
        start = prompt(5)
        first = worker.serve(Request(start, 4))[0]
        longer = Request((*start, *first.tokens, 7), 3, marks=(first.stored_tokens,))
        second = worker.serve(longer)[0]
    assert second.reused_tokens == first.stored_tokens == 8
    assert second.tokens == plain(model, longer)[0]
    assert not worker.source.faults


def test_a_turn_says_where_its_tokens_were_found(roomy: Daemon, model: Llama) -> None:
    """A block or tail that only host memory holds is reported there, although the read promotes it."""
    with Worker(roomy, model) as worker, RawClient(roomy.target) as operator:
        start = prompt(50)
        first = worker.serve(Request(start, 6))[0]
        operator.call(operator.admin.Evict, apb.EvictRequest(tier="host.0"))
        near = worker.serve(Request((*start, *first.tokens, 7, 8), 1, marks=(first.stored_tokens,)))[0]
        operator.call(operator.admin.Flush, apb.FlushRequest(deadline_s=10))  # through host memory to NVMe
        operator.call(operator.admin.Evict, apb.EvictRequest(tier="device.0"))
        far = worker.serve(Request((*start, *first.tokens, 8, 9), 1, marks=(first.stored_tokens,)))[0]
    assert near.tier_tokens == {"device.0": 55}
    assert far.tier_tokens == {"host.0": 55}


def test_the_second_of_two_equal_writers_goes_on_with_the_first_ones_pages(roomy: Daemon, model: Llama) -> None:
    """When two workers compute one prompt, the later commit reuses the blocks; their tokens are equal."""
    request = Request(prompt(70), 12)
    with Worker(roomy, model) as one, Worker(roomy, model) as two:
        live = [(worker.engine, worker.engine.begin(request)) for worker in (one, two)]
        for engine, sequence in live:
            engine.pick([sequence])
        names = [[page.hash for page in sequence.table.pages[:4]] for _, sequence in live]
        for engine, sequence in live:
            while not sequence.is_done:
                engine.step([sequence])
        tokens = [engine.end(sequence).tokens for engine, sequence in live]
    assert names[0] == names[1]
    assert tokens[0] == tokens[1] == plain(model, request)[0]
    assert not one.source.faults + two.source.faults


def test_samples_share_pages_of_the_daemon(roomy: Daemon, model: Llama) -> None:
    """Forks over the daemon's pages, some equal, give the same tokens as forks over local pages."""
    requests = [Request(prompt(37), 20, temperature=t, samples=3, seed=2) for t in (1.2, 0.0)]
    with Worker(roomy, model) as worker:
        got = [report.tokens for report in worker.serve(*requests)]
    assert got == plain(model, *requests)
    assert not worker.source.faults


def test_without_a_device_tier_pages_lie_in_host_memory(model: Llama) -> None:
    """The same worker runs on a daemon that has only host memory."""
    request = Request(prompt(64), 5)
    with Daemon(HOST_ONLY) as daemon, Worker(daemon, model) as worker:
        assert worker.source.tier == "host"
        got = [worker.serve(request)[0] for _ in range(2)]
    assert got[0].tokens == got[1].tokens == plain(model, request)[0]
    assert got[1].tier_tokens == {"host.0": 64}


def test_tokens_are_right_when_memory_is_far_too_small(model: Llama) -> None:
    """With a device tier much smaller than the prompts, every answer equals the one without a cache."""
    shared = prompt(200)
    requests = [Request(shared[: 40 * i] + prompt(60), 20) for i in (1, 3, 5, 2, 4, 1)] + [Request(prompt(500), 8)]
    want = plain(model, *requests)
    with Daemon(NARROW) as daemon, Worker(daemon, model) as worker:
        for _ in range(2):
            got = [worker.serve(request)[0] for request in requests]
            assert [report.tokens for report in got] == want
        assert [report.tokens for report in worker.serve(*requests)] == want
        assert sum(report.reused_tokens for report in got) > 0
        with RawClient(daemon.target) as raw:
            raw.call(raw.admin.Quiesce, apb.QuiesceRequest(deadline_s=30))
        assert worker.serve(Request(prompt(64), 2))[0].committed_blocks == 4


@pytest.mark.parametrize("back", [True, False], ids=["restarted", "gone"])
def test_a_killed_daemon_costs_nothing_but_the_cache(model: Llama, back: bool) -> None:
    """A daemon that dies during a request changes no token; if it restarts, the worker uses it again."""
    request = Request(prompt(60), 40)
    with Daemon(ROOMY) as daemon, Worker(daemon, model) as worker:
        sequence = worker.engine.begin(request)
        worker.engine.pick([sequence])
        for step in range(39):
            if step == 10:
                daemon.kill()
                if back:
                    daemon.start()
            worker.engine.step([sequence])
        report = worker.engine.end(sequence)
        assert report.tokens == plain(model, request)[0]
        again = worker.serve(request)[0]
        assert again.tokens == report.tokens
        assert (again.reused_tokens > 0) == back


def test_blocks_of_several_reservations_make_one_chain(roomy: Daemon, model: Llama) -> None:
    """Pages of several reservations, committed together, form one prefix."""
    request = Request(prompt(160), 2)
    with Worker(roomy, model, reserve_pages=3) as worker:
        worker.serve(request)
        assert worker.serve(request)[0].reused_tokens == 160


def test_after_a_commit_that_failed_nothing_relies_on_the_page(
    roomy: Daemon, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After failed commits whose pages others overwrite, tokens are right, by recompute or from copies."""

    def fail(self: Reservation, blocks: Any, **_: Any) -> None:
        for index in blocks["index"].tolist():
            self.buffer(index)[:] = 0x7E
        raise DeadlineExceeded("commit: no answer")

    monkeypatch.setattr(Reservation, "commit", fail)
    request = Request(prompt(100), 20, samples=2)
    for keeps_copies in (False, True):
        with Worker(roomy, model, keeps_copies=keeps_copies) as worker:
            reports = worker.serve(request)
        assert [report.tokens for report in reports] == plain(model, request)
        assert worker.source.faults["DeadlineExceeded"] > 0
        assert (reports[0].recomputed_tokens == 0) == keeps_copies


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ConfigError])
@pytest.mark.parametrize("is_answered", [False, True], ids=["before it is sent", "after its answer"])
def test_whatever_ends_a_commit_its_pages_are_not_written_to(
    roomy: Daemon, model: Llama, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, is_answered: bool
) -> None:
    """After an interrupt or error in a commit, no later request writes to its pages."""
    commit = Reservation.commit

    def ended(self: Reservation, *args: Any, **options: Any) -> None:
        if is_answered:
            commit(self, *args, **options)
        raise error("now")

    first, second = Request(prompt(100), 8), Request(prompt(100), 8)
    with Worker(roomy, model, reserve_pages=4) as worker, Worker(roomy, model) as other:
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(Reservation, "commit", ended)
            worker.serve(first)
        leased = other.source.acquire(first.tokens)
        assert (leased.tokens > 0) == is_answered
        before = [page.array.copy() for page in leased.pages]
        assert worker.serve(second)[0].tokens == plain(model, second)[0]
        assert all(np.array_equal(old, page.array) for old, page in zip(before, leased.pages, strict=True))
        other.source.release(leased.pages)
        assert other.serve(first)[0].tokens == plain(model, first)[0]


def test_pages_that_may_still_be_read_go_to_nobody(
    roomy: Daemon, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that times out waiting for the GPU raises, and the daemon keeps the pages reserved."""
    with Worker(roomy, model) as worker:
        pages = worker.source.reserve(3)
        before = held(roomy)
        assert before[1] == 1
        monkeypatch.setattr(Backend, "finish", _hang)
        with pytest.raises(DeadlineExceeded):
            worker.source.release(pages)
        pages.clear()
        worker.source._spare.clear()
        gc.collect()
        assert worker.source.acquire(prompt(16)).pages == []  # this call reports the dropped pages
        assert held(roomy) == before
        monkeypatch.undo()


def _hang(self: Backend) -> None:
    raise DeadlineExceeded("backend: the GPU hangs")


def test_a_reserve_that_is_refused_takes_nothing(roomy: Daemon, model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory is full, a failed reserve changes nothing: spare pages and the count owed stay."""

    def full(*_: object) -> None:
        raise Overloaded("cuda:0: no memory is left")

    with Worker(roomy, model) as worker:
        source = worker.source
        source.release(source.reserve(1))
        source._owed, spare = 2, list(source._spare)
        with monkeypatch.context() as patch:
            patch.setattr(Backend, "memory", full)
            with pytest.raises(Overloaded):
                source.reserve(5)
        assert (source._owed, source._spare, source._memory.in_use) == (2, spare, 0)
        pages = source.reserve(5)
        assert sum(page.origin is not None for page in pages) == 3
        source.release(pages)


def test_without_a_daemon_the_worker_computes(model: Llama, tmp_path: Any) -> None:
    """With best effort and no daemon, the worker computes everything and nothing raises."""
    request = Request(prompt(40), 5)
    client = Client(str(tmp_path), best_effort=True)
    with Engine(model, TierdPages(client, model, name="random"), options=OPTIONS) as engine:
        report = engine.generate([request])[0]
    assert report.tokens == plain(model, request)[0]
    assert (report.reused_tokens, report.committed_blocks) == (0, 0)


def test_attention_mass_reaches_the_daemon(roomy: Daemon, model: Llama) -> None:
    """Mass is reported for leased pages without a fault."""
    with Worker(roomy, model) as worker:
        worker.engine = Engine(model, worker.source, options=EngineOptions(measure_attention=True))
        request = Request(prompt(48), 4)
        for _ in range(2):
            worker.serve(request)
    assert not worker.source.faults


def test_every_page_goes_back(model: Llama) -> None:
    """A worker uses its share many times over, and no page stays pinned or reserved after a request."""
    with Daemon(NARROW.replace("512 KiB", "1 MiB")) as daemon, Worker(daemon, model, reserve_pages=4) as worker:
        for _ in range(8):  # 20 blocks each; a session may hold 32
            assert worker.serve(Request(prompt(320), 1))[0].committed_blocks == 20
        assert not worker.source.faults


def test_torch_works_in_the_same_pages(roomy: Daemon, model: Llama) -> None:
    """A torch worker, with bfloat16 pages too, reads stored blocks as tensors over the mapped pages."""
    pytest.importorskip("torch", reason="torch is not installed")
    on_torch = Llama(random_checkpoint(SPEC, seed=3, scale=0.2), Backend("torch"))
    request = Request(prompt(100), 10)
    for kv_dtype in ("float32", "bfloat16"):
        with Worker(roomy, on_torch, kv_dtype=kv_dtype) as one, Worker(roomy, on_torch, kv_dtype=kv_dtype) as two:
            first, second = one.serve(request)[0], two.serve(request)[0]
        assert second.reused_tokens == 96
        assert first.tokens == second.tokens
        assert not one.source.faults + two.source.faults
        if kv_dtype == "float32":
            assert first.tokens == plain(model, request)[0]
