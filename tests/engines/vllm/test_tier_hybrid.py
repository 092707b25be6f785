"""`TierdTier` beneath vLLM, with a model of several attention groups: sliding windows and full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

from tests.depth import report
from tests.engines.vllm.engine import Engine
from tests.engines.vllm.tiered import TOUCH, VERIFIED, connector, far_from, flushed, prompt
from tierd.testing import Daemon

pytestmark = pytest.mark.timeout(900)
LENGTH, WHOLE = 400, 384


def test_groups_come_back(engine: Callable[..., Engine], make_model: Callable[..., Path]) -> None:
    """Each group's chunks have their own namespace, and a restored prompt answers as a computed one."""
    with Daemon(VERIFIED) as daemon:
        of_blocks = connector(daemon, extra={"blocks_per_chunk": 1})
        hybrid = engine(make_model("hybrid"), connector=of_blocks, disable_hybrid_kv_cache_manager=False)
        first = hybrid.generate([prompt(1, LENGTH)], max_tokens=16)[0]
        assert hybrid.reset(connector=True)
        second = hybrid.generate([prompt(1, LENGTH)], max_tokens=16)[0]
        groups = len({int(meta["namespace"]) for _, meta in flushed(daemon)})
    assert groups > 1 and first.cached == 0 and second.cached == WHOLE
    assert first.tokens == second.tokens and far_from(first.logprobs, second.logprobs) <= TOUCH
    report("vLLM tier, hybrid model", groups=groups, computed_s=first.seconds, restored_s=second.seconds)
