"""The worker with the kernels' own source, run by the emulator, over a real daemon."""

from __future__ import annotations

import pytest

from tests.system.test_worker_pages import HOST_ONLY, ROOMY
from tierd.client import Client
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.library import Emulated
from tierd.testing import Daemon
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.spec import LlamaSpec
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tools.kernels import MissingTool, build_emulator

SPEC = LlamaSpec(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=96,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    max_positions=512,
    tied=True,
)
PROMPT = tuple((7 * i * i + 3) % 64 for i in range(75))


@pytest.fixture(scope="module")
def kernels() -> KernelAttention:
    """What runs on a GPU, on the CPU."""
    try:
        return KernelAttention(Emulated(build_emulator()))
    except MissingTool as error:
        pytest.skip(f"the kernels cannot be compiled for the CPU here: {error}")


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random, with a head dim that there are kernels for."""
    return Llama(random_checkpoint(SPEC, seed=3, scale=0.2))


def served(model: Llama, source: PageSource, attention: PagedAttention, **options: bool) -> Report:
    """One request."""
    engine = Engine(model, source, attention=attention, options=EngineOptions(chunk_tokens=32, **options))
    return engine.generate([Request(PROMPT, 12, marks=(70,))])[0]


@pytest.mark.parametrize("config", [ROOMY, HOST_ONLY], ids=["device", "host"])
def test_kernels_attend_to_the_daemons_pages(model: Llama, kernels: KernelAttention, config: str) -> None:
    """Prefill and decode by the kernels, over pages that another worker stored: the tokens of the reference without a daemon."""
    shape = page_shape(model, kv_dtype="float16")
    want = served(model, LocalPages(shape), paged_attention)
    with Daemon(config) as daemon, Client(daemon.target) as one, Client(daemon.target) as two:
        first = served(model, TierdPages(one, model, name="random", shape=shape), kernels)
        second = served(model, TierdPages(two, model, name="random", shape=shape), kernels)
    assert first.tokens == second.tokens == want.tokens
    assert (first.reused_tokens, second.reused_tokens) == (0, 64)


def test_pages_of_both_owners_in_one_call(model: Llama, kernels: KernelAttention) -> None:
    """Where the daemon goes away in the middle, pages in this process's memory and pages in its mapped memory are attended to together."""
    shape = page_shape(model, kv_dtype="float16")
    want = served(model, LocalPages(shape), paged_attention)
    with Daemon(HOST_ONLY) as daemon, Client(daemon.target, timeout_s=1.0) as client:
        served(model, TierdPages(client, model, name="random", shape=shape), kernels)
        source = TierdPages(client, model, name="random", shape=shape, options=TierdOptions(reserve_pages=1))
        engine = Engine(model, source, attention=kernels)
        sequence = engine.begin(Request(PROMPT, 12))
        daemon.kill()
        while not sequence.is_done:
            engine.pick([sequence]) if sequence.table.length == len(sequence.tokens) else engine.step([sequence])
        assert sequence.generated == want.tokens
        assert [page.origin is None for page in sequence.table.pages] == [False] * 4 + [True] * 2
        engine.end(sequence)


def test_masses_are_reported(model: Llama, kernels: KernelAttention) -> None:
    """What the kernels say of each page's attention is what the reference says."""
    shape = page_shape(model, kv_dtype="float16")
    told = []
    for attention in (paged_attention, kernels):
        engine = Engine(model, LocalPages(shape), attention=attention, options=EngineOptions(measure_attention=True))
        sequence = engine.begin(Request(PROMPT, 1))
        told.append(sequence.mass.tolist())
        engine.end(sequence)
    assert told[1] == pytest.approx(told[0], rel=2e-3)
