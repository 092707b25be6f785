"""How many stored tokens to load, so that the first token comes as early as possible.

A request's prefix lies in one or several tiers. Loading its first L tokens takes the longest of the
tiers' times, and then the copy into the engine's memory. The engine computes the others; it may be
busy until then. Loading and waiting for the engine overlap:

    first token at max(load(L), engine's wait) + prefill(L, prompt - L)

An engine that computes the first of n layers while later ones come waits for one layer alone:

    first token at max(max(load(L) / n, wait) + prefill, load(L) + prefill / n)

Every block boundary is a candidate, or MOST of them, evenly spread. The prefix costs less to load
than to compute, or not at all: then L is 0. A mixture is best if a slow tier holds the end of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.advisor.pace import Pace
from tierd.advisor.prefill import Prefill

MOST = 256
"""Candidates that are compared."""
BUSY_S = 0.01
"""A tier with a longer queue is not loaded from before the engine's steps are known."""
EVEN = 0.04
"""Loading is preferred if computing gains less than this share: it leaves the engine to others."""


@dataclass(frozen=True, slots=True)
class Run:
    """So many tokens of a prefix in one tier. pace: None: they cost nothing to bring near."""

    tokens: int
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request. computed: leading tokens that the engine has. bytes_per_token: of all ranks that
    one link carries. engine_wait_s: until the engine begins with it.

    layers: the engine waits for them one after another; 1: it waits for whole loads.
    """

    prompt: int
    computed: int
    tokens_per_block: int
    bytes_per_token: float
    engine_wait_s: float = 0.0
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Advice:
    """tokens: worth loading, beyond those that the engine has. first_token_s: expected with them.
    load_s: of that load. all_s, none_s: expected first token if all or none were loaded. Times are
    0 as long as nothing is known."""

    tokens: int
    first_token_s: float = 0.0
    load_s: float = 0.0
    all_s: float = 0.0
    none_s: float = 0.0


def advise(wanted: Wanted, runs: Sequence[Run], prefill: Prefill, *, copy: Pace | None = None) -> Advice:
    """Chooses how many of the tokens in `runs`, which follow the computed ones, to load.

    copy: from host memory into the engine's. At least one token of the prompt is left to compute.
    Until the engine's steps are known, tiers with a short queue are loaded whole, and others not at
    all. An engine that only loads would never learn.
    """
    usable = min(sum(run.tokens for run in runs), wanted.prompt - 1 - wanted.computed)
    blocks = max(0, usable) // wanted.tokens_per_block
    if not prefill.is_known:
        is_busy = any(run.pace is not None and run.pace.wait_s > BUSY_S for run in runs)
        return Advice(0 if is_busy else blocks * wanted.tokens_per_block)
    some = np.unique(np.linspace(0, blocks, min(blocks, MOST) + 1).round())
    tokens = some * wanted.tokens_per_block
    load_s = load_seconds(tokens, runs, wanted.bytes_per_token, copy)
    start = wanted.computed + tokens
    compute_s = prefill.seconds(start, wanted.prompt - start)
    begin_s = np.maximum(load_s / wanted.layers, wanted.engine_wait_s)
    first_s = np.maximum(begin_s + compute_s, load_s + compute_s / wanted.layers)
    good = first_s <= first_s.min() * (1 + EVEN)
    best = int(np.flatnonzero(good)[-1])
    return Advice(
        int(tokens[best]), float(first_s[best]), float(load_s[best]), all_s=float(first_s[-1]), none_s=float(first_s[0])
    )


def load_seconds(
    tokens: NDArray[np.float64], runs: Sequence[Run], bytes_per_token: float, copy: Pace | None
) -> NDArray[np.float64]:
    """Seconds to load the first `tokens` tokens: float64 [n]. Tiers are read at once.
    copy: as for `advise`."""
    of_tier: dict[Pace, NDArray[np.float64]] = {}
    first = 0
    for run in runs:
        if run.pace is not None:
            taken = np.clip(tokens - first, 0, run.tokens)
            of_tier[run.pace] = of_tier.get(run.pace, np.zeros(len(tokens))) + taken
        first += run.tokens
    far_s = np.zeros(len(tokens))
    for pace, taken in of_tier.items():
        far_s = np.maximum(far_s, _seconds(pace, taken * bytes_per_token))
    return far_s + (_seconds(copy, tokens * bytes_per_token) if copy is not None else 0.0)


def _seconds(pace: Pace, size: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.where(size > 0, pace.wait_s + pace.latency_s + size / pace.bytes_per_s, 0.0)
    return found
