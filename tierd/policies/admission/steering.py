"""The threshold that a wear budget affords: the best of the blocks that are asked for, no more.

A controller: from the stream of chances and a budget's rate and level it computes the least chance
to admit. The learner gives the chances; budget.py refuses blocks that the level cannot pay.

Bytes asked for are counted by chance in BINS bins, and fade with MEMORY_S. So the counts over their
span are a rate for each bin. The threshold lies where the rates from the best bin down add up to

    rate x level / reserve,    reserve = rate x (the span / SPANS_PER_RESERVE, within bounds)

That is the refill rate when the level equals the reserve. A higher level is spent, a lower one
saved. If the rates are wrong by a factor e, the level settles at reserve / e and does not run dry.
If the budget covers all demand, the threshold is 0. The reserve grows with the span seen. So a
young daemon spends its level at once, an old one saves a quiet night's refill.

In the bin of the threshold only a share is admitted. CacheLib's DynamicRandomAP also steers by the
daily write budget, but admits a random share, not the best (B. Berg et al., "The CacheLib Caching
Engine", OSDI 2020, section 4.3).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierd.core.admission import Sizes
from tierd.policies.admission.budget import Budget

Chances = NDArray[np.float64]

BINS = 1024
MEMORY_S = 86400.0
"""A day and its night."""
SPANS_PER_RESERVE = 128.0
LEAST_RESERVE_S = 10.0
RESERVE_SHARE = 0.25
"""The largest reserve, as a share of the burst."""


class Steering:
    """budget: the one to meet."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._asked_bytes = np.zeros(BINS)
        self._span_s = 0.0
        self._at: float | None = None
        self.price = 0.0
        """The threshold of the last call."""

    def shares(self, chances: Chances, sizes_bytes: Sizes, now: float) -> Chances:
        """The share of blocks like each to admit now, 0 to 1; 1 without a budget."""
        shares = np.ones(len(chances))
        if self._budget and len(chances):
            bins = np.minimum((chances * BINS).astype(np.int64), BINS - 1)
            self._note(bins, sizes_bytes, now)
            edge, share = self._edge(now)
            self.price = edge / BINS
            shares[bins < edge] = 0.0
            shares[bins == edge] = share
        return shares

    def threshold(self, now: float) -> float:
        """The least chance that is admitted now."""
        return self._edge(now)[0] / BINS

    def _note(self, bins: NDArray[np.int64], sizes_bytes: Sizes, now: float) -> None:
        gone_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept = math.exp(-gone_s / MEMORY_S)
        self._asked_bytes *= kept
        self._span_s = self._span_s * kept + gone_s
        np.add.at(self._asked_bytes, bins, sizes_bytes)

    def _edge(self, now: float) -> tuple[int, float]:
        """The bin of the threshold, and which share of its bytes is admitted."""
        span_s = max(self._span_s, LEAST_RESERVE_S)
        budget = self._budget
        reserve_s = max(LEAST_RESERVE_S, min(span_s / SPANS_PER_RESERVE, RESERVE_SHARE * budget.burst_s))
        affordable = budget.level(now) / reserve_s * span_s
        above = np.cumsum(self._asked_bytes[::-1])[::-1]
        edge = int(np.searchsorted(-above, -affordable, side="left")) - 1
        if edge < 0:
            return 0, 1.0
        beyond = float(above[edge + 1]) if edge + 1 < BINS else 0.0
        return edge, min(1.0, max(0.0, affordable - beyond) / max(float(self._asked_bytes[edge]), 1.0))
