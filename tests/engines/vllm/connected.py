"""Helpers for tests of `TierdConnector`: its configuration, and comparisons of answers."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.engine import Answer, Engine
from tests.system.blocks import connected
from tierd._proto import admin_pb2 as apb
from tierd.testing import Daemon

BLOCK_TOKENS = 32
CLOSE = 1e-3
"""Tolerance for log-probabilities of other batches; in batches of the same shapes they are bit-equal."""


def connector(daemon: Daemon, **options: Any) -> dict[str, Any]:
    """kv_transfer_config. options: of kv_connector_extra_config. With long timeouts a busy machine
    does not look like a dead daemon. Without the advisor all matches are loaded: small models
    compute faster. Loads from memory run in their step."""
    patient = {"lookup_timeout_s": 20.0, "timeout_s": 60.0, "advisor": False, "step_load_s": 0.9}
    return {
        "kv_connector": "TierdConnector",
        "kv_connector_module_path": "tierd.integrations.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": daemon.target, **patient, **options},
    }


def assert_same(first: Answer, second: Answer, *, within: float = 0.0) -> None:
    """Both have the same tokens, and log-probabilities that differ by `within` at most."""
    assert first.tokens == second.tokens and first.finish == second.finish == "length"
    assert max(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True)) <= within


def to_the_store(daemon: Daemon) -> None:
    """Writes all blocks in memory to the store, and evicts them from memory."""
    with connected(daemon) as client:
        client.call(client.admin.Flush, apb.FlushRequest())
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))


def counted(metrics: dict[str, float], name: str) -> float:
    """The value of one of our counters."""
    return sum(value for key, value in metrics.items() if key.startswith(f"vllm:tierd_{name}_total"))


def await_hits(llm: Engine, asked: list[int]) -> None:
    """Waits until the engine hits all that it may of a prompt, and has loaded it.

    With best effort, a client connects and reconnects within seconds, not at the first call.
    Hits alone say nothing about the worker: vLLM counts them before a load in its step.
    """
    wanted = (len(asked) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for _ in range(60):
        assert llm.reset()
        before = counted(llm.metrics(), "loaded_blocks")
        is_hit = llm.generate([asked], max_tokens=1)[0].cached == wanted
        if is_hit and counted(llm.metrics(), "loaded_blocks") > before:
            assert llm.reset()
            return
    raise AssertionError("the daemon serves nothing")
