"""Traffic: observes a core's requests and puts blocks into groups, for policies that rank by worth.

It connects names and the learner, which knows no blocks, defines the groups and computes their
worth. One object serves all tiers of a core, so each learns from all requests, also for blocks that
were evicted or never held. The key history and the learner bound its memory. A block's group does
not depend on an earlier block with its id.

A store with a wear budget takes only some blocks. In a tier above it, the value of a use is the
loss if the tier evicted the block. That is only the read if the store has the block, and everything
if the store will refuse it. Otherwise the tier would hold blocks that the store also has, and lose
those that neither has room for. The ranking of such a tier marks its groups: ABOVE, and KEPT if a
store has the block.

`Blocks.group` is 0 if unknown (found at start, not asked for yet), else the learner's group + 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import every
from tierd.core.eviction import Ids, SequenceRequest
from tierd.core.index.blocks import Blocks, Names
from tierd.policies.reuse.features import NOTHING, first_group
from tierd.policies.reuse.hazard import EDGES_S, age_of
from tierd.policies.reuse.key_history import HISTORY, KeyHistory
from tierd.policies.reuse.learner import REFIT_EVERY, Groups, Learner, Request

KEY_LIMIT = 1 << 20
"""Names that are remembered, about 30 bytes each."""
UNKNOWN_BLOCKS = 12
"""A block without history counts as one of a first request with so many blocks."""
ABOVE, KEPT = 1 << 14, 1 << 15
"""Marks beside a group."""
REFIT_PAUSE_S = 1.0
"""Least pause between two refits: each holds the loop for milliseconds, and ages change slowly."""
READ_SHARE = 0.25
"""The gain of a hit in memory over one in the store, as a share of a hit's gain over computing."""
_LEAST_CHANCE = 1e-9
_ASKED_LIMIT = np.iinfo(HISTORY["asked"]).max
_NOTHING = NOTHING + 1
_UNKNOWN = first_group(UNKNOWN_BLOCKS)
_EDGES_S = EDGES_S.tolist()
_CHANGES_S = np.append(EDGES_S[1:-1], [np.inf, np.inf])


class Traffic:
    """Keeps `tierd.core.eviction.Listener`."""

    def __init__(self, blocks: Blocks, learner: Learner | None = None) -> None:
        """learner: learnt before; None: the one that ships with tierd."""
        self.version = 0
        self.learner = learner or Learner()
        self._blocks = blocks
        self._history = KeyHistory(KEY_LIMIT)
        self._since_refit, self._refit_s = 0, -np.inf
        """Requests since the last refit, and its time."""
        self.thresholds: list[Callable[[], float]] = []
        """Of each store under a wear budget: the least chance of another use that it admits."""
        self.above: list[Callable[[Ids], None]] = []
        """Called when blocks came to a store or left it."""
        self.rivals: list[Callable[[SequenceRequest, NDArray[np.uint16], float], None]] = []
        """Called with requests, and the current groups of their blocks (`SequenceRequest.keys`)."""
        self._threshold = 0.0

    def prices(self, groups: Ids, ages_s: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """The worth of blocks in these groups at these ages, and the ages at which it may change. A
        new `version` may change them too."""
        ages = age_of(ages_s)
        worths = self.learner.worth[self._learners(groups), np.minimum(ages, self.learner.worth.shape[1] - 1)]
        worths = np.asarray(worths, np.float32)
        return (worths * self._hanging(groups, ages_s) if self.thresholds else worths), _CHANGES_S[ages]

    def price(self, group: int, age_s: float) -> tuple[float, float]:
        """The same of one."""
        if group >= ABOVE:
            worths, changes_s = self.prices(np.array([group]), np.array([age_s]))
            return worths.item(), changes_s.item()
        learner, age = self.learner, bisect_right(_EDGES_S, age_s) - 1
        of_learner = group - 1 if group else _UNKNOWN
        return learner.worth.item(of_learner, min(age, learner.worth.shape[1] - 1)), _CHANGES_S.item(age)

    def chance(self, blocks: Ids, now: float) -> NDArray[np.float64]:
        """How likely each block is used again at all."""
        ages = np.maximum(now - self._blocks.last_used[blocks], 0.0)
        return self.learner.chance(self._learners(self._blocks.group[blocks]), ages)

    def groups_of(self, names: Names) -> NDArray[np.uint16]:
        """The groups that blocks were put into last, uint16 [n]; 0 if unknown."""
        return self._history.recall(self._blocks.keys_of(names)).numbers["group"]

    def asked(self, request: SequenceRequest, now: float) -> None:
        """Learns from the request, and groups its blocks, also those held nowhere."""
        whole = request.tokens // request.tokens_per_block[0]
        keys = request.keys[:whole]
        recalled = self._history.recall(keys)
        numbers = recalled.numbers
        asked = numbers["asked"]
        is_known = asked > 0
        known = len(asked) if every(is_known) else int(is_known.argmin())
        groups = self._learn(numbers[:known], whole, now)
        more = asked[groups.start :]
        more += more < _ASKED_LIMIT
        numbers["part"], numbers["group"] = groups.parts, groups.groups + 1
        self._history.note(keys, numbers, recalled.rows)
        placed = np.full(len(request.keys) + 1, _NOTHING, np.uint16)
        placed[:whole] = numbers["group"]
        self._place(request, placed, whole)
        for observe in self.rivals:
            observe(request, placed[: len(request.keys)], now)

    def stored(self, blocks: Ids, now: float) -> None:
        """Blocks that were asked for have groups; others (answers) get that of their parent."""
        groups = self._history.recall(self._blocks.keys(blocks)).numbers["group"]
        self._blocks.group[blocks] = groups
        if not groups.all():
            self._follow(blocks[groups == 0])

    def kept(self, blocks: Ids) -> None:
        """Passes the blocks on to `above`."""
        for observe in self.above:
            observe(blocks)

    def _hanging(self, groups: Ids, ages_s: NDArray[np.float64]) -> NDArray[np.float32]:
        """The share of a use that depends on the tier's having the block. A write costs as many
        uses as the threshold says, and at most what it brings."""
        chances = np.maximum(self.learner.chance(self._learners(groups), ages_s), _LEAST_CHANCE)
        lost = np.where(groups & KEPT, 0.0, np.minimum(self._threshold / chances, 1.0))
        return np.where(groups & ABOVE, READ_SHARE + (1 - READ_SHARE) * lost, 1.0).astype(np.float32)

    def _learn(self, known: NDArray[np.void], whole: int, now: float) -> Groups:
        sessions, parts = known["asked"].astype(np.int64), known["part"].astype(np.int64)
        groups = self.learner.observe(Request(whole, sessions, parts), now)
        self._since_refit += 1
        if self._since_refit >= REFIT_EVERY and not 0.0 <= now - self._refit_s < REFIT_PAUSE_S:
            self._since_refit, self._refit_s = 0, now
            self.learner.refit(now)
            self._threshold = min((threshold() for threshold in self.thresholds), default=0.0)
            self.version += 1
        return groups

    def _place(self, request: SequenceRequest, padded: NDArray[np.uint16], whole: int) -> None:
        """Gives blocks of each rank and attention group that of the first one's block at their end.
        Blocks beyond those are partial."""
        for ids, size in zip(request.ids, request.tokens_per_block, strict=True):
            if size == request.tokens_per_block[0] and ids.shape[1] == len(request.keys):
                placed = padded[: len(request.keys)]
            else:
                ends = np.minimum((np.arange(ids.shape[1]) + 1) * size, request.tokens)
                placed = padded[np.minimum((ends - 1) // request.tokens_per_block[0], whole)]
            for of_rank in ids:
                if every(known := of_rank >= 0):
                    self._blocks.group[of_rank] = placed
                else:
                    self._blocks.group[of_rank[known]] = placed[known]

    def _follow(self, blocks: Ids) -> None:
        """Each block gets its parent's group, if that is a whole one. Parents come first."""
        tokens, parents = self._blocks.tokens, self._blocks.parent[blocks].astype(np.int64)
        outer = np.unique(parents[parents >= 0])
        group = dict(zip(outer.tolist(), self._blocks.group[outer].tolist(), strict=True))
        origin = {parent: row for row, parent in enumerate(outer.tolist())}
        is_whole = (tokens[blocks] >= tokens[parents]).tolist()
        for block, parent, whole in zip(blocks.tolist(), parents.tolist(), is_whole, strict=True):
            group[block] = 0 if parent < 0 else group[parent] if whole else _NOTHING
            if whole and parent >= 0:
                origin[block] = origin[parent]
        self._blocks.group[blocks] = [group[block] for block in blocks.tolist()]
        self._note_origins(blocks, np.array([origin.get(block, -1) for block in blocks.tolist()], np.int64), outer)

    def _note_origins(self, blocks: Ids, rows: Ids, origins: Ids) -> None:
        """The blocks inherit what is remembered of their origins, given as rows."""
        if (rows < 0).all():
            return
        numbers = self._history.recall(self._blocks.keys(origins)).numbers
        known = np.flatnonzero((rows >= 0) & (numbers["asked"][rows] > 0))
        if len(known):
            self._history.note(self._blocks.keys(blocks[known]), numbers[rows[known]])

    def _learners(self, groups: Ids) -> Ids:
        plain = groups.astype(np.int64) % ABOVE
        return np.where(plain == 0, _UNKNOWN, plain - 1)
