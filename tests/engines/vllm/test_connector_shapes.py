"""vLLM with TierdConnector: other models than a plain one, and less memory than is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from tests.engines.vllm.connected import BLOCK_TOKENS, CLOSE, assert_same, await_hits, connector, counted, to_the_store
from tests.engines.vllm.engine import Engine
from tests.engines.vllm.tiered import VERIFIED, prompt
from tierd.testing import Daemon

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


def _is_restored(llm: Engine, daemon: Daemon, asked: list[int]) -> None:
    await_hits(llm, asked[:70][::-1])
    before = counted(llm.metrics(), "loads")
    computed = llm.generate([asked], max_tokens=24)[0]
    assert computed.cached == 0
    for move in (lambda: None, lambda: to_the_store(daemon)):
        assert llm.reset()
        move()
        restored = llm.generate([asked], max_tokens=24)[0]
        assert restored.cached >= len(asked) // 2
        assert_same(computed, restored, within=CLOSE)
    assert counted(llm.metrics(), "loads") - before == 2 and counted(llm.metrics(), "failed_loads") == 0


def test_windows_come_back(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Groups of sliding and of full layers, of which windows need their last blocks only, from memory and from the store."""
    _is_restored(engine(make_model("hybrid"), connector=connector(daemon)), daemon, prompt(1, 300))


def test_a_window_that_does_not_come(engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Where all layers slide, a request whose blocks are lost between lookup and load is computed from its beginning: what its first block looks back to has
    never been there."""
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
    """An engine of the same checkpoint with another scaling of positions, as for longer sequences, is not served the first one's blocks, and is its own."""
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


def test_without_vllms_caching_tierd_is_off(
    daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """vLLM switches prefix caching off for latent attention on the CPU, which cannot go on from a prefix: nothing is saved, nothing claimed."""
    llm, asked = engine(make_model("mla"), connector=connector(daemon)), [prompt(2, 300)]
    computed = llm.generate(asked, max_tokens=24)[0]
    llm.settle()
    again = llm.generate(asked, max_tokens=24)[0]
    assert computed.cached == again.cached == 0
    assert_same(computed, again)
    assert counted(llm.metrics(), "saves") == counted(llm.metrics(), "lookups") == 0


def test_a_trained_model_comes_back(shared: Path, daemon: Daemon, engine: Callable[..., Engine]) -> None:
    """With trained weights, in vLLM's own choice of a type."""
    model = shared / "models" / "tiny-llama"
    if not model.is_dir():
        pytest.skip("../shared/models/tiny-llama is not beside this checkout")
    text = b"def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n" * 4
    _is_restored(engine(model, connector=connector(daemon), max_model_len=1024, dtype="bfloat16"), daemon, list(text))


def test_little_memory(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Requests that are preempted while their blocks are saved and loaded say the same as in an engine with room, and nothing is lost of vLLM's blocks."""
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
    for _ in range(2):  # computed, then restored where it is still there
        answers = tight.generate(asked, max_tokens=60)
        for first, second in zip(known, answers, strict=True):
            assert_same(first, second, within=CLOSE)
        assert tight.reset()
    preempted = [value for name, value in tight.metrics().items() if name.startswith("vllm:num_preemptions_total")]
    assert sum(preempted) > 0, "there was room: this test shows nothing"
    assert tight.ask("evaluate", code=FREE) == 23  # all but the null block
    assert counted(tight.metrics(), "loads") > 0


FREE = "llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()"
