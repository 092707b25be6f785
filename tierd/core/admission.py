"""What the core asks before it writes a block to a store that wears; the answers are in `tierd.policies.admission`.

Purpose: the contract, in MUST words. Non-purpose: an algorithm, and where a block goes that is not written. The core holds one object per NVMe tier
and is its only caller. It asks once about a block that is about to be demoted, and again only after the block was used; what is declined stays
where it is and is dropped when its page is wanted. What somebody asks to be durable is written unasked, and told like the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.core.plan import Ids

Sizes = NDArray[np.int64]
"""Bytes."""

Verdicts = NDArray[np.uint8]
"""A Verdict per block."""

Chance = Callable[[Ids, float], NDArray[np.float64]]
"""(blocks, now) -> how likely each is used again, 0 to 1; what a learner of reuse tells."""


class Verdict(enum.IntEnum):
    """What is to become of a block; the names are shown to people."""

    WRITE = 0
    PARTIAL = 1
    """The last, short block of a sequence: the next turn fills it up under another name."""
    UNLIKELY = 2
    """Another use is not likely enough to be worth a write."""
    BUDGET = 3
    """Worth it, but the wear budget has nothing left for it now."""
    DISPLACED = 4
    """It was written since its last use, and has given way there to others since."""


class Balance(NamedTuple):
    """A wear budget as it stands. rate_bytes_per_s: 0.0 without one. level_bytes: what may be written at once, below 0 after durable writes."""

    rate_bytes_per_s: float = 0.0
    burst_bytes: float = 0.0
    level_bytes: float = 0.0


class Admission(Protocol):
    """Which blocks deserve a write.

    - Equal calls MUST give equal answers, whatever the seed of the blocks' keys: no clock, no randomness.
    - `now` never runs backwards; float seconds from any origin.
    - An id MAY be another block's at the next call: what is remembered of a block MUST be remembered by its name, and MUST take bounded memory.
    - Columns of the blocks are read anew in each call and never written.
    """

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used, or have come; wherever they lie. Distinct, last of the sequence first."""
        ...

    def admit(self, blocks: Ids, sizes_bytes: Sizes, now: float) -> Verdicts:
        """About distinct blocks that would be demoted to this tier and are not in it. Sizes: what a write of each takes on the disk.

        With a wear budget, the sizes of those to be written MUST NOT add up to more than its level.
        """
        ...

    def wrote(self, size_bytes: int, now: float) -> None:
        """So much is being written, for whatever reason: what was admitted just now, and what was not asked about."""
        ...

    def balance(self, now: float) -> Balance:
        """How its wear budget stands. Changes nothing."""
        ...

    def resume(self, level_bytes: float, now: float) -> None:
        """Before anything else: the budget stood so in a former life."""
        ...
