"""What the core asks of an eviction policy; the policies themselves are in `tierd.policies.eviction`.

Purpose: the contract, in MUST words. Non-purpose: an algorithm, and what a tier is made of. The core holds one policy object
per tier and is its only caller. Block ids are dense, so a policy keeps its state in columns indexed by id and grows
them when it meets a greater id. Every array of ids is int64, without repetition, and ordered from cold to hot: what comes later in
it counts as used later, even at the same `now`. (The core hands a request's blocks over last to first, so prefixes lose tails first.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
"""Block ids."""

Mask = NDArray[np.bool_]


class Eviction(Protocol):
    """Who leaves a tier first.

    - A block is tracked from `track` to `forget`. The core never tracks a tracked block, and never touches or forgets another.
    - Equal calls MUST give equal answers: no clock, no randomness but a seed that was given at construction.
    - `now` never runs backwards; float seconds from any origin.
    - An id that was forgotten may be given to another block later: `forget` MUST leave nothing that speaks about the old one.
    """

    def __len__(self) -> int:
        """How many blocks are tracked."""
        ...

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks have come into the tier; that counts as a use."""
        ...

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        ...

    def forget(self, blocks: Ids) -> None:
        """The blocks have left the tier, or are on their way out."""
        ...

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """Exactly `count` tracked blocks whose `pinned[id]` is False, coldest first; None if there are not so many.

        A question: it MUST change nothing that a later answer depends on, whatever it answers; the core forgets those that it
        takes. `pinned` covers every tracked id, is only read, and is only valid during the call.
        """
        ...


@runtime_checkable
class Heeding(Protocol):
    """An Eviction that goes by what puts say of blocks (`tierd.core.index.priorities`), and so hears of more than uses."""

    def said(self, blocks: Ids, now: float) -> None:
        """Something else is said of these tracked blocks; that counts as a use."""
        ...

    def pass_time(self, now: float) -> None:
        """It is so late; what was said of blocks may have run out. Victims may be asked for next."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a sequence's blocks, those that are held nowhere too.

    keys: uint64 [n], the names of the first group's blocks (first rank) as `Blocks.key` has them, first to last. ids: per group, int64 [ranks, blocks],
    -1 for one that nothing is known of. tokens_per_block: per group. tokens: that all of them cover. Of the blocks of `keys`: evenly spread numbers that no seed
    changes, uint64 [n], and the kind of the nearest tier that each can be read from, -1 for none.
    """

    keys: NDArray[np.uint64]
    ids: Sequence[Ids]
    tokens_per_block: Sequence[int]
    tokens: int
    spread: NDArray[np.uint64]
    nearest: NDArray[np.int8]


class Listener(Protocol):
    """Learns from whole requests and puts every block into a group (`Blocks.group`), for those policies that go by it. Equal calls, equal groups."""

    def asked(self, request: Asked, now: float) -> None:
        """A request has come; its blocks are touched after this."""
        ...

    def stored(self, blocks: Ids, now: float) -> None:
        """New names have come, their parents linked; policies hear of them after this."""
        ...

    def kept(self, blocks: Ids) -> None:
        """A store that wears has these blocks from now on, or has them no longer, as `Blocks.kept` says."""
        ...
