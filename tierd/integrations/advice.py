"""An engine knows its own speed, and decides by it how much of a match it loads.

Every integration reports its steps and its copies here, and asks `EngineAdvice.claim` how many
tokens of a match to load. `tierd.advisor` decides.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tierd.advisor.advice import Advice, Run, Wanted, advise
from tierd.advisor.pace import PaceMeter
from tierd.advisor.prefill import Prefill
from tierd.client import Found
from tierd.integrations.match import Match, claim

UNTOLD = 32
"""Copies that are kept until somebody takes them."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """An engine's blocks. group: of the lookup, whose blocks have tokens_per_block tokens.
    step_tokens: what is loaded is a multiple of it. bytes_per_token: of all groups and ranks.
    least_tokens: smaller loads are not worth it."""

    tokens_per_block: int
    bytes_per_token: float
    group: int = 0
    step_tokens: int = 0
    least_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """tokens: to load beyond the computed ones. advice: None if nothing was decided."""

    tokens: int
    advice: Advice | None = None


NOTHING = Claim(0)


class EngineAdvice:
    """One engine's. Threads may share it. is_on: else every match is loaded."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on, self._lock = is_on, threading.Lock()
        self._prefill, self._copies = Prefill(), PaceMeter()
        self._untold: deque[tuple[int, float]] = deque(maxlen=UNTOLD)
        self._counts: Counter[str] = Counter()

    def computed(self, parts: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step took so long. parts: of each request, the tokens before and those computed."""
        with self._lock:
            self._prefill.observe(parts, seconds)

    def copied(self, size: int, seconds: float) -> None:
        """Bytes were copied from near pages into the engine's memory."""
        with self._lock:
            self._copies.observe(size, seconds)
            self._untold.append((size, seconds))

    def take_copies(self) -> tuple[tuple[int, float], ...]:
        """The latest copies since the last call, for the process that decides: (bytes, seconds)."""
        with self._lock:
            copies = tuple(self._untold)
            self._untold.clear()
        return copies

    def claim(self, match: Match, found: Found, blocks: Blocks) -> Claim:
        """Tokens beyond the computed ones that are worth loading."""
        step, least = blocks.step_tokens or blocks.tokens_per_block, blocks.least_tokens
        most = claim(match, tokens_per_block=step, least_tokens=least)
        if not most or not self._is_on:
            return Claim(most)
        runs = _runs(found, blocks, match.computed, most)
        wanted = Wanted(match.prompt, match.computed, step, blocks.bytes_per_token)
        with self._lock:
            advice = advise(wanted, runs, self._prefill, copy=self._copies.pace())
            tokens = advice.tokens if advice.tokens >= max(1, least) else 0
            self._counts["advised_loads" if tokens else "advised_computes"] += 1
            self._counts["advised_compute_tokens"] += most - tokens
        return Claim(tokens, advice)

    def loaded(self, claimed: Claim, seconds: float) -> None:
        """A load took so long. Counts by how much computing was expected to be faster."""
        advice = claimed.advice
        if advice is not None and advice.none_s > 0:
            first_s = advice.first_token_s - advice.load_s + seconds
            with self._lock:
                self._counts["regret_us"] += max(0, int(1e6 * (first_s - advice.none_s)))

    def take_counts(self) -> Counter[str]:
        """Counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


def _runs(found: Found, blocks: Blocks, computed: int, most: int) -> list[Run]:
    """The tokens after the computed ones, by tier."""
    size, tiers = blocks.tokens_per_block, list[int]()
    if blocks.group < len(found.tier_of):
        tiers = np.max(found.tier_of[blocks.group], axis=0)[computed // size : (computed + most) // size].tolist()
    out = []
    for tier, each in groupby(tiers):
        pace = found.paces[tier] if 0 <= tier < len(found.paces) else None
        out.append(Run(len(list(each)) * size, pace))
    left = most - sum(run.tokens for run in out)
    return [*out, Run(left)] if left > 0 else out
