"""Faults that last for a while, and their effects on the disk, memory and threads.

Purpose: `Weather`. Non-purpose: faults that happen once (events.py). Invariants: a fault that is
off strikes nobody; `clear` turns all faults off.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.sim.disk import DiskFaults, SimDisk
from tests.sim.loop import Pace

ON_DISK: Mapping[str, tuple[str, float]] = {
    "read_fails": ("read_error", 0.4),
    "write_fails": ("write_error", 0.3),
    "sync_fails": ("failed_sync", 0.5),
    "disk_full": ("no_space", 0.5),
    "read_flips_bit": ("read_flipped", 0.3),
    "read_is_stale": ("read_stale", 0.5),
    "read_is_misdirected": ("read_misdirected", 0.4),
    "write_flips_bit": ("write_flipped", 0.3),
    "write_is_torn": ("write_torn", 0.3),
    "write_is_lost": ("write_lost", 0.3),
    "write_is_misdirected": ("write_misdirected", 0.3),
}
"""A script's fault -> the disk's fault, and its chance while it is on."""

NO_FAULTS = DiskFaults()
CPU_S, DISK_S = 2e-4, 5e-4
"""Mean times of work: hashing and copying, and a call to the disk."""


class Weather:
    """One per simulation. struck: how often each fault struck, but for the disk's own."""

    def __init__(self, rng: random.Random, disk: SimDisk, *, now: Callable[[], float]) -> None:
        self.struck: Counter[str] = Counter()
        self._rng, self._disk, self._now = rng, disk, now
        self._until: dict[str, float] = {}

    def begin(self, fault: str, lasts_s: float) -> None:
        """Turns a fault on for lasts_s."""
        self._until[fault] = self._now() + lasts_s
        self._reach_disk()

    def clear(self) -> None:
        """Turns all faults off."""
        self._until.clear()
        self._reach_disk()

    def strikes(self, fault: str, chance: float) -> bool:
        """Whether a fault is on and strikes this caller."""
        if self._until.get(fault, 0.0) <= self._now() or self._rng.random() >= chance:
            return False
        self.struck[fault] += 1
        return True

    def totals(self) -> Counter[str]:
        """How often each fault of a script has struck."""
        on_disk = {fault: self._disk.hits[name] for fault, (name, _) in ON_DISK.items()}
        return self.struck + Counter(on_disk)

    def pace(self, work: Callable[..., Any]) -> Pace:
        """The duration of work in a thread, and the moment at which its bytes move."""
        self._reach_disk()
        moves_at = self._rng.choice((0.0, 1.0, self._rng.random()))
        if getattr(work, "__module__", "") == "tierd.mover":
            return Pace(self._rng.expovariate(1 / CPU_S), moves_at)
        delay_s = self._rng.expovariate(1 / DISK_S)
        if self.strikes("disk_slow", 0.7):
            delay_s += self._rng.uniform(0.02, 0.8)
        if self.strikes("disk_hangs", 0.3):
            delay_s += self._rng.uniform(3, 12)
        return Pace(delay_s, moves_at)

    def _reach_disk(self) -> None:
        if not self._until and self._disk.faults is NO_FAULTS:
            return
        chances = {
            name: chance for fault, (name, chance) in ON_DISK.items() if self._until.get(fault, 0.0) > self._now()
        }
        self._disk.faults = replace(NO_FAULTS, **chances) if chances else NO_FAULTS  # type: ignore[arg-type]
