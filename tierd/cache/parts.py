"""The parts of a `Cache`. server/assembly.py fills this value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierd.cache.events import EventLog
from tierd.cache.read_queues import Limits
from tierd.clock import Clock
from tierd.core.core import Core
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.decisions.record import Decisions
from tierd.metrics import Metrics
from tierd.mover import Mover
from tierd.store_codecs import StoreCodecs
from tierd.tiers.arena.holds import HoldTable
from tierd.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a `Cache`. verify: "first_hit", "sampled" or "always". seed: of the sampling;
    None: random."""

    core: Core
    tiers: Sequence[Tier]
    mover: Mover
    clock: Clock
    registry: NamespaceRegistry
    holds: HoldTable
    metrics: Metrics
    events: EventLog
    verify: str
    limits: Limits
    store_codecs: StoreCodecs
    decisions: Decisions
    sync_interval_s: float = 1.0
    seed: int | None = None
