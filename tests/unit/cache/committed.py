"""Commits that wait for their pages and their writer's sums, in a world."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tests.unit.cache.world import BLOCK_BYTES, TOKENS, World
from tierd.checksum import raw_tables, slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.model import COMMIT_BLOCK, StructArray
from tierd.core.plan import Committed
from tierd.testing import chain, content_of

NAMES = chain(1, 4)


class Counted:
    """The number of pages that the mover sums for commits and first hits."""

    def __init__(self, world: World) -> None:
        self.pages = 0
        mover, inner = world.cache.parts.mover, world.cache.parts.mover.hash_pages

        async def hash_pages(extents: np.ndarray, metas: np.ndarray) -> object:
            self.pages += len(extents)
            return await inner(extents, metas)

        mover.hash_pages = hash_pages  # type: ignore[method-assign,assignment]


class Late:
    """A commit that waits until its pages are written. sums: a future with the writer's sums."""

    def __init__(self, world: World, reservation: int, *, blocks: StructArray | None = None, **options: object) -> None:
        self.sums: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.commit = asyncio.ensure_future(
            world.commit(reservation, blocks, written=lambda: self.sums, **options)  # type: ignore[arg-type]
        )

    async def begun(self) -> Late:
        """Returns once the commit waits."""
        for _ in range(8):
            await asyncio.sleep(0)
        assert not self.commit.done()
        return self

    async def end(self, sums: bytes = b"") -> Committed:
        """Ends the wait: all pages are written."""
        self.sums.set_result(sums)
        return await self.commit


def sums_of(names: StructArray, *, length: int = BLOCK_BYTES) -> bytes:
    """The sums that the writer of these blocks sends."""
    blocks: Sequence[np.ndarray] = [content_of(name, length) for name in names]
    return b"".join(raw_tables([slice_sums(block, slice_lengths(length, 0)) for block in blocks]))


def named(count: int) -> StructArray:
    """COMMIT_BLOCK of the first blocks."""
    blocks = np.zeros(count, COMMIT_BLOCK)
    blocks["index"], blocks["position"], blocks["hash"] = range(count), range(count), NAMES[:count]
    blocks["tokens"], blocks["length"] = TOKENS, BLOCK_BYTES
    blocks["parent"][1:] = NAMES[: count - 1]
    return blocks
