"""Sealed puts: copies staging pages to pages that the client cannot write, and hashes the copies.

    the client's staging page ──▶ copied in a thread ──▶ the daemon's page ──▶ hashed ──▶ published

It computes a commit's sums, of staged pages and of pages written in place. The core assigns pages;
mover.py sums pages in place. Only the copy is hashed, so later writes to a staging page change
nothing else. Nothing is copied before its commit. Both pages stay busy while a thread uses them.
"""

from __future__ import annotations

import numpy as np

from tierd.core.plan import Bools, Committing
from tierd.mover import Hashed, Mover


class Sealing:
    """Computes the sums of commits."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    async def sum(self, committing: Committing) -> Hashed:
        """Sums and digests of a commit's pages, whose metas have their layers. Staged pages are
        copied first. Raises what hashing raises."""
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
    """Merges in the order of the commit: rows of `first` from those, the rest from others."""
    turn = [iter(others.slices), iter(those.slices)]
    digests = np.empty((len(first), 16), np.uint8)
    digests[first], digests[~first] = those.digests, others.digests
    return Hashed(digests, [next(turn[is_first]) for is_first in first.tolist()])
