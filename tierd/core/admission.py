"""The contract of an admission policy: whether to write a block to a store that wears.

The core holds one policy per NVMe tier and is its only caller. The policies are in
`tierd.policies.admission`. The core asks once about a block that is about to be demoted, and again
only after another use. A declined block stays in its tier and is dropped when its page is needed.
Writes for durability are not asked about; the policy is told of them.
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
"""(blocks, now) -> the probability of another use of each, 0 to 1."""


class Verdict(enum.IntEnum):
    """Whether a block is written, and why not. People see the names."""

    WRITE = 0
    PARTIAL = 1
    """The last, short block of a sequence: the next turn fills it up under another name."""
    UNLIKELY = 2
    """Another use is not likely enough to be worth a write."""
    BUDGET = 3
    """Worth a write, but the wear budget is used up for now."""
    DISPLACED = 4
    """It was written since its last use, and has been evicted there since."""


class Balance(NamedTuple):
    """State of a wear budget. rate_bytes_per_s: 0.0 if there is no budget. level_bytes: may be
    written at once; durable writes can take it below 0."""

    rate_bytes_per_s: float = 0.0
    burst_bytes: float = 0.0
    level_bytes: float = 0.0


class Admission(Protocol):
    """Decides which blocks deserve a write.

    - Equal calls MUST give equal answers, whatever the seed of the blocks' keys: no clock, no
      randomness.
    - `now` never runs backwards; float seconds from any origin.
    - An id MAY be another block's at the next call. State of a block MUST be kept by its name, and
      MUST take bounded memory.
    - Columns of the blocks are read anew in each call and never written.
    """

    def touch(self, blocks: Ids, now: float) -> None:
        """The blocks were used or stored, in any tier. Distinct, last of the sequence first."""
        ...

    def admit(self, blocks: Ids, sizes_bytes: Sizes, now: float) -> Verdicts:
        """A verdict for each of distinct blocks that would be demoted to this tier and are not in
        it.

        sizes_bytes: of each one's write on the disk. With a wear budget, the sizes of the blocks to
        be written MUST NOT add up to more than its level.
        """
        ...

    def wrote(self, size_bytes: int, now: float) -> None:
        """Counts every write to the tier: admitted ones, and those not asked about."""
        ...

    def balance(self, now: float) -> Balance:
        """State of the wear budget. Changes nothing."""
        ...

    def resume(self, level_bytes: float, now: float) -> None:
        """Sets the level of the budget to that of the previous run. Called before anything else."""
        ...
