"""The advisor in vLLM: it learns the engine's steps, and computes what a slow store would delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from tests.engines.vllm.connected import CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Engine, engines
from tests.engines.vllm.tiered import VERIFIED, prompt
from tests.system.shim.iofault import IoFaults
from tierd.testing import Daemon

PROMPTS = [prompt(70 + i, 300) for i in range(8)]
SLOW = "delay:0.5"
"""Half a second for each read: computing 300 tokens of a tiny model takes milliseconds."""
HANGS_S = 10.0
WHOLE = 288
"""Tokens of a prompt that may be loaded."""
HANGS = f"delay:{HANGS_S:g}"


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    with engines() as start:
        yield start


def test_what_a_slow_store_has_is_computed(
    tmp_path: Path, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """Once reads turn out slow, matches on the store are computed. Answers stay the same."""
    with IoFaults(tmp_path) as faults, Daemon(VERIFIED, env=faults.env) as daemon:
        llm = engine(make_model(), connector=connector(daemon, advisor=True))
        await_hits(llm, prompt(60, 80))
        known = llm.generate(PROMPTS, max_tokens=8)
        to_the_store(daemon)
        assert llm.reset()
        faults.arm("pread", SLOW, "*/nvme-0/*")
        for asked, answer in zip(PROMPTS, known, strict=True):
            (again,) = llm.generate([asked], max_tokens=8)
            assert_same(answer, again, within=CLOSE)
        counts = llm.metrics()
        assert counted(counts, "advised_computes") >= len(PROMPTS) // 2
        assert counted(counts, "advised_compute_tokens") > 0


def test_a_store_that_hangs_costs_one_deadline(
    tmp_path: Path, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """A load from a store that hangs is given up at its deadline and computed, with the same answer. No
    request waits for a single read."""
    with IoFaults(tmp_path) as faults, Daemon(VERIFIED, env=faults.env) as daemon:
        patient = {"lookup_timeout_s": 20.0, "timeout_s": 120.0, "load_deadline_s": 0.2}
        llm = engine(make_model(), connector=connector(daemon, **patient))
        await_hits(llm, prompt(60, 80))
        known = llm.generate(PROMPTS[:3], max_tokens=8)
        to_the_store(daemon)
        assert llm.reset()
        before = counted(llm.metrics(), "loaded_blocks")
        faults.arm("pread", HANGS, "*/nvme-0/*")
        for asked, answer in zip(PROMPTS, known, strict=False):
            (again,) = llm.generate([asked], max_tokens=8)
            assert_same(answer, again, within=CLOSE)
            assert again.seconds < HANGS_S
        faults.disarm()
        counts = llm.metrics()
        assert counted(counts, "hit_tokens_disk") == 3 * WHOLE, "no load had begun: this test shows nothing"
        assert counted(counts, "loaded_blocks") == before


def test_what_memory_has_is_loaded_by_a_slow_engine(engine: Callable[..., Engine], shared: Path) -> None:
    """A trained model computes slower than memory loads: matches are loaded, as without the advisor."""
    model = shared / "models" / "tiny-llama"
    if not model.is_dir():
        pytest.skip("../shared/models/tiny-llama is not beside this checkout")
    asked = [[*b"def add(a, b):\n    return a + b\n\n" * 20, i] for i in range(4)]
    with Daemon(VERIFIED) as daemon:
        llm = engine(model, connector=connector(daemon, advisor=True), max_model_len=1024)
        await_hits(llm, asked[0][:70][::-1])
        known = [llm.generate([each], max_tokens=4)[0] for each in asked]
        assert llm.reset()
        again = [llm.generate([each], max_tokens=4)[0] for each in asked]
        assert all(answer.cached >= 512 for answer in again)
        for first, second in zip(known, again, strict=True):
            assert first.tokens == second.tokens
        assert counted(llm.metrics(), "advised_loads") > 0
