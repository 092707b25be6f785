"""vLLM with TierdConnector: models of other shapes, and too little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import torch
from vllm.platforms.cpu import CpuPlatform

from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Answer, Engine, engines
from tests.engines.vllm.tiered import VERIFIED, prompt
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(900)]
MLA_BLOCK_TOKENS, MLA_BLOCKS = 16, 12
"""The block size of vLLM's reference kernels for latent attention; the blocks of a prompt."""
on_reference_kernels = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM takes other kernels for latent attention"
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Engines that end with their test: no two tests share one, and each of the nine takes 1.5 GB."""
    with engines() as start:
        yield start


def _is_restored(llm: Engine, daemon: Daemon, asked: list[int]) -> None:
    await_hits(llm, asked[:70][::-1])
    before = counted(llm.metrics(), "loads")
    computed = llm.generate([asked], max_tokens=24)[0]
    assert computed.cached == 0
    own = llm.generate([asked], max_tokens=24)[0]  # from vLLM's own prefix cache
    for move in (lambda: None, lambda: to_the_store(daemon)):
        assert llm.reset()
        move()
        restored = llm.generate([asked], max_tokens=24)[0]
        assert restored.cached >= len(asked) // 2
        is_alike = restored.cached == own.cached  # then the batches have the same shapes
        assert_same(own if is_alike else computed, restored, within=0.0 if is_alike else CLOSE)
    assert counted(llm.metrics(), "loads") - before == 2 and counted(llm.metrics(), "failed_loads") == 0


def test_windows_come_back(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Sliding and full layers come back from memory and store; windows need only their last blocks."""
    _is_restored(engine(make_model("hybrid"), connector=connector(daemon)), daemon, prompt(1, 300))


def test_a_window_that_does_not_come(engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """If all layers slide and blocks are lost between lookup and load, the request is computed from
    its start. The window before its first block was never loaded."""
    with Daemon(VERIFIED, faults=True) as daemon:
        llm, asked = engine(make_model("sliding"), connector=connector(daemon)), prompt(3, 300)
        _is_restored(llm, daemon, asked)
        computed = llm.generate([asked], max_tokens=24)[0]
        await_hits(llm, asked)
        before = sum(counted(llm.metrics(), f"hit_tokens_{where}") for where in ("host", "disk"))
        with daemon.faults() as faults:
            faults.arm("cache.acquire.before_hold", "kill")
        restored = llm.generate([asked], max_tokens=24)[0]
        assert daemon.await_end() < 0
        after = sum(counted(llm.metrics(), f"hit_tokens_{where}") for where in ("host", "disk"))
        assert after > before, "no load had begun: this test shows nothing"
        assert_same(computed, restored, within=CLOSE)


def test_another_rotary_scaling_is_another_model(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """An engine with another rotary scaling misses the first one's blocks and hits its own."""
    asked, rope = [prompt(4, 300)], {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    first = engine(make_model(), connector=connector(daemon))
    await_hits(first, prompt(5, 70))
    first.generate(asked, max_tokens=2)
    first.settle()
    second = engine(make_model(), connector=connector(daemon), hf_overrides={"rope_parameters": rope})
    await_hits(second, prompt(5, 70))
    computed = second.generate(asked, max_tokens=24)[0]
    assert computed.cached == 0 and second.reset()
    restored = second.generate(asked, max_tokens=24)[0]
    assert restored.cached == len(asked[0]) // BLOCK_TOKENS * BLOCK_TOKENS
    assert_same(computed, restored)


@on_reference_kernels
def test_without_vllms_caching_tierd_is_off(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """vLLM disables prefix caching for latent attention on the CPU, so tierd saves and claims nothing."""
    llm, asked = engine(make_model("mla"), connector=connector(daemon)), [prompt(2, 300)]
    computed = llm.generate(asked, max_tokens=24)[0]
    llm.settle()
    again = llm.generate(asked, max_tokens=24)[0]
    assert computed.cached == again.cached == 0
    assert_same(computed, again)
    assert counted(llm.metrics(), "saves") == counted(llm.metrics(), "lookups") == 0


@on_reference_kernels
def test_latent_attention_comes_back(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention from memory and store is bit-equal to vLLM's own prefix cache. The test
    enables that cache: vLLM's CPU backend cannot continue from a prefix and disables it. So an
    answer after a hit differs, without tierd too, but decoding reads the restored KV."""
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(_with_prefix_caching))
    llm = engine(make_model("mla"), connector=connector(daemon), max_model_len=1024)
    asked, other = ([*prompt(seed, MLA_BLOCKS * MLA_BLOCK_TOKENS), 7] for seed in (6, 7))
    llm.generate([asked, other], max_tokens=2)
    own, of_other = (llm.generate([tokens], max_tokens=24)[0] for tokens in (asked, other))
    assert own.cached == of_other.cached == len(asked) - 1
    assert own.tokens != of_other.tokens, "the same last token, other KV: this test shows nothing"
    for move in (lambda: None, lambda: to_the_store(daemon)):
        assert llm.reset()
        move()
        before = counted(llm.metrics(), "loaded_blocks")
        restored = _restored(llm, asked, own.cached)
        assert counted(llm.metrics(), "loaded_blocks") - before == MLA_BLOCKS
        assert_same(own, restored)


def _restored(llm: Engine, asked: list[int], tokens: int) -> Answer:
    """Asks until the daemon answers in time; returns that answer."""
    for _ in range(60):
        answer = llm.generate([asked], max_tokens=24)[0]
        if answer.cached == tokens:
            return answer
        assert llm.reset()
    raise AssertionError("the daemon serves nothing")


SWITCHES_OFF = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]


def _with_prefix_caching(cls: Any, config: Any) -> None:
    SWITCHES_OFF(cls, config)
    config.cache_config.enable_prefix_caching = True


def test_a_trained_model_comes_back(shared: Path, daemon: Daemon, engine: Callable[..., Engine]) -> None:
    """A trained model in bfloat16 comes back from memory and from the store."""
    model = shared / "models" / "tiny-llama"
    if not model.is_dir():
        pytest.skip("../shared/models/tiny-llama is not beside this checkout")
    text = b"def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n" * 4
    _is_restored(engine(model, connector=connector(daemon), max_model_len=1024, dtype="bfloat16"), daemon, list(text))


def test_little_memory(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Requests preempted during saves and loads answer as in an engine with room; vLLM loses no blocks."""
    asked = [prompt(30 + i, 200) for i in range(4)]
    roomy = engine(make_model())
    known = roomy.generate(asked, max_tokens=60)
    tight = engine(
        make_model(),
        connector=connector(daemon),
        num_gpu_blocks_override=24,
        max_model_len=512,
        enable_chunked_prefill=True,
    )
    for _ in range(2):  # computed, then restored if still stored
        answers = tight.generate(asked, max_tokens=60)
        for first, second in zip(known, answers, strict=True):
            assert_same(first, second, within=CLOSE)
        assert tight.reset()
    preempted = [value for name, value in tight.metrics().items() if name.startswith("vllm:num_preemptions_total")]
    assert sum(preempted) > 0, "there was room: this test shows nothing"
    assert tight.ask("evaluate", code=FREE) == 23  # all but the null block
    assert counted(tight.metrics(), "loads") > 0


FREE = "llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()"
