"""Attention mass that kernels measured, kept per block for policies that use it.

The mass of a block is bounded, so that sums stay finite.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.sets import in_order
from tierd.core.index.index import Index
from tierd.core.requests.leases import Holder
from tierd.errors import InvalidArgument, NotFound

MOST_MASS = 1e30
"""Most attention kept of a block: policies add and average it as float32."""


class Attention:
    """See the module."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def report(self, holder: Holder, *, lease: int, group: int, mass: NDArray[np.float32], now: float) -> None:
        """See `Core.report_attention`."""
        found = holder.leases.get(lease)
        if found is None:
            raise NotFound(f"lease {lease}: not held by session {holder.id}; report before releasing it")
        blocks = found.held[group].blocks.reshape(-1) if group < len(found.held) else None
        if blocks is None or len(blocks) != len(mass) or not np.isfinite(mass).all() or (mass < 0).any():
            raise InvalidArgument(
                f"attention: {len(mass)} values for group {group} of lease {lease}; send one finite value, 0 or more, for each "
                f"of its {0 if blocks is None else len(blocks)} blocks"
            )
        kept, most = self._index.blocks.attention, np.float32(MOST_MASS)
        np.add.at(kept, blocks, np.minimum(mass, most))
        kept[blocks] = np.minimum(kept[blocks], most)
        for tier in self._index.serving():
            self._index.touch(tier, in_order(blocks)[::-1], now)
