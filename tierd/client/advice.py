"""An engine knows its own speed, and decides by it how much of a match it loads.

Every integration reports its steps and its copies here, and asks `EngineAdvice.claim` how many
tokens of a match to load. `tierd.advisor` decides.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tierd.advisor.advice import Advice, Run, Wanted, advise, load_seconds
from tierd.advisor.pace import PaceMeter
from tierd.advisor.prefill import Prefill
from tierd.client.match import Match, claim
from tierd.client.values import Found

UNTOLD = 32
"""Copies, and decisions, that are kept until somebody takes them."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """An engine's blocks. group: of the lookup, whose blocks have tokens_per_block tokens.
    step_tokens: what is loaded is a multiple of it. bytes_per_token: of all groups and ranks.
    least_tokens: smaller loads are not worth it. layers: as in `Wanted`."""

    tokens_per_block: int
    bytes_per_token: float
    group: int = 0
    step_tokens: int = 0
    least_tokens: int = 0
    layers: int = 1


class Computed(NamedTuple):
    """Tokens of a request that were found and not loaded, and the expected times of both ways."""

    request: str
    tokens: int
    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """tokens: to load beyond the computed ones. advice: None if nothing was decided. load_s: expected
    time of the load. compute_s: expected time to compute these tokens; 0: not known."""

    tokens: int
    advice: Advice | None = None
    load_s: float = 0.0
    compute_s: float = 0.0


NOTHING = Claim(0)


class EngineAdvice:
    """One engine's. Threads may share it. is_on: else every match is loaded."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on, self._lock = is_on, threading.Lock()
        self._prefill, self._copies = Prefill(), PaceMeter()
        self._untold: deque[tuple[int, float]] = deque(maxlen=UNTOLD)
        self._counts: Counter[str] = Counter()
        self._is_doubtful = False
        self._computed: deque[Computed] = deque(maxlen=UNTOLD)
        self._last_computed: Computed | None = None

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
        if not most:
            return NOTHING
        runs = _runs(found, blocks, match.computed, most)
        wanted = Wanted(match.prompt, match.computed, step, blocks.bytes_per_token, layers=blocks.layers)
        with self._lock:
            advice = advise(wanted, runs, self._prefill, copy=self._copies.pace()) if self._is_on else None
            tokens = most if advice is None else advice.tokens if advice.tokens >= max(1, least) else 0
            if any(run.pace is not None for run in runs):
                self._is_doubtful = tokens < most
            if advice is not None:
                self._counts["advised_loads" if tokens else "advised_computes"] += 1
                self._counts["advised_compute_tokens"] += most - tokens
                self._keep(self._expected(Claim(most), runs, wanted), most - tokens, match.request)
            return self._expected(Claim(tokens, advice), runs, wanted)

    @property
    def is_doubtful(self) -> bool:
        """Whether the latest match with tokens on a store was not loaded whole. Then a lookup should
        not start to read before the engine has decided."""
        return self._is_doubtful

    def loaded(self, claimed: Claim, seconds: float) -> None:
        """A load took so long. Counts by how much computing its tokens was expected to be faster."""
        if claimed.advice is not None and claimed.compute_s > 0:
            with self._lock:
                self._counts["regret_us"] += max(0, int(1e6 * (seconds - claimed.compute_s)))

    def loaded_tokens(self, tokens: int, seconds: float) -> None:
        """As `loaded`, for an engine that loads in other parts than it claims."""
        with self._lock:
            if self._is_on and self._prefill.is_known:
                compute_s = float(self._prefill.seconds(np.zeros(1), np.array([float(tokens)]))[0])
                self._counts["regret_us"] += max(0, int(1e6 * (seconds - compute_s)))

    def _expected(self, claimed: Claim, runs: list[Run], wanted: Wanted) -> Claim:
        """The claim with its expected times."""
        tokens, start = np.array([float(claimed.tokens)]), np.array([float(wanted.computed)])
        load_s = float(load_seconds(tokens, runs, wanted.bytes_per_token, self._copies.pace())[0])
        compute_s = float(self._prefill.seconds(start, tokens)[0]) if self._prefill.is_known else 0.0
        return replace(claimed, load_s=load_s, compute_s=compute_s)

    def _keep(self, whole: Claim, tokens: int, request: str) -> None:
        """Keeps a decision against loading, once for calls that an engine repeats in each step."""
        computed = Computed(request, tokens, whole.load_s, whole.compute_s)
        last, self._last_computed = self._last_computed, computed
        if tokens and (last is None or last[:2] != computed[:2]):
            self._computed.append(computed)

    def take_computed(self) -> list[Computed]:
        """Decisions against loading since the last call, for `Client.note_computed`."""
        with self._lock:
            taken, self._computed = list(self._computed), deque(maxlen=UNTOLD)
        return taken

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
