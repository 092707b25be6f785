"""Gauges of the present state, refreshed at a fixed interval.

They cover tiers, sessions, leases and queues. Counters are updated elsewhere, at each event.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog

import tierd
from tierd.core.plan import TierStats
from tierd.server.assembly import Assembly
from tierd.server.session.sessions import Sessions
from tierd.tiers.arena.arena import Arena

log = structlog.get_logger(__name__)

INTERVAL_S = 2.0


class Gauges:
    """Runs on the event loop while the daemon serves."""

    def __init__(self, daemon: Assembly, *, sessions: Sessions) -> None:
        self._daemon = daemon
        self._sessions = sessions
        self._task: asyncio.Task[None] | None = None
        self._declined: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        """Starts refreshing."""
        metrics = self._daemon.metrics
        metrics.info.labels(version=tierd.__version__, instance=self._daemon.instance).set(1)
        for tier in self._daemon.tiers:
            if isinstance(tier, Arena):
                metrics.arena_touch_rate.labels(tier=tier.spec.name).set(tier.first_touch_bytes_per_s)
                metrics.arena_huge_share.labels(tier=tier.spec.name).set(tier.huge_page_share)
        self._task = asyncio.create_task(self._refresh_for_ever())

    def stop(self) -> None:
        """Stops refreshing."""
        if self._task:
            self._task.cancel()

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                self.refresh()
            except Exception:
                log.exception("gauges not refreshed")
            await asyncio.sleep(INTERVAL_S)

    def refresh(self) -> None:
        """Sets every gauge to its present value."""
        metrics, cache = self._daemon.metrics, self._daemon.cache
        stats = cache.core.stats()
        metrics.blocks.set(stats.blocks)
        metrics.leases.set(stats.leases)
        metrics.reservations.set(stats.reservations)
        metrics.queue_depth.labels(queue="transfers").set(cache.flights.count)
        metrics.queue_depth.labels(queue="links").set(cache.parts.mover.queued())
        states = Counter(session.state.value for session in self._sessions.list())
        for state in ("open", "ended", "restored"):
            metrics.sessions.labels(state=state).set(states[state])
        self._refresh_tiers()
        self._refresh_memory()
        self._refresh_wear()

    def _refresh_tiers(self) -> None:
        metrics = self._daemon.metrics
        for tier in self._daemon.cache.core.tier_stats():
            metrics.tier_serving.labels(tier=tier.name).set(tier.serving)
            metrics.tier_writable.labels(tier=tier.name).set(tier.writable)
            used, assigned = tier.used_bytes, tier.assigned_bytes
            for state, size in (
                ("used", used),
                ("free", assigned - used),
                ("unassigned", tier.capacity_bytes - assigned),
            ):
                metrics.tier_bytes.labels(tier=tier.name, state=state).set(size)
            self._count_declined(tier)
            for state in ("free", "reserved", "ready", "retiring", "quarantined"):
                metrics.tier_pages.labels(tier=tier.name, state=state).set(getattr(tier, f"pages_{state}"))
            metrics.tier_pinned_pages.labels(tier=tier.name).set(tier.pages_pinned)

    def _refresh_memory(self) -> None:
        for tier in self._daemon.tiers:
            if isinstance(tier, Arena):
                self._daemon.metrics.arena_unready.labels(tier=tier.spec.name).set(tier.unready_bytes)

    def _refresh_wear(self) -> None:
        cache = self._daemon.cache
        for tier in self._daemon.tiers:
            if tier.spec.wear_bytes_per_s:
                left = cache.core.tuning.wear_balance(tier.position, cache.clock.now()).level_bytes
                self._daemon.metrics.wear_left.labels(tier=tier.spec.name).set(left)

    def _count_declined(self, tier: TierStats) -> None:
        """Advances the counters to the core's counts."""
        for reason, count in tier.declined.items():
            counter = self._daemon.metrics.admission_declined.labels(tier=tier.name, reason=reason)
            counter.inc(count - self._declined[tier.name, reason])
            self._declined[tier.name, reason] = count
