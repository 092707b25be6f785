"""The protocol of token policies, and the selection that they share.

A policy belongs to one layer of one sequence. It works on slots: the tokens that the sequence still
holds, oldest first. Each kv head keeps other tokens, all heads equally many. Prompts are computed
exactly; a policy acts on decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument

EVERY = 1 << 62
"""As `TokenPolicy.queries`: all of the prompt."""


@dataclass(frozen=True, slots=True)
class Budget:
    """fraction: of the prompt's tokens, decoded ones are kept. tokens: so many of all tokens
    instead, if it is not 0."""

    fraction: float
    tokens: int = 0

    def of(self, seen: int, *, prompt: int, least: int = 1) -> int:
        """Tokens to keep of `seen`: at least `least`, at most all. It never falls while `seen` rises."""
        kept = self.tokens or round(self.fraction * prompt) + seen - prompt
        return min(seen, max(least, kept))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a policy. prompt: tokens of the sequence's prompt. page_tokens: of a page."""

    layer: int
    kv_heads: int
    prompt: int
    page_tokens: int

    @property
    def full_pages(self) -> int:
        """Pages with tokens of the prompt alone."""
        return self.prompt // self.page_tokens


class TokenPolicy:
    """The protocol; by itself it keeps and reads every token.

    queries: the last queries of the prompt whose attention `note` takes.
    notes_decoding: `note` takes that of decoded tokens too.
    sinks: first tokens whose keys follow the window, so that their distance to it never grows.
    least: tokens to keep at least. reads_pages: `read` may choose.
    """

    queries: int = 0
    notes_decoding: bool = False
    sinks: int = 0
    least: int = 1
    reads_pages: bool = False

    def __init__(self, budget: Budget, place: Place) -> None:
        self.budget, self.place = budget, place

    def note(self, weights: NDArray[np.floating]) -> None:
        """Takes attention weights [kv_heads, slots], summed over queries and the query heads of a group."""

    def keep(self, held: int, seen: int) -> NDArray[np.int64] | None:
        """Slots to keep, [kv_heads, n], rising, when `held` of `seen` tokens are held; None: all."""
        return None

    def read(self, q: NDArray[np.floating], bounds: NDArray[np.float32], pages: int) -> list[Sequence[int]] | None:
        """Pages of the first `pages` that one query reads, per kv head; None: all.

        q: [q_heads, head_dim], scaled. bounds: of the pages before the query's own, as `bounds_of`
        gives them.
        """
        return None


class ReadingPolicy(TokenPolicy):
    """Drops nothing. Of the prompt's full pages it reads as many as hold the budget; of others all."""

    reads_pages = True

    def read(self, q: NDArray[np.floating], bounds: NDArray[np.float32], pages: int) -> list[Sequence[int]] | None:
        """The pages with the greatest scores, and those with decoded tokens."""
        full = self.place.full_pages
        count = -(-self.budget.of(self.place.prompt, prompt=self.place.prompt) // self.place.page_tokens)
        if count >= full:
            return None
        chosen: list[list[int]] = top(self.scores_of(q, bounds)[:, :full], count).tolist()
        return [[*some, *range(full, pages)] for some in chosen]

    def scores_of(self, q: NDArray[np.floating], bounds: NDArray[np.float32]) -> NDArray[np.floating]:
        """Scores [kv_heads, pages with bounds] of the pages for one query."""
        raise NotImplementedError


class ScoringPolicy(TokenPolicy):
    """Keeps the sum of what it noted for each token that is held: `scores`, [kv_heads, slots]."""

    def __init__(self, budget: Budget, place: Place) -> None:
        super().__init__(budget, place)
        self.scores = np.zeros((place.kv_heads, 0))

    def note(self, weights: NDArray[np.floating]) -> None:
        """Adds the weights; a token that was not there before begins with 0."""
        self._extend(weights.shape[1])
        self.scores[:, : weights.shape[1]] += weights

    def _extend(self, slots: int) -> None:
        missing = max(0, slots - self.scores.shape[1])
        self.scores = np.pad(self.scores, ((0, 0), (0, missing)))

    def _kept(self, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """These slots; the scores of others are gone."""
        self.scores = np.take_along_axis(self.scores, kept, axis=1)
        return kept


def top(scores: NDArray[np.floating], count: int, *, first: int = 0, last: int = 0) -> NDArray[np.int64]:
    """The `count` greatest of each row of scores [rows, n], as rising ordinals [rows, count].

    The `first` and `last` ones of a row are always among them. Of equal scores the lower ordinal
    wins; NaN is the least. Raises InvalidArgument if count is below first + last, or above n.
    """
    n = scores.shape[1]
    if not min(n, first + last) <= count <= n:
        raise InvalidArgument(f"top: {count} of {n} with {first} first and {last} last ones; give between these")
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-ranked, axis=1, kind="stable")
    is_free = (order >= first) & (order < n - last)
    fixed_first = np.argsort(is_free, axis=1, kind="stable")
    chosen = np.take_along_axis(order, fixed_first, axis=1)[:, :count]
    return np.sort(chosen, axis=1).astype(np.int64)
