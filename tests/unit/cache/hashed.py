"""A cache whose hash process is ready, commits that wait for their pages, and what their client says of these."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
from collections.abc import AsyncIterator, Callable

import numpy as np

from tests.unit.cache.world import BLOCK_BYTES, CONFIG, SOON_S, TOKENS, World, opened
from tierd.core.model import COMMIT_BLOCK
from tierd.core.plan import Committed
from tierd.testing import chain

NAMES = chain(1, 4)


@contextlib.asynccontextmanager
async def hashing(config: str = CONFIG) -> AsyncIterator[World]:
    """A world whose hash process is ready."""
    async with opened(config) as world:
        await ready(world)
        yield world


async def ready(world: World) -> None:
    async with asyncio.timeout(SOON_S):
        while not world.cache.parts.mover.hashing.is_ready:  # noqa: ASYNC110  # it rings no bell
            await asyncio.sleep(0.001)


class Counted:
    """How many pages the mover hashes for commits. meanwhile: what happens first each time."""

    def __init__(self, world: World, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.pages = 0
        mover, inner = world.cache.parts.mover, world.cache.parts.mover.hash_pages

        async def hash_pages(extents: np.ndarray, metas: np.ndarray) -> object:
            meanwhile()
            self.pages += len(extents)
            return await inner(extents, metas)

        mover.hash_pages = hash_pages  # type: ignore[method-assign,assignment]


def named(count: int) -> np.ndarray:
    """COMMIT_BLOCK of the first blocks."""
    blocks = np.zeros(count, COMMIT_BLOCK)
    blocks["index"], blocks["hash"], blocks["tokens"], blocks["length"] = (
        range(count),
        NAMES[:count],
        TOKENS,
        BLOCK_BYTES,
    )
    blocks["parent"][1:], blocks["position"] = NAMES[: count - 1], range(count)
    return blocks


def digests(world: World, committed: object) -> bytes:
    """Of the blocks that were committed, as the core knows them."""
    return bytes(world.cache.core.metas(committed.blocks)["digest"].tobytes())  # type: ignore[attr-defined]


async def waiting(
    world: World, reservation: int, blocks: np.ndarray | None = None, *, word: int = 0
) -> asyncio.Future[Committed]:
    """A commit whose pages are not written yet, so far that it waits for them."""
    commit = asyncio.ensure_future(world.commit(reservation, blocks, unwritten=True, word=word))
    for _ in range(8):
        await asyncio.sleep(0)
    assert not commit.done()
    return commit


class Board:
    """What a client writes to of its session's board. word: of the put that is under way, from 1."""

    word = 3

    def __init__(self, world: World) -> None:
        descriptor, length = world.cache.ahead.boards.give(world.session)
        self._memory = mmap.mmap(descriptor, length)
        os.close(descriptor)

    def note(self, reservation: int, blocks: int) -> None:
        """So many of its blocks are written."""
        struct.pack_into("<II", self._memory, 8 * (self.word - 1), blocks, reservation & 0xFFFFFFFF)


def sums_made(world: World) -> int:
    """Pages of commits under way whose sums have come."""
    return sum(len(job.tables) for job in world.cache.ahead._jobs.values())


async def made(world: World, count: int) -> None:
    """When the sums of so many pages have come, of commits that wait."""
    async with asyncio.timeout(SOON_S):
        while sums_made(world) < count:  # noqa: ASYNC110  # nobody waits for them yet
            await asyncio.sleep(0.001)


async def another_put(world: World, seed: int = 2) -> None:
    """Which the process hashes after it has looked at what came before."""
    other = await world.reserve(chain(seed, 1))
    world.cache.ahead.note(world.session, other.reservation, end=1)
    async with asyncio.timeout(SOON_S):
        await world.commit(other.reservation, unwritten=True)
