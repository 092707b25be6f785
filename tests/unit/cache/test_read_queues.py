"""Queues of reads: a disk with a long queue refuses reads that would wait too long."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from tierd.cache.read_queues import Limits, ReadQueues
from tierd.core.formats.model import TRANSFER, Reason, StructArray

MIB = 1 << 20
DISK, OTHER, HOST = 1, 2, 0
FORTY = 40 * MIB
"""Bytes that the fixture's disk reads in a second."""


@dataclass
class Disk:
    """Two stored tiers and a clock."""

    now: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        limits = Limits(batch_blocks=64, queue_time_s=2.0, queue_blocks=1000)
        self.queues = ReadQueues([DISK, OTHER], now=lambda: self.now, limits=limits)

    def begin(
        self, size: int, *, session: int = 1, tier: int = DISK, reason: Reason = Reason.DEMAND, blocks: int = 8
    ) -> StructArray:
        """Begins a batch of `size` bytes."""
        batch = np.zeros(blocks, dtype=TRANSFER)
        batch["id"] = np.arange(blocks) + self.made + 1
        batch["source"]["tier"], batch["reason"] = tier, reason
        batch["source"]["length"] = size // blocks
        self.made += blocks
        self.queues.begin(batch, session=session)
        return batch

    def end(self, batch: StructArray, *, after_s: float) -> None:
        """Ends the batch."""
        self.now += after_s
        self.queues.end(batch)

    def shut(self, session: int = 9, *, timeout_s: float = 60.0, is_demand: bool = True) -> frozenset[int]:
        """The shut tiers for a caller without reads under way."""
        return self.queues.shut(session, timeout_s=timeout_s, is_demand=is_demand)


@pytest.fixture
def disk() -> Disk:
    """A disk whose measured rate is 40 MiB a second."""
    disk = Disk()
    for _ in range(50):
        disk.end(disk.begin(FORTY // 4), after_s=0.25)
    return disk


def test_an_idle_disk_is_open(disk: Disk) -> None:
    """An idle disk admits every caller, at any measured rate and any deadline."""
    assert disk.shut(timeout_s=0.001) == frozenset()


def test_a_long_queue_is_shut(disk: Disk) -> None:
    """A queue of more than two seconds is shut until it is shorter. Other disks stay open."""
    batches = [disk.begin(FORTY // 2, session=i) for i in range(5)]
    assert disk.shut() == {DISK}
    disk.begin(FORTY, tier=OTHER)
    assert disk.shut() == {DISK}
    for batch in batches[:2]:
        disk.end(batch, after_s=0.5)
    assert disk.shut() == frozenset()


def test_a_short_deadline_is_told_at_once(disk: Disk) -> None:
    """A caller with a short deadline is refused by a queue that others may join."""
    disk.begin(FORTY, session=1)
    assert disk.shut(timeout_s=1.5) == {DISK}
    assert disk.shut(timeout_s=3.0) == frozenset()


def test_no_session_fills_the_queue(disk: Disk) -> None:
    """A session whose reads take half of the queue gets no more; other sessions do."""
    disk.begin(FORTY + MIB, session=1)
    assert disk.shut(1) == {DISK}
    assert disk.shut(2) == frozenset()


def test_prefetches_wait_behind_demand(disk: Disk) -> None:
    """Prefetches get at most half of the queue, and never block a demand."""
    disk.begin(FORTY, session=1, reason=Reason.PREFETCH)
    disk.begin(FORTY // 4, session=2, reason=Reason.PREFETCH)
    assert disk.shut(3, timeout_s=math.inf, is_demand=False) == {DISK}
    assert disk.shut(3) == frozenset()


def test_a_disk_that_hangs_is_shut(disk: Disk) -> None:
    """A read that hangs for two seconds shuts its disk; the read's end opens it."""
    stuck = disk.begin(MIB)
    disk.now += 1.9
    assert disk.shut() == frozenset()
    disk.now += 0.2
    assert disk.shut() == {DISK}
    disk.end(stuck, after_s=10.0)
    assert disk.shut() == frozenset()


def test_bounded_before_anything_is_known() -> None:
    """A burst on a disk without a measured rate is bounded by the number of blocks."""
    disk = Disk()
    disk.begin(MIB, blocks=1000)
    assert disk.shut() == {DISK}


def test_what_does_not_read_a_disk_counts_nothing(disk: Disk) -> None:
    """Copies from memory do not count."""
    disk.end(disk.begin(FORTY * 10, tier=HOST), after_s=0.0)
    assert disk.queues.queued() == 0
    assert disk.shut() == frozenset()


def test_the_refusal_says_when(disk: Disk) -> None:
    """The retry hint grows with the queue, within its bounds."""
    disk.begin(FORTY * 2 + FORTY // 2)
    short = disk.queues.refusal([DISK]).retry_after_s
    disk.begin(FORTY * 20)
    long = disk.queues.refusal([DISK]).retry_after_s
    assert 0.05 <= short < long <= 2.0


def test_everything_is_forgotten_at_the_end(disk: Disk) -> None:
    """An idle queue keeps no counts."""
    for batch in [disk.begin(FORTY, session=i) for i in range(5)]:
        disk.end(batch, after_s=0.1)
    queue = disk.queues._queues[DISK]
    assert (queue.blocks, queue.bytes, queue.demand_bytes) == (0, 0, 0)
    assert (dict(queue.of_session), disk.queues._under_way) == ({}, {})


def test_a_queue_tells_its_pace(disk: Disk) -> None:
    """An idle disk has its measured pace and no wait, a busy one the wait for its demanded bytes."""
    idle = disk.queues.paces()
    assert idle.keys() == {DISK, OTHER}
    assert idle[DISK].bytes_per_s == pytest.approx(FORTY, rel=0.1) and idle[DISK].wait_s == 0.0
    disk.begin(2 * FORTY)
    assert disk.queues.paces()[DISK].wait_s == pytest.approx(2.0, rel=0.1)
    assert disk.queues.paces()[OTHER].wait_s == 0.0
