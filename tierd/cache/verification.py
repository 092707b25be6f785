"""Verifies pages of a hit: whether they still hold the committed bytes.

The setting host.verify selects the pages; this module finds the bad ones, and cache.py handles
them. A page is marked verified only if this call hashed all of its bytes after the hit began. The
background check is in scrub.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from tierd.cache.parts import Parts
from tierd.core.formats.model import NO_PAGE, UNVERIFIED, BlockStatus, StructArray
from tierd.core.plan import Bools, Committed, Ids
from tierd.errors import TierFailed
from tierd.tiers.tier import is_shared
from tierd.tracing import span

log = structlog.get_logger(__name__)

Generations = NDArray[np.uint64]

SAMPLED_SHARE = 1 / 256
"""Share of hits that are verified again under verify = "sampled"."""


class Verification:
    """Finds bad pages of hits."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._tiers, self._mover = parts.core, parts.tiers, parts.mover
        self._layers_of = parts.registry.layers_of
        self._verify, self._sampling = parts.verify, np.random.default_rng(parts.seed)

    @property
    def is_always(self) -> bool:
        """Whether every hit is verified, also of pages that were just filled."""
        return self._verify == "always"

    async def find_bad(
        self, extents: StructArray, blocks: Ids, *, doubted: Generations | None = None
    ) -> StructArray | None:
        """The lease's extents with wrong bytes; others are marked verified. None if a device fails.

        doubted: verify only pages of these generations, since the client verifies its copies. None:
        verify the pages that the setting selects. If a device fails, its blocks stay but are not
        served.
        """
        suspect = self._suspect(extents) if doubted is None else np.isin(extents["generation"], doubted)
        if not suspect.any():
            return extents[:0]
        bad = [extents[:0]]
        for position in np.unique(extents["tier"][suspect]).tolist():
            rows = suspect & (extents["tier"] == position)
            metas = self._core.metas(blocks[rows])
            metas["layers"] = self._layers_of(metas["namespace"])
            pages = extents[rows]
            if not is_shared(self._tiers[position]):
                continue  # an existing block on a store alone is verified at every read
            try:
                with span("verify", tier=self._tiers[position].spec.name, blocks=len(pages)):
                    good = await self._mover.check(pages, metas)
            except TierFailed as error:
                log.warning("blocks not verified, so not served", count=len(pages), error=str(error))
                return None
            self._core.verified(pages[good])
            bad.append(pages[~good])
        return np.concatenate(bad)

    def _suspect(self, extents: StructArray) -> Bools:
        if self._verify == "always":
            return np.ones(len(extents), dtype=np.bool_)
        suspect = (extents["flags"] & UNVERIFIED) != 0
        if self._verify == "sampled":
            suspect |= self._sampling.random(len(extents)) < SAMPLED_SHARE
        return np.asarray(suspect)


def without(committed: Committed, bad: StructArray) -> Committed:
    """A commit without its lease, because existing blocks had these bad pages. Those blocks are
    FAILED until put again."""
    is_lost = (committed.statuses == BlockStatus.EXISTS) & np.isin(committed.extents["generation"], bad["generation"])
    committed.statuses[is_lost], committed.blocks[is_lost] = BlockStatus.FAILED, -1
    committed.extents[is_lost] = 0
    committed.extents["page"][is_lost] = NO_PAGE
    return replace(committed, lease=0)
