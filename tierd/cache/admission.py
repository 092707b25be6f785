"""Which tiers are too busy to be read from now, by how long a read would have to wait.

A wait that ends at a caller's deadline helps nobody: the disk works for answers that nobody takes. So a call is told at once what can be
had without the disk, and when to come again, as soon as what is queued would take longer than `queue_time_s`, or half of what
the caller allows.

The wait is what is under way divided by the pace at which reads have ended lately while there was work; and no less than the time since the
last one ended, so that a disk that hangs is shut too, and opens again with the first read that ends.

Purpose: bound the queue of every stored tier, in time and in number. Non-purpose: the order of reads (mover), which blocks (core). Invariants: a tier
with nothing under way is open; no session fills more than half of a queue, prefetches no more than half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tierd.core.formats.model import Reason, StructArray
from tierd.errors import Overloaded

FIRST_PACE_BYTES_PER_S = 1e9
"""Assumed before anything was read."""
MEMORY = 0.9
"""What an earlier read weighs against a later one."""
SHARE = 0.5
"""Of a queue, for one session, and for prefetches."""
RETRY_S = (0.05, 2.0)
"""The shortest hint and the longest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of transfers. batch_blocks: in one batch; queue_time_s, queue_blocks: of what waits for one stored tier."""

    batch_blocks: int
    queue_time_s: float = 2.0
    queue_blocks: int = 16384


@dataclass(frozen=True, slots=True)
class Reading:
    """One batch under way. session 0: nobody's."""

    tier: int
    blocks: int
    bytes: int
    session: int
    is_demand: bool


@dataclass(slots=True)
class Queue:
    """Reads of one tier. since: when one ended last, or the first began; busy_s, done_bytes: the pace, as a fading sum."""

    blocks: int = 0
    bytes: int = 0
    demand_bytes: int = 0
    since: float = 0.0
    busy_s: float = 0.1
    done_bytes: float = 0.1 * FIRST_PACE_BYTES_PER_S
    of_session: Counter[int] = field(default_factory=Counter)  # bytes

    def seconds(self, size: int) -> float:
        """How long so many bytes take, at the pace of late."""
        return size * self.busy_s / self.done_bytes

    def wait_s(self, now: float, *, is_demand: bool) -> float:
        """How long a read that begins now waits for its turn."""
        if not self.blocks:
            return 0.0
        return max(self.seconds(self.demand_bytes if is_demand else self.bytes), now - self.since)


class Admission:
    """The queues of the stored tiers. tiers: their positions; now: seconds that never go back."""

    def __init__(self, tiers: Collection[int], *, now: Callable[[], float], limits: Limits) -> None:
        self._queues = {tier: Queue() for tier in tiers}
        self._now = now
        self._queue_time_s = limits.queue_time_s
        self._queue_blocks = limits.queue_blocks
        self._under_way: dict[int, Reading] = {}  # by the id of a batch's first transfer

    def begin(self, batch: StructArray, *, session: int) -> None:
        """A batch of TRANSFER records of one link sets off."""
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
        """It has ended, however it did."""
        reading = self._under_way.pop(int(batch["id"][0]), None)
        if reading is None:
            return
        queue, now = self._queues[reading.tier], self._now()
        queue.busy_s = queue.busy_s * MEMORY + now - queue.since
        queue.done_bytes = queue.done_bytes * MEMORY + reading.bytes
        queue.since = now
        queue.blocks -= reading.blocks
        queue.bytes -= reading.bytes
        queue.demand_bytes -= reading.bytes * reading.is_demand
        queue.of_session[reading.session] -= reading.bytes
        if not queue.of_session[reading.session]:
            del queue.of_session[reading.session]

    def shut(self, session: int, *, timeout_s: float, is_demand: bool = True) -> frozenset[int]:
        """Tiers that a call of this session had better not wait for. timeout_s: how long it would."""
        if not self._under_way:
            return frozenset()
        return frozenset(
            tier
            for tier, queue in self._queues.items()
            if queue.blocks and self._is_full(queue, session, timeout_s=timeout_s, is_demand=is_demand)
        )

    def refusal(self, tiers: Collection[int]) -> Overloaded:
        """Why a call gets nothing that lies in tiers which are shut, and when there may be room."""
        now = self._now()
        wait_s = max((self._queues[tier].wait_s(now, is_demand=True) for tier in tiers), default=0.0)
        least, most = RETRY_S
        return Overloaded(
            f"acquire: {self.queued()} blocks wait to be read, for {wait_s:.2g} s, and mover.queue_time is {self._queue_time_s:g} s; "
            "try again later, or compute it",
            retry_after_s=min(most, max(least, wait_s - self._queue_time_s * SHARE)),
        )

    def queued(self) -> int:
        """Blocks on their way from stored tiers."""
        return sum(queue.blocks for queue in self._queues.values())

    def _is_full(self, queue: Queue, session: int, *, timeout_s: float, is_demand: bool) -> bool:
        share = 1.0 if is_demand else SHARE
        own_s = queue.seconds(queue.of_session[session])
        longest_s = min(self._queue_time_s * share, timeout_s / 2)
        return (
            queue.blocks >= self._queue_blocks * share
            or queue.wait_s(self._now(), is_demand=is_demand) > longest_s
            or own_s > self._queue_time_s * SHARE
        )
