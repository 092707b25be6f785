"""Eviction policies by the names that settings use. The contract they keep is `tierd.core.eviction.Eviction`.

A new one is a file here, a line in EVICTION, and passes `tests/contract/test_eviction.py`, which runs over the dict.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.core.blocks import Blocks
from tierd.core.eviction import Eviction
from tierd.policies.eviction.lfu import AgedLfu
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.reuse_index import ReuseIndex
from tierd.policies.reuse import Traffic

EVICTION: dict[str, Callable[[Blocks], Eviction]] = {
    "lfu": AgedLfu,
    "lru": Lru,
    "reuse-index": lambda blocks: ReuseIndex(blocks, Traffic(blocks)),
}
