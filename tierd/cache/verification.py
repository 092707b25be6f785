"""Whether the pages that somebody is about to see still hold what was committed.

Purpose: which pages of a hit are looked at, by the setting host.verify, and which of those are bad. Non-purpose: what becomes of bad ones
(cache.py), the background check of everything (scrub.py). Invariant: a page is marked verified only if all of its bytes were hashed by this
call, after the hit began.
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

log = structlog.get_logger(__name__)

Generations = NDArray[np.uint64]

SAMPLED_SHARE = 1 / 256
"""Of hits that are verified again under verify = "sampled"."""


class Verification:
    """See the module."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._tiers, self._mover = parts.core, parts.tiers, parts.mover
        self._layers_of = parts.registry.layers_of
        self._verify, self._sampling = parts.verify, np.random.default_rng(parts.seed)

    async def find_bad(
        self, extents: StructArray, blocks: Ids, *, doubted: Generations | None = None
    ) -> StructArray | None:
        """Those of a lease's extents whose bytes are not their blocks'; the others are marked verified. doubted:
        only pages of these generations are looked at, since the client looks
        at all; None: those that the setting names.

        None where a device cannot be asked now: it is the device that is in trouble, so its blocks stay, and nobody is served them.
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
                continue  # where a committed block existed on a store alone: verified whenever it is read
            try:
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
    """A commit whose lease has ended because blocks that existed had these bad pages: they are FAILED, not to be had
    until somebody puts them again."""
    is_lost = (committed.statuses == BlockStatus.EXISTS) & np.isin(committed.extents["generation"], bad["generation"])
    committed.statuses[is_lost], committed.blocks[is_lost] = BlockStatus.FAILED, -1
    committed.extents[is_lost] = 0
    committed.extents["page"][is_lost] = NO_PAGE
    return replace(committed, lease=0)
