"""The contract of an eviction policy; the policies are in `tierd.policies.eviction`.

The core holds one policy per tier and is its only caller. Block ids are dense, so a policy keeps
its state in columns indexed by id. It lengthens them at a greater id. Every array of ids is int64,
without repetition, from cold to hot. A later id counts as used later, even at the same `now`. The
core passes a request's blocks last to first, so prefixes lose tails first.
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
    """Decides which blocks a tier evicts first.

    - A block is tracked from `track` to `forget`. The core never tracks a tracked block, and never
      touches or forgets an untracked one.
    - Equal calls MUST give equal answers: no clock, no randomness but a seed given at construction.
    - `now` never runs backwards; float seconds from any origin.
    - A forgotten id may be given to another block later: `forget` MUST erase all state of the old
      one.
    """

    def __len__(self) -> int:
        """How many blocks are tracked."""
        ...

    def track(self, blocks: Ids, now: float) -> None:
        """The blocks were stored in the tier; that counts as a use."""
        ...

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used."""
        ...

    def forget(self, blocks: Ids) -> None:
        """The blocks are removed from the tier, or about to be."""
        ...

    def victims(self, count: int, pinned: Mask) -> Ids | None:
        """Exactly `count` tracked blocks whose `pinned[id]` is False, coldest first; None if there
        are fewer. It MUST NOT change any later answer. The core forgets the blocks that it evicts.
        `pinned` covers every tracked id, is only read, and is only valid during the call."""
        ...


@runtime_checkable
class Heeding(Protocol):
    """An Eviction that uses the priorities of puts (`tierd.core.index.priorities`)."""

    def said(self, blocks: Ids, now: float) -> None:
        """These tracked blocks got another priority; that counts as a use."""
        ...

    def pass_time(self, now: float) -> None:
        """Sets the time: priorities may have run out. The core may ask for victims next."""
        ...


def heeding(policies: Sequence[Eviction]) -> list[tuple[int, Heeding]]:
    """Those that use priorities, each with its tier."""
    return [(tier, policy) for tier, policy in enumerate(policies) if isinstance(policy, Heeding)]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A request for a sequence's blocks, including those that are not held.

    keys: uint64 [n], table keys (`Blocks.key`) of the first group's blocks (first rank), first to
    last.
    ids: per group, int64 [ranks, blocks], -1 if unknown.
    tokens_per_block: per group.
    tokens: covered by all the blocks.
    spread: uint64 [n], evenly spread numbers of the blocks of `keys`, independent of the seed.
    nearest: of those blocks, the kind of the nearest tier that can read each, -1 for none.
    """

    keys: NDArray[np.uint64]
    ids: Sequence[Ids]
    tokens_per_block: Sequence[int]
    tokens: int
    spread: NDArray[np.uint64]
    nearest: NDArray[np.int8]


class Listener(Protocol):
    """Learns from whole requests and puts every block into a group (`Blocks.group`), for policies
    that use groups. Equal calls give equal groups."""

    def asked(self, request: SequenceRequest, now: float) -> None:
        """A request arrived; its blocks are touched after this call."""
        ...

    def stored(self, blocks: Ids, now: float) -> None:
        """New blocks were stored and linked to their parents; policies see them after this call."""
        ...

    def kept(self, blocks: Ids) -> None:
        """A store that wears got these blocks or dropped them, as `Blocks.kept` says."""
        ...
