"""Whether the pages that somebody is about to see still hold what was committed.

Purpose: which pages of a hit are looked at, by the setting host.verify, and which of those are bad. Non-purpose: what becomes of bad ones
(cache.py), the background check of everything (scrub.py). Invariant: a page is marked verified only if all of its bytes were hashed by this
call, after the hit began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from tierd.core.core import Core
from tierd.core.model import UNVERIFIED, StructArray
from tierd.core.plan import Bools, Ids
from tierd.errors import TierFailed
from tierd.mover import Mover
from tierd.tiers.tier import Tier, is_shared

log = structlog.get_logger(__name__)

Generations = NDArray[np.uint64]

SAMPLED_SHARE = 1 / 256
"""Of hits that are verified again under verify = "sampled"."""


class Verification:
    """verify: "first_hit", "sampled" or "always". layers_of: namespace ids to layers per block. seed: of what is sampled; None: by chance."""

    def __init__(
        self,
        core: Core,
        tiers: Sequence[Tier],
        *,
        mover: Mover,
        layers_of: Callable[[StructArray], StructArray],
        setting: tuple[str, int | None],
    ) -> None:
        self._core, self._tiers, self._mover, self._layers_of = core, tiers, mover, layers_of
        self._verify, self._sampling = setting[0], np.random.default_rng(setting[1])

    async def find_bad(
        self, extents: StructArray, blocks: Ids, *, doubted: Generations | None = None
    ) -> StructArray | None:
        """Those of a lease's extents whose bytes are not their blocks'; the others are marked verified. doubted: only pages of these generations are looked at, since the client looks
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
