"""Sealed puts: what a writer wrote to staging pages is copied to where he cannot write, and the copies are hashed.

    staging page, the writer's ──▶ copied in a thread ──▶ the block's page, the daemon's ──▶ hashed ──▶ published

Purpose: sums of a commit, whether its pages are written in place or staged. Non-purpose: which page is for what
(core), sums of pages in place (mover.py). Invariants: what
is hashed is the copy, never the staging page, so that a writer who goes on writing changes nothing but his own page; nothing is copied before its commit, and both pages are
busy for as long as a thread has them, whatever becomes of their session.
"""

from __future__ import annotations

import numpy as np

from tierd.core.plan import Bools, Committing
from tierd.mover import Hashed, Mover


class Sealing:
    """See the module."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    async def sum(self, committing: Committing) -> Hashed:
        """Sums and digests of a commit's pages, whose metas have their layers; those that are staged are copied first. Raises what hashing raises."""
        staged = np.asarray(committing.staging["page"] >= 0)
        if not staged.any():
            return await self._mover.hash_pages(committing.extents, committing.metas)
        sealed = await self._mover.seal(
            committing.staging[staged], committing.extents[staged], committing.metas[staged]
        )
        if staged.all():
            return sealed
        rest = await self._mover.hash_pages(committing.extents[~staged], committing.metas[~staged])
        return _merged(staged, sealed, rest)


def _merged(first: Bools, those: Hashed, others: Hashed) -> Hashed:
    """In the order of the commit: of the first rows those, of the rest the others."""
    turn = [iter(others.slices), iter(those.slices)]
    digests = np.empty((len(first), 16), np.uint8)
    digests[first], digests[~first] = those.digests, others.digests
    return Hashed(digests, [next(turn[is_first]) for is_first in first.tolist()])
