"""The connector's counts, for vLLM's logs and its Prometheus endpoint.

They are summed over workers and steps; tierd.integrations.store counts. Only names in COUNTERS are
shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "lookups": "Lookups sent to tierd",
    "lookup_tokens": "Prompt tokens looked up in tierd",
    "found_tokens": "Tokens that lookups found in tierd",
    "hit_tokens_host": "Prompt tokens loaded from tierd's memory",
    "hit_tokens_disk": "Prompt tokens loaded from tierd's stores",
    "advised_loads": "Matches that were worth loading, at least a part",
    "advised_computes": "Matches that were faster to compute",
    "advised_compute_tokens": "Matched tokens that were computed because that was expected to be faster",
    "regret_us": "Microseconds that loads took longer than computing was expected to",
    "loads": "Loads from tierd",
    "loaded_blocks": "Blocks loaded from tierd",
    "loaded_bytes": "Bytes loaded from tierd",
    "failed_loads": "Loads that ended in an error",
    "step_loads": "Loads in the step that computes with them",
    "step_wait_us": "Microseconds that steps waited for their loads",
    "late_loads": "Loads that had nothing at their deadline",
    "saves": "Saves to tierd",
    "saved_blocks": "Blocks stored in tierd, including blocks that it had already",
    "saved_bytes": "Bytes copied to tierd",
    "dropped_blocks": "Blocks that were not stored, for lack of space or of a daemon",
    "failed_saves": "Saves that ended in an error",
}


@dataclass
class TierdStats(KVConnectorStats):
    """data: name of COUNTERS -> amount."""

    def reset(self) -> None:
        """Clears the counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> TierdStats:
        """Sums, in place."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts as the log shows them."""
        return {name: self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class TierdMetrics(KVConnectorPromMetrics):
    """`vllm:tierd_<name>` per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            name: {
                engine: made.labels(*labels)
                for made in [counter(f"vllm:tierd_{name}", documentation=text, labelnames=labelnames)]
                for engine, labels in per_engine_labelvalues.items()
            }
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of an engine's step."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount:
                self._counters[name][engine_idx].inc(amount)


def medium_of(tier: str) -> str:
    """host or disk, from a tier's name."""
    return "host" if tier.startswith(("host", "device")) else "disk"


def sources_of(tokens: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by tier, under vLLM's names of sources; {} on a release without them."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415
    except ImportError:  # 0.31
        return {}
    sources: Counter[Any] = Counter()
    for tier, count in tokens.items():
        sources[CacheHitSource.HOST if medium_of(tier) == "host" else CacheHitSource.DISK] += count
    return dict(sources)
