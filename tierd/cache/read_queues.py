"""Decides which tiers are too busy to read from now, by how long a read would wait.

A read that ends after its caller's deadline wastes the disk. So a call gets at once what memory
holds, and a time to retry. This happens when the queue would take longer than `queue_time_s`, or
than half of the caller's timeout.

The wait is the bytes under way divided by the recent pace of reads, which counts only busy time. It
is at least the time since the last read ended. So a tier whose disk hangs is shut, and opens again
when a read ends.

This module bounds the queue of each stored tier, in time and in blocks. The mover orders reads; the
core chooses blocks. A tier with nothing under way is open. One session fills at most half of a
queue, and so do prefetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tierd.advisor.pace import FIRST_PACE, Pace, PaceMeter
from tierd.core.formats.model import Reason, StructArray
from tierd.errors import Overloaded

SHARE = 0.5
"""Share of a queue that one session may fill, and that prefetches may fill."""
RETRY_S = (0.05, 2.0)
"""The shortest and the longest retry hint."""


@dataclass(slots=True)
class Limits:
    """Operators may change them at any time; whoever holds them reads them anew.

    batch_blocks: in one batch. queue_time_s, queue_blocks: limits of one stored tier's queue.
    prefetch_share: of a link's batches and of a tier's bytes, for prefetches.
    link_batches: of a link at one time.
    prefetch_on_lookup: whether a lookup without an intent prefetches.
    """

    batch_blocks: int
    queue_time_s: float = 2.0
    queue_blocks: int = 16384
    prefetch_share: float = 0.5
    link_batches: int = 8
    prefetch_on_lookup: bool = True

    @property
    def prefetch_batches(self) -> int:
        """Batches of prefetches on one link at one time."""
        return max(1, int(self.prefetch_share * self.link_batches))


@dataclass(frozen=True, slots=True)
class Reading:
    """One batch under way. session 0: no session asked for it."""

    tier: int
    blocks: int
    bytes: int
    session: int
    is_demand: bool


@dataclass(slots=True)
class Queue:
    """Reads of one tier. since: last end, or first start."""

    blocks: int = 0
    bytes: int = 0
    demand_bytes: int = 0
    since: float = 0.0
    meter: PaceMeter = field(default_factory=PaceMeter)
    of_session: Counter[int] = field(default_factory=Counter)  # bytes

    def seconds(self, size: int) -> float:
        """Time to read `size` bytes at the recent pace."""
        return size / (self.meter.pace() or FIRST_PACE).bytes_per_s

    def pace(self, now: float) -> Pace:
        """Of a read that begins now."""
        idle_s = 0.0 if self.blocks else now - self.since
        pace = self.meter.pace(idle_s) or FIRST_PACE
        return pace.after(self.demand_bytes, since_s=now - self.since) if self.blocks else pace

    def wait_s(self, now: float, *, is_demand: bool) -> float:
        """How long a read that begins now waits for its turn."""
        if not self.blocks:
            return 0.0
        return max(self.seconds(self.demand_bytes if is_demand else self.bytes), now - self.since)


class ReadQueues:
    """The queues of the stored tiers. tiers: their positions. now: monotonic time in seconds."""

    def __init__(self, tiers: Collection[int], *, now: Callable[[], float], limits: Limits) -> None:
        self._queues = {tier: Queue() for tier in tiers}
        self._now = now
        self._limits = limits
        self._under_way: dict[int, Reading] = {}  # by the id of a batch's first transfer

    def begin(self, batch: StructArray, *, session: int) -> None:
        """Counts a batch of TRANSFER records of one link that begins."""
        queue = self._queues.get(int(batch["source"]["tier"][0]))
        if queue is None:
            return
        is_demand = bool((batch["reason"] == Reason.DEMAND).any())
        size = int(batch["source"]["length"].sum())
        tier = int(batch["source"]["tier"][0])
        self._under_way[int(batch["id"][0])] = Reading(tier, len(batch), size, session, is_demand)
        if not queue.blocks:
            queue.since = self._now()
        queue.blocks += len(batch)
        queue.bytes += size
        queue.demand_bytes += size * is_demand
        queue.of_session[session] += size

    def end(self, batch: StructArray) -> None:
        """Counts a batch that ended, whether it succeeded or failed."""
        reading = self._under_way.pop(int(batch["id"][0]), None)
        if reading is None:
            return
        queue, now = self._queues[reading.tier], self._now()
        queue.meter.observe(reading.bytes, now - queue.since)
        queue.since = now
        queue.blocks -= reading.blocks
        queue.bytes -= reading.bytes
        queue.demand_bytes -= reading.bytes * reading.is_demand
        queue.of_session[reading.session] -= reading.bytes
        if not queue.of_session[reading.session]:
            del queue.of_session[reading.session]

    def paces(self) -> dict[int, Pace]:
        """How long reads would take now, by the tiers' positions."""
        now = self._now()
        return {tier: queue.pace(now) for tier, queue in self._queues.items()}

    def shut(self, session: int, *, timeout_s: float, is_demand: bool = True) -> frozenset[int]:
        """The tiers that this session's call should not wait for. timeout_s: the call's timeout."""
        if not self._under_way:
            return frozenset()
        return frozenset(
            tier
            for tier, queue in self._queues.items()
            if queue.blocks and self._is_full(queue, session, timeout_s=timeout_s, is_demand=is_demand)
        )

    def refusal(self, tiers: Collection[int]) -> Overloaded:
        """The error for a call whose blocks all lie in shut tiers, with a time to retry."""
        now = self._now()
        wait_s = max((self._queues[tier].wait_s(now, is_demand=True) for tier in tiers), default=0.0)
        least, most = RETRY_S
        return Overloaded(
            f"acquire: {self.queued()} blocks are queued for reads, a wait of {wait_s:.2g} s; mover.queue_time is "
            f"{self._limits.queue_time_s:g} s; try again later, or compute the blocks",
            retry_after_s=min(most, max(least, wait_s - self._limits.queue_time_s * SHARE)),
        )

    def queued(self) -> int:
        """Number of blocks being read from stored tiers."""
        return sum(queue.blocks for queue in self._queues.values())

    def _is_full(self, queue: Queue, session: int, *, timeout_s: float, is_demand: bool) -> bool:
        share = 1.0 if is_demand else SHARE
        own_s = queue.seconds(queue.of_session[session])
        longest_s = min(self._limits.queue_time_s * share, timeout_s / 2)
        return (
            queue.blocks >= self._limits.queue_blocks * share
            or queue.wait_s(self._now(), is_demand=is_demand) > longest_s
            or own_s > self._limits.queue_time_s * SHARE
        )
