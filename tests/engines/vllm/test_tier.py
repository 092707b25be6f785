"""`TierdTier` beneath the real vLLM engine on the CPU: restored chunks equal computed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from tests.depth import report
from tests.engines.vllm.engine import Answer, Engine
from tests.engines.vllm.tiered import (
    CHUNK_TOKENS,
    TOUCH,
    TRUSTING,
    VERIFIED,
    cold_restart,
    connector,
    far_from,
    flushed,
    names,
    pages_like,
    prompt,
    spoil,
    stored,
)
from tests.system.blocks import await_true
from tests.system.damaged import copy
from tierd.testing import Daemon
from tierd.tiers.store.slots import HEADER_BYTES

pytestmark = pytest.mark.timeout(900)
LENGTH, WHOLE = 400, 384
CHUNKS = WHOLE // CHUNK_TOKENS


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(VERIFIED) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def vllm(daemon: Daemon, engine: Callable[..., Engine], make_model: Callable[..., Path]) -> Callable[..., Engine]:
    """vllm(): the engine that all tests share; restarts a daemon that a test has ended."""

    def give(**given: object) -> Engine:
        if daemon.has_ended:
            daemon.start()
        return engine(make_model("llama"), connector=connector(daemon), **given)

    return give


def say(engine: Engine, tokens: list[int]) -> Answer:
    """Asks one prompt. On return tierd has the computed chunks, and vLLM has dropped them."""
    answer = engine.generate([tokens], max_tokens=16)[0]
    assert engine.reset(connector=True)
    return answer


def kept(daemon: Daemon, engine: Engine, tokens: list[int]) -> Answer:
    """The answer when everything is computed; its blocks are in the daemon's store afterwards."""
    before = names(flushed(daemon))
    first = say(engine, tokens)
    assert first.cached == 0
    assert len(names(flushed(daemon)) - before) >= CHUNKS
    return first


def assert_same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens and far_from(one.logprobs, other.logprobs) <= TOUCH


def loaded(engine: Engine) -> float:
    """Chunks loaded from tierd so far, by vLLM's own metrics."""
    return sum(value for name, value in engine.metrics().items() if "tierd_loaded_blocks_total" in name)


def test_from_host_memory(vllm: Callable[..., Engine]) -> None:
    """Chunks that vLLM dropped come back from tierd's memory with the same answer, and metrics count them."""
    engine = vllm()
    first, before = say(engine, prompt(1)), loaded(engine)
    second = say(engine, prompt(1))
    assert first.cached == 0 and second.cached == WHOLE
    assert_same(first, second)
    assert loaded(engine) - before == CHUNKS
    report("vLLM tier, host", computed_s=first.seconds, restored_s=second.seconds)


def test_from_the_store_after_a_restart(daemon: Daemon, vllm: Callable[..., Engine]) -> None:
    """After a daemon restart without memory, the same engine gets the same answer from NVMe."""
    engine = vllm()
    first = kept(daemon, engine, prompt(2))
    cold_restart(daemon)
    second = say(engine, prompt(2))
    assert second.cached == WHOLE
    assert_same(first, second)
    report("vLLM tier, NVMe", computed_s=first.seconds, restored_s=second.seconds)


def test_another_process(vllm: Callable[..., Engine], make_model: Callable[..., Path], daemon: Daemon) -> None:
    """A second vLLM hits the first one's chunks, and its end leaves none of vLLM's mappings."""
    first = say(vllm(), prompt(3))
    name = "tierd-second"
    with Engine(make_model("llama"), connector=connector(daemon) | {"engine_id": name}) as second:
        again = second.generate([prompt(3)], max_tokens=16)[0]
        assert list(Path("/dev/shm").glob(f"vllm_offload_{name}*"))
    assert again.cached == WHOLE
    assert_same(first, again)
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{name}*"))


def test_another_rotary_scaling_is_another_model(
    daemon: Daemon, vllm: Callable[..., Engine], make_model: Callable[..., Path]
) -> None:
    """A vLLM with another rotary scaling misses the first one's chunks and hits its own, although
    vLLM does not give its tiers the scaling."""
    kept(daemon, vllm(), prompt(8))
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaled = {"hf_overrides": {"rope_parameters": rope}}
    with Engine(make_model("llama"), connector=connector(daemon), **scaled) as second:
        assert [say(second, prompt(8)).cached for _ in range(2)] == [0, WHOLE]


@pytest.mark.parametrize("verify", ["always", "first_hit"])
def test_a_corrupted_chunk(daemon: Daemon, vllm: Callable[..., Engine], verify: str) -> None:
    """Bytes corrupted in memory and on disk cost the hit, whichever hits the daemon verifies: a load
    checks all that it copies."""
    seed = 4 + (verify == "always")
    engine = vllm()
    known = names(flushed(daemon))
    first = kept(daemon, engine, prompt(seed))
    place, meta = next((p, m) for p, m in stored(daemon) if m["hash"].tobytes() not in known and m["position"] == 0)
    head = copy(place, HEADER_BYTES + 64)[HEADER_BYTES:]
    cold_restart(daemon, config=VERIFIED if verify == "always" else TRUSTING)
    assert_same(first, say(engine, prompt(seed)))
    spoil(place._replace(offset=place.offset + HEADER_BYTES), int(meta["logical_length"]))
    (page,) = pages_like(daemon, head)
    spoil(page, int(meta["logical_length"]))
    third = say(engine, prompt(seed))
    assert third.cached == 0
    assert_same(first, third)


def test_a_daemon_that_dies_while_it_loads(daemon: Daemon, vllm: Callable[..., Engine]) -> None:
    """If the daemon dies in a load the request is computed with the same answer; later requests hit again."""
    engine = vllm()
    first = kept(daemon, engine, prompt(6))
    cold_restart(daemon, failpoints="mover.load.before_verify=kill")
    second = say(engine, prompt(6))
    assert daemon.has_ended and second.cached == 0 and second.finish == "length"
    assert_same(first, second)
    daemon.start()
    third = say(engine, prompt(6))
    assert_same(first, third)

    def served() -> bool:
        return say(engine, prompt(6)).cached == WHOLE

    await_true(served, "hits after the daemon came back")


def test_little_memory(daemon: Daemon, vllm: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Requests preempted while chunks move answer as in an engine with room; vLLM loses no blocks."""
    asked = [prompt(30 + i, 200) for i in range(4)]
    known = vllm().generate(asked, max_tokens=60)
    assert vllm().reset(connector=True)
    little = {"num_gpu_blocks_override": 24, "max_model_len": 512, "enable_chunked_prefill": True}
    with Engine(make_model("llama"), connector=connector(daemon), **little) as tight:
        answers = tight.generate(asked, max_tokens=60)
        preempted = [value for name, value in tight.metrics().items() if name.startswith("vllm:num_preemptions_total")]
        assert sum(preempted) > 0, "there was room: this test shows nothing"
        assert loaded(tight) > 0 and tight.reset(connector=True)
    for one, other in zip(known, answers, strict=True):
        assert one.tokens == other.tokens and far_from(one.logprobs, other.logprobs) < 1e-3


def test_requests_that_share_a_prefix(vllm: Callable[..., Engine]) -> None:
    """Concurrent requests with a common prefix restore it, each with its own rest, and answer the same."""
    engine = vllm()
    prompts = [prompt(7, 256) + prompt(70 + i, 80 + 16 * i) for i in range(4)]
    first = engine.generate(prompts, max_tokens=16)
    assert engine.reset(connector=True)
    second = engine.generate(prompts, max_tokens=16)
    assert engine.reset(connector=True)
    assert all(answer.cached >= 256 for answer in second)
    for one, other in zip(first, second, strict=True):
        assert one.tokens == other.tokens and far_from(one.logprobs, other.logprobs) < 1e-3
