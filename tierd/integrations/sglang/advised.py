"""The advisor's knowledge of SGLang, and its counts on SGLang's Prometheus endpoint.

SGLang tells a storage nothing of its computing, so the prefill rate is an option. The decision is
in stored.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tierd.client.advice import EngineAdvice

COUNTERS = {
    "advised_loads": "Queries of which tierd offered pages, at least a part",
    "advised_computes": "Queries whose pages were faster to compute",
    "advised_compute_tokens": "Stored tokens that were computed because that was expected to be faster",
    "regret_us": "Microseconds that loads took longer than computing was expected to",
}
STEPS = range(1024, 16 * 1024, 1024)
"""Tokens of the steps that stand for a rate."""


def teach(advice: EngineAdvice, tokens_per_s: float) -> None:
    """Tells an advisor of an engine with this rate for any prompt. 0: nothing."""
    for tokens in STEPS if tokens_per_s else ():
        advice.computed([(0, tokens)], tokens / tokens_per_s)


def count(counts: Mapping[str, int], config: Any) -> None:
    """Adds to `sglang:tierd_<name>_total`. config: HiCacheStorageConfig."""
    for name in COUNTERS.keys() & counts.keys():
        _counter(name).labels(config.model_name or "", config.tp_rank, config.pp_rank).inc(counts[name])


@cache
def _counter(name: str) -> Any:
    from prometheus_client import Counter  # noqa: PLC0415 -- SGLang sets its directory before

    return Counter(f"sglang:tierd_{name}", COUNTERS[name], ("model_name", "tp_rank", "pp_rank"))
