"""Estimator: simulates the daemon's tiers at several sizes on a sample of its requests.

Each factor has a miniature for each order of eviction: LRU, and the order by worth if a tier uses
it. The daemon decides between these two by which finds more (policies/eviction/duel.py), so the
better one counts. The last factor has no limit: it holds every block of the sample that is known.

Shares follow from misses: 1 - sampled misses / (rate * tokens asked). Hot blocks are few, and a
sample may lack them, but they are hits at any size. SHARDS_adj corrects for the same
(C. Waldspurger et al., FAST 2015, section 3.4). A request hits until its first sampled block that
misses.

ROWS bounds the memory and SAMPLED_PER_MINUTE the work: what would exceed them
halves the rate. The rate rises again after an hour with little work.
Requests wait for a batch, since policies take many blocks for the cost of one. All times are of the
daemon's clock, so equal requests give equal estimates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierd.ceiling.miniature import Miniature, Order
from tierd.ceiling.sample import Sample, mixed
from tierd.ceiling.windows import WINDOWS_S, Windows
from tierd.core.arrays.sets import firsts
from tierd.core.eviction import Ids
from tierd.core.index.blocks import Blocks, Names, words
from tierd.core.plan import GroupQuery
from tierd.policies.eviction.lru import Lru
from tierd.policies.eviction.reuse_index import ReuseIndex
from tierd.policies.reuse import Traffic
from tierd.policies.reuse.features import NOTHING

FACTORS = (0.5, 1.0, 2.0, 4.0, math.inf)
ROWS = 1 << 15
"""Blocks of the sample at most."""
ROW_BYTES = 800
"""Memory for each, with its state in all miniatures."""
HELD = 1 << 14
"""Blocks that the largest miniature holds at most."""
LEAST_HELD, LEAST_SAMPLED = 32, 100
"""A miniature of the daemon's own size says nothing if it holds fewer blocks: of all, of a sample."""
SAMPLED_PER_MINUTE = 12_000
"""So many are also the most of one request."""
RISE_MINUTES = 60
"""After so many minutes with a quarter of the work the rate doubles."""
BATCH, LEAST_BATCH, BATCH_PART = 128, 32, 16
"""A batch is 1 in so many of the blocks that the smallest miniature holds, within the two."""


@dataclass(frozen=True, slots=True)
class Level:
    """The tiers of one distance.

    is_store: short blocks never go there. by_worth: the reuse index evicts.
    grows: the factors apply.
    copied: the share of its blocks that the next level has too.
    """

    is_store: bool
    by_worth: bool
    grows: bool
    copied: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """A window's result. tokens: asked for. by_factor: share of them served, as FACTORS; empty
    without requests. measured: the daemon's own share."""

    seconds: float
    covered_s: float
    tokens: int
    measured: float
    by_factor: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's sampled blocks, first to last; all arrays [n].

    mixed: of their hashes, with the namespace in the low bits. names: as the learner has them.
    """

    at_s: float
    mixed: NDArray[np.uint64]
    tokens: NDArray[np.int64]
    is_short: NDArray[np.bool_]
    names: Names

    def at(self, rows: Ids) -> _Asked:
        """Some of them."""
        return _Asked(self.at_s, self.mixed[rows], self.tokens[rows], self.is_short[rows], self.names.at(rows))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Several requests' sampled blocks as rows of the sample; arrays [n].

    request: the number of each block's request. begins: where each request begins. again: used
    earlier in the batch.
    """

    rows: Ids
    tokens: NDArray[np.int64]
    request: Ids
    begins: Ids
    again: NDArray[np.bool_]

    def missed(self, held: NDArray[np.bool_]) -> int:
        """Tokens from each request's first block that is neither held nor used again."""
        away = ~(held | self.again)
        before = np.cumsum(away)
        is_hit: NDArray[np.bool_] = before == (before - away)[self.begins][self.request]
        return int(self.tokens[~is_hit].sum())

    def used(self) -> Ids:
        """The rows, each once, last use last; of a request the last block first."""
        order = np.lexsort((-np.arange(len(self.rows)), self.request))
        return firsts(self.rows[order][::-1])[::-1]


class Estimator:
    """See the module."""

    def __init__(self, levels: Sequence[Level], traffic: Traffic | None, now: float) -> None:
        """levels: near to far. traffic: has the groups and worths of blocks; None: no tier uses it."""
        self.sample = Sample(ROWS)
        self._levels, self._traffic, self._blocks = levels, traffic, [0.0 for _ in levels]
        by_worth = traffic is not None and any(level.by_worth for level in levels)
        self._orders = (False, True) if by_worth else (False,)
        self._miniatures = [[self._miniature(by_worth=order) for order in self._orders] for _ in FACTORS[:-1]]
        self._known = Lru(cast(Blocks, self.sample))
        self._windows = Windows(3 + len(FACTORS) * len(self._orders), now)
        self._tokens, self._waiting, self._count, self._batch_size = 0, deque[_Asked](), 0, LEAST_BATCH
        self._minute, self._in_minute, self._busy, self._rose = -1, 0, 0, -RISE_MINUTES - 1

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.sample) * ROW_BYTES + self._windows.bytes

    @property
    def rate(self) -> float:
        """The share of the blocks that is in the sample."""
        return 1 / (1 << self.sample.bits)

    @property
    def held(self) -> float:
        """Blocks that the miniature of the daemon's own size holds."""
        return sum(self._blocks) * self.rate

    @property
    def is_blind(self) -> bool:
        """Whether the rate fell so low that the sample says nothing. Requests then do not count."""
        return self.sample.bits > 0 and self.held < LEAST_SAMPLED

    @property
    def waits(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a whole batch waits."""
        return self._count >= self._batch_size

    def resize(self, blocks: Sequence[float]) -> None:
        """Sets how many blocks each level holds; not between two `steps` of one batch."""
        self._blocks = list(blocks)
        while sum(self._sizes(FACTORS[-2])) > HELD:
            self._thin()
        for factor, miniatures in zip(FACTORS, self._miniatures, strict=False):
            for miniature in miniatures:
                miniature.sizes = [round(size) for size in self._sizes(factor)]
        least = sum(self._sizes(FACTORS[0]))
        self._batch_size = max(LEAST_BATCH, min(BATCH, int(least) // BATCH_PART))

    def ask(self, requests: Sequence[GroupQuery], at_s: Sequence[float]) -> None:
        """Requests have come, at these times. Many together cost hardly more than one."""
        counts = [len(request.hashes) for request in requests]
        names = mixed(np.concatenate([words(request.hashes)[:, 0] for request in requests]))
        chosen = self.sample.chosen(names)
        if self.is_blind:
            self._limit_work(int(at_s[-1] // 60), len(chosen))
            return
        self._tokens += sum(request.tokens for request in requests)
        self._count += len(chosen)
        ends = np.cumsum(counts)
        numbers = ends.searchsorted(chosen, side="right")
        for number in dict.fromkeys(numbers.tolist()):
            request, at = requests[number], chosen[numbers == number]
            place, space = at - (int(ends[number]) - counts[number]), np.uint64(request.namespaces[0])
            tokens = np.minimum(request.tokens - place * request.tokens_per_block, request.tokens_per_block)
            known = Names(np.full(len(at), space, np.uint32), words(request.hashes)[place])
            is_short = tokens < request.tokens_per_block
            self._waiting.append(_Asked(at_s[number], names[at] ^ space, tokens, is_short, known))

    def measured(self, hit: int, asked: int, now: float) -> None:
        """The daemon has served so many more tokens, of so many more asked for."""
        self._add([0, hit, asked], now)

    def steps(self, now: float) -> Iterator[None]:
        """Works on one batch of the requests that wait. Other calls may come between two steps."""
        asked, tokens, self._tokens = self._taken(), self._tokens, 0
        if self.is_blind:
            asked, tokens = [], 0
        misses = np.zeros((len(FACTORS), len(self._orders)))
        if asked:
            now = asked[-1].at_s
            batch, misses[-1] = self._batch(asked)
            used = batch.used()
            for factor, miniatures in enumerate(self._miniatures):
                for order, miniature in enumerate(miniatures):
                    misses[factor, order] = batch.missed(miniature.has(batch.rows))
                    miniature.use(used, now)
                yield
            self._forget_old()
        self._add([tokens, 0, 0, *(misses * (1 << self._counted_bits)).ravel()], now)

    def shares(self, now: float) -> list[Shares]:
        """The result of each window."""
        return [self._shares(seconds, now) for seconds in WINDOWS_S]

    # -- inside

    def _miniature(self, *, by_worth: bool) -> Miniature:
        return Miniature(
            self.sample,
            [self._order(by_worth=by_worth and level.by_worth) for level in self._levels],
            stores=[level.is_store for level in self._levels],
        )

    def _order(self, *, by_worth: bool) -> Order:
        blocks = cast(Blocks, self.sample)
        return ReuseIndex(blocks, self._traffic) if by_worth and self._traffic else Lru(blocks)

    def _sizes(self, factor: float) -> list[float]:
        """Blocks of the sample that each level holds at a factor, without copies of those before."""
        sizes, copies = list[float](), 0.0
        for level, blocks in zip(self._levels, self._blocks, strict=True):
            size = blocks * self.rate * (factor if level.grows else 1.0)
            sizes.append(max(0.0, size - copies))
            copies = level.copied * size
        return sizes

    def _thin(self) -> None:
        gone = self.sample.thin()
        self._drop(gone[self._known.has(gone)])

    def _drop(self, rows: Ids) -> None:
        for miniatures in self._miniatures:
            for miniature in miniatures:
                miniature.forget(rows)
        self._known.forget(rows)
        self.sample.drop(rows)

    def _taken(self) -> list[_Asked]:
        """The requests of a batch, less what a thinner sample lacks."""
        taken, count = list[_Asked](), 0
        while self._waiting and count < self._batch_size:
            taken.append(self._waiting.popleft())
            count += len(taken[-1].mixed)
        self._count -= count
        if taken:
            self._limit_work(int(taken[-1].at_s // 60), count)
        left = [asked.at(self.sample.chosen(asked.mixed)) for asked in taken]
        return [asked for asked in left if len(asked.mixed)]

    def _limit_work(self, minute: int, count: int) -> None:
        """Halves the rate while this many blocks more are too many for the minute. Doubles it after
        RISE_MINUTES with a quarter of that."""
        self._in_minute = count + (self._in_minute if minute == self._minute else 0)
        self._minute = minute
        while self._in_minute > SAMPLED_PER_MINUTE:
            self._thin()
            self._in_minute, self._rose = self._in_minute // 2, minute - RISE_MINUTES
        if self._in_minute > SAMPLED_PER_MINUTE // 4:
            self._busy = minute
        elif self._may_rise:
            self.sample.bits, self._rose = self.sample.bits - 1, minute
        self.resize(self._blocks)

    @property
    def _may_rise(self) -> bool:
        has_room = self.sample.bits and 2 * sum(self._sizes(FACTORS[-2])) <= HELD
        return bool(has_room and self._minute - max(self._busy, self._rose) >= RISE_MINUTES)

    @property
    def _counted_bits(self) -> int:
        """Of the blocks that count: those that a rise brought know no past until RISE_MINUTES later."""
        return self.sample.bits + (self._minute - self._rose < RISE_MINUTES)

    def _batch(self, asked: Sequence[_Asked]) -> tuple[_Batch, int]:
        """The requests as one batch, and the tokens that miss although all known blocks are held."""
        sizes, now = [len(one.mixed) for one in asked], asked[-1].at_s
        names = np.concatenate([one.mixed for one in asked])
        rows, known = self.sample.rows(names)
        tokens, is_short = (np.concatenate([getattr(one, name) for one in asked]) for name in ("tokens", "is_short"))
        self.sample.last_used[rows] = np.repeat([one.at_s for one in asked], sizes)
        self.sample.is_short[rows] = is_short
        if self._traffic:
            spaces, hashes = (
                np.concatenate([getattr(one.names, name) for one in asked]) for name in ("namespace", "hash")
            )
            groups = self._traffic.groups_of(Names(spaces, hashes))
            self.sample.group[rows] = np.where(is_short, NOTHING + 1, groups)
        self._known.track(rows[~known], now)
        again = np.ones(len(rows), np.bool_)
        again[np.unique(rows, return_index=True)[1]] = False
        is_new = np.ones(len(rows), np.bool_)
        is_new[self.sample.chosen(names, self._counted_bits)] = False
        begins = np.cumsum([0, *sizes[:-1]])
        batch = _Batch(
            rows, np.where(is_new, 0, tokens), np.repeat(np.arange(len(sizes)), sizes), begins, again | is_new
        )
        self._known.touch(batch.used(), now)
        return batch, batch.missed(known)

    def _forget_old(self) -> None:
        """Forgets the blocks used longest ago beyond ROWS."""
        gone = self._known.victims(max(0, len(self._known) - ROWS), self.sample.pins)
        if gone is not None and len(gone):
            self._drop(gone)

    def _add(self, numbers: Sequence[float], now: float) -> None:
        row = np.zeros(3 + len(FACTORS) * len(self._orders))
        row[: len(numbers)] = numbers
        self._windows.add(row, now)

    def _shares(self, seconds: float, now: float) -> Shares:
        sums = self._windows.sums(seconds, now)
        tokens, hit, asked = sums[:3].tolist()
        misses = sums[3:].reshape(len(FACTORS), len(self._orders)).min(axis=1)
        by_factor = np.clip(1 - misses / tokens, 0, 1).tolist() if tokens else []
        covered_s = self._windows.covered_s(seconds, now)
        return Shares(seconds, covered_s, int(tokens), hit / asked if asked else 0.0, tuple(by_factor))
