"""Numbers for granules, and a CLOCK that moves its hand slot by slot."""

from __future__ import annotations

from typing import Any

import numpy as np


def exact_numbers(shape: tuple[int, ...], seed: int) -> Any:
    """float32 [shape]: numbers with few bits, so that sums of products are exact in any order."""
    return np.random.default_rng(seed).integers(-16, 17, shape).astype(np.float32) / 8


def draw_chosen(rng: np.random.Generator, heads: int, granules: int, count: int) -> Any:
    """int32 [heads, count]: distinct granules, rising, low ones more often."""
    weights = 1.0 / np.arange(1, granules + 1)
    each = [rng.choice(granules, count, replace=False, p=weights / weights.sum()) for _ in range(heads)]
    return np.sort(np.array(each, np.int32).reshape(heads, count), axis=1)


class Clock:
    """One kv head's hot slots, as `HotBuffer` describes them."""

    def __init__(self, slots: int) -> None:
        self.owners: list[int | None] = [None] * slots
        self.used = [False] * slots
        self.hand = 0

    def step(self, chosen: list[int]) -> tuple[list[int], list[bool]]:
        """The slots of the chosen granules, and which are misses."""
        kept = {self.owners.index(granule) for granule in chosen if granule in self.owners}
        is_miss = [granule not in self.owners for granule in chosen]
        for granule, misses in zip(chosen, is_miss, strict=True):
            if misses:
                kept.add(slot := self._victim(kept))
                self.owners[slot] = granule
        for slot in kept:
            self.used[slot] = True
        return [self.owners.index(granule) for granule in chosen], is_miss

    def _victim(self, kept: set[int]) -> int:
        while True:
            slot, self.hand = self.hand, (self.hand + 1) % len(self.owners)
            if slot in kept:
                continue
            if not self.used[slot]:
                return slot
            self.used[slot] = False
