"""Eviction policies by the names in settings. They keep `tierd.core.eviction.Eviction`.

A new one is a file here, a line in EVICTION, and passes `tests/contract/test_eviction.py`, which
runs over the dict.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.core.eviction import Eviction
from tierd.core.index.blocks import Blocks
from tierd.policies.eviction.arc import Arc
from tierd.policies.eviction.attention import Attention
from tierd.policies.eviction.duel import Duel
from tierd.policies.eviction.lfu import AgedLfu
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.prefix_separation import PrefixSeparation
from tierd.policies.eviction.priority import Priority
from tierd.policies.reuse import Traffic

EVICTION: dict[str, Callable[[Blocks], Eviction]] = {
    "arc": Arc,
    "attention": Attention,
    "lfu": AgedLfu,
    "lru": Lru,
    "prefix-separation": PrefixSeparation,
    "priority": Priority,
    "reuse-index": lambda blocks: Duel(blocks, Traffic(blocks)),
}
