"""Hits of a trace, counted by the daemon's own core and policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierd.config import Config
from tierd.core.formats.model import TierKind
from tierd.plan.plan import GIB, MOST_NVME
from tierd.plan.traffic import Traffic
from tierd.simulator.choices import parse_choice
from tierd.simulator.rows import Row, row_of
from tierd.simulator.runs import Scenario, simulate_all
from tierd.simulator.sequences import Measure, Trace
from tierd.simulator.sizes import Size, tiers_of

OUTPUT = 400.0
"""Mean tokens of an answer; traces do not hold them."""


def traffic_of(trace: Trace) -> Traffic:
    """Mean prompt and rate of a trace."""
    span = float(trace.times_s[-1] - trace.times_s[0]) if len(trace) > 1 else 1.0
    return Traffic(trace.name, trace.prompt_tokens / max(1, len(trace)), OUTPUT, len(trace) / max(span, 1.0))


class TraceHits:
    """Hits of a trace under the daemon's policies. One tier of each size is simulated at once."""

    def __init__(self, trace: Trace, token_bytes: float, *, show: Callable[[int], None] = lambda _: None) -> None:
        """token_bytes: of a stored token. show: is called with the number of requests done."""
        self._trace, self._token_bytes = trace, token_bytes
        self._block_bytes = round(token_bytes * int(trace.full_tokens[0]))
        sizes = self._sizes()
        rows = self._simulate([{TierKind.HOST: size} for size in sizes], show)
        self._tokens = [float(trace.full_tokens[0]), *(size / token_bytes for size in sizes)]
        self._shares = [0.0, *(row["prefix_token_hit"] for row in rows)]  # one block brings nothing

    def of(self, tokens: float) -> float:
        """As `Hits`; between two sizes by the logarithm."""
        if not tokens:
            return 0.0
        return float(np.interp(np.log(tokens), np.log(self._tokens), self._shares, left=0.0))

    def split(self, host: int, nvme: int) -> tuple[float, float]:
        """As `Hits`: what `tierctl simulate` gives for these two tiers."""
        sizes = {kind: size for kind, size in ((TierKind.HOST, host), (TierKind.NVME, nvme)) if size}
        if not sizes:
            return 0.0, 0.0
        (row,) = self._simulate([sizes], lambda _: None)
        return row["host_hit"], row["nvme_hit"]

    @staticmethod
    def runs(trace: Trace, token_bytes: float) -> int:
        """How many simulations its constructor makes."""
        return len(_sizes(trace, token_bytes))

    def _sizes(self) -> list[int]:
        return _sizes(self._trace, self._token_bytes)

    def _simulate(self, sizes: Sequence[Mapping[TierKind, int]], show: Callable[[int], None]) -> list[Row]:
        measure = Measure(self._block_bytes)
        runs = []
        for one in sizes:
            asked = {kind: Size(str(size), bytes=size) for kind, size in one.items()}
            tiers = tiers_of(
                asked, distinct=self._trace.distinct, longest=self._trace.longest, measure=measure, config=Config()
            )
            runs.append(Scenario(0, parse_choice("default"), tiers))
        outcomes = simulate_all([self._trace], runs, jobs=len(os.sched_getaffinity(0)), show=show)
        return [row_of(self._trace, run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]


def _sizes(trace: Trace, token_bytes: float) -> list[int]:
    """Powers of two of bytes, from 16 GiB up to the first that holds all blocks."""
    whole = trace.distinct * int(trace.full_tokens[0]) * token_bytes
    sizes = [16 * GIB]
    while sizes[-1] < min(whole, MOST_NVME):
        sizes.append(2 * sizes[-1])
    return sizes
