"""Forms of blocks: the contract between the core and whoever knows codecs.

A store may keep a block encoded, in fewer bytes. The core reserves the bytes and keeps the error
bound. It never sees a codec.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import StructArray
from tierd.core.plan import Ids, Lengths

BLOCK_SHAPE = np.dtype([("namespace", "<u4"), ("position", "<u4"), ("tokens", "<u4"), ("length", "<u4")])
"""A block's namespace, number in its sequence, tokens, and bytes before encoding."""


class Forms(Protocol):
    """Same answers for the same arguments while a transfer is planned."""

    def lengths(self, tier: int, blocks: StructArray) -> Lengths:
        """Bytes to reserve for each block in a tier: BLOCK_SHAPE [n] -> uint32 [n]. Fewer than its
        `length`: the tier stores the block encoded."""

    def error_limits(self, namespaces: Ids) -> NDArray[np.float32]:
        """The greatest error bound that clients of each namespace accept; 0.0: exact blocks only."""


class Plain:
    """Every tier stores blocks as they are."""

    def lengths(self, tier: int, blocks: StructArray) -> Lengths:
        """As `Forms.lengths`."""
        lengths: Lengths = blocks["length"]
        return lengths

    def error_limits(self, namespaces: Ids) -> NDArray[np.float32]:
        """As `Forms.error_limits`."""
        return np.zeros(len(namespaces), np.float32)
