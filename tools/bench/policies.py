"""Misses of the default policy on synthetic traffic, against LRU's misses.

Each pattern of traffic.py is played to cores of one tier and of two, whose transfers succeed at
once. The limit is LRU's misses with admission `all`, and one point more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.core.formats.model import TierKind, TierSpec
from tools.bench.measure import Effort
from tools.bench.rows import Row, row_of
from tools.bench.traffic import PAGE, PATTERNS, hit_rate

PACES_S = (0.01, 1.0)
"""Between two steps: a learner of pauses sees other traffic in each."""


def specs(host: int, nvme: int, *, eviction: str, admission: str) -> Sequence[TierSpec]:
    """Tiers of this many blocks; nvme 0: none."""
    tiers = [TierSpec(TierKind.HOST, 0, host * PAGE, 8 * PAGE, eviction=eviction)]
    if nvme:
        sizes = {"capacity_bytes": nvme * 2 * PAGE, "segment_bytes": 16 * PAGE, "slot_overhead_bytes": PAGE}
        tiers.append(TierSpec(TierKind.NVME, 0, **sizes, writer_owned=False, eviction=eviction, admission=admission))
    return tiers


def against_lru(name: str, *, host: int, nvme: int, pace_s: float, seed: int = 0) -> tuple[float, float]:
    """Hits in per cent: of the default, of LRU with everything written."""
    default, lru = (
        hit_rate(PATTERNS[name], specs(host, nvme, eviction=eviction, admission=admission), pace_s, seed=seed)
        for eviction, admission in (("reuse-index", "learned"), ("lru", "all"))
    )
    return default, lru


def rows(effort: Effort) -> list[Row]:
    """A row for each pattern in one tier and in two."""
    out = []
    host = effort.pick(512, 64)
    for name in PATTERNS if not effort.is_tiny else list(PATTERNS)[:2]:
        for tiers, near, far in (("one", host, 0), ("two", host // 4, host)):
            found = [against_lru(name, host=near, nvme=far, pace_s=pace_s) for pace_s in PACES_S]
            misses, limits = [100 - default for default, _ in found], [101 - lru for _, lru in found]
            meaning = f"misses of the default policy in {tiers}, against LRU's and a point"
            out.append(row_of(f"policy_{name}_{tiers}", misses, unit="%", limits=limits, meaning=meaning))
    return out
