"""The worker with the kernels' own source, run by the emulator, over a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compilers import skip_without
from tests.system.lone_worker import OPTIONS, PROMPT, REQUEST, random_model
from tests.system.test_worker_pages import HOST_ONLY, ROOMY
from tests.system.warm import Daemon
from tierd.client import Client
from tierd.kernels import PagedAttention, paged_attention
from tierd.kernels.attention import KernelAttention
from tierd.kernels.e4m3 import E4M3
from tierd.kernels.library import Emulated
from tierd.kernels.prefixes import SharedPrefix
from tierd.worker import sequences
from tierd.worker.backend import Backend
from tierd.worker.engine import Engine, EngineOptions
from tierd.worker.model import Llama
from tierd.worker.pages import LocalPages, PageSource, page_shape
from tierd.worker.report import Report, Request
from tierd.worker.tierd_pages import TierdOptions, TierdPages
from tools.kernels import MissingTool, build_emulator

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
BACKENDS = {
    ("numpy", "float32"): "float16",
    ("torch", "float32"): "float16",
    ("torch", "float16"): "float16",
    ("torch", "bfloat16"): "bfloat16",
}
"""Compute backends and dtypes of a worker, and the dtype of its pages by default."""
KV_DTYPES = [None, E4M3]


@pytest.fixture(scope="module")
def emulated() -> Path:
    """The kernels' library, built for the CPU."""
    try:
        return build_emulator()
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


@pytest.fixture(scope="module")
def kernels(emulated: Path) -> KernelAttention:
    """The attention of the emulated kernels."""
    return KernelAttention(Emulated(emulated))


@pytest.fixture(scope="module")
def model() -> Llama:
    """A random model whose head dim the kernels support."""
    return random_model()


def served(model: Llama, source: PageSource, attention: PagedAttention) -> Report:
    """Serves one request."""
    return Engine(model, source, attention=attention, options=OPTIONS).generate([REQUEST])[0]


def lone(backend: tuple[str, str], *given: str, **environment: str) -> dict[str, Any]:
    """A worker process's report. given: daemon address, page dtype. environment: replaces TIERD_KERNELS*."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.lone_worker", *backend, *given],
        cwd=ROOT,
        env=ours | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS, ids="-".join)
def test_the_environment_alone_chooses_kernels(backend: tuple[str, str], emulated: Path, kv_dtype: str | None) -> None:
    """TIERD_KERNELS=emulated alone selects kernels; over stored pages they give the reference's tokens."""
    if backend[0] == "torch":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'tierd[worker]'")
    model = random_model(Backend(*backend))
    stored = kv_dtype or BACKENDS[backend]
    want = served(model, LocalPages(page_shape(model, kv_dtype=stored)), paged_attention)
    chosen = {"TIERD_KERNELS": "emulated", "TIERD_KERNELS_LIBRARY": str(emulated)}
    with Daemon(ROOMY) as daemon:
        told = [lone(backend, daemon.target, *([kv_dtype] if kv_dtype else []), **chosen) for _ in range(2)]
    assert [one["tokens"] for one in told] == [want.tokens] * 2
    assert [one["reused"] for one in told] == [0, 64]
    assert {one["kv"] for one in told} == {stored}
    assert told[0]["multiplies"] > told[1]["multiplies"] > 0, "the tokens that were stored are not computed again"


def test_without_a_word_the_reference_attends(emulated: Path, model: Llama) -> None:
    """Without TIERD_KERNELS or with `reference`, no kernel runs on a CPU, even if a library is named."""
    want = served(model, LocalPages(page_shape(model)), paged_attention)
    for said in ({}, {"TIERD_KERNELS": "reference"}):
        told = lone(("numpy", "float32"), "none", TIERD_KERNELS_LIBRARY=str(emulated), **said)
        assert (told["tokens"], told["kv"], told["multiplies"]) == (want.tokens, "float32", 0)


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
@pytest.mark.parametrize("config", [ROOMY, HOST_ONLY], ids=["device", "host"])
def test_kernels_attend_to_the_daemons_pages(
    model: Llama, kernels: KernelAttention, config: str, kv_dtype: str
) -> None:
    """Kernels over pages that another worker stored give the tokens of the reference without a daemon."""
    shape = page_shape(model, kv_dtype=kv_dtype)
    want = served(model, LocalPages(shape), paged_attention)
    with Daemon(config) as daemon, Client(daemon.target) as one, Client(daemon.target) as two:
        first = served(model, TierdPages(one, model, name="random", shape=shape), kernels)
        second = served(model, TierdPages(two, model, name="random", shape=shape), kernels)
    assert first.tokens == second.tokens == want.tokens
    assert (first.reused_tokens, second.reused_tokens) == (0, 64)


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
def test_pages_of_both_owners_in_one_call(model: Llama, kernels: KernelAttention, kv_dtype: str) -> None:
    """After the daemon dies, kernels attend to local pages and mapped daemon pages in one call."""
    shape = page_shape(model, kv_dtype=kv_dtype)
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
        assert [page.origin is None for page in sequence.table.pages] == [False] * 5 + [True]
        engine.end(sequence)


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
@pytest.mark.parametrize("is_by_kernels", [True, False])
def test_a_stored_prefix_is_shared(
    model: Llama, kernels: KernelAttention, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, is_by_kernels: bool
) -> None:
    """Requests that begin with the same stored blocks attend to them once, for the same tokens."""
    shape, attention = page_shape(model, kv_dtype=kv_dtype), kernels if is_by_kernels else paged_attention
    requests = [Request((*PROMPT, *more), 8, samples=2) for more in ((1, 2), (3,), (4, 5, 6))]
    found: list[tuple[int, int]] = []
    find = sequences.shared_prefixes

    def noted(*given: Any, **more: Any) -> list[SharedPrefix]:
        groups = find(*given, **more)
        found.extend((len(one.sequences), one.pages) for one in groups)
        return groups

    monkeypatch.setattr(sequences, "shared_prefixes", noted)
    told = []
    for least in (1 << 40, 1):
        monkeypatch.setattr(sequences, "SAVED_TOKENS", least)
        monkeypatch.setattr(sequences, "SAVED_BYTES", least)
        with Daemon(HOST_ONLY) as daemon, Client(daemon.target) as client:
            source = TierdPages(client, model, name="random", shape=shape)
            served(model, source, attention)
            engine = Engine(model, source, attention=attention, options=OPTIONS)
            told.append([report.tokens for report in engine.generate(requests)])
            engine.close()
        assert bool(found) == (least == 1)
    assert told[0] == told[1]
    assert (6, 4) in found


@pytest.mark.parametrize("kv_dtype", ["float16", E4M3])
def test_masses_are_reported(model: Llama, kernels: KernelAttention, kv_dtype: str) -> None:
    """The kernels report the same attention mass per page as the reference."""
    shape = page_shape(model, kv_dtype=kv_dtype)
    told = []
    for attention in (paged_attention, kernels):
        engine = Engine(model, LocalPages(shape), attention=attention, options=EngineOptions(measure_attention=True))
        sequence = engine.begin(Request(PROMPT, 1))
        told.append(sequence.mass.tolist())
        engine.end(sequence)
    assert told[1] == pytest.approx(told[0], rel=2e-3)
