"""Sealed puts through the cache: the daemon copies at commit, hashes its copy, and does not verify
again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.cache.committed import Counted, sums_of
from tests.unit.cache.world import BLOCK_BYTES, CONFIG, TOKENS, World, directories, opened
from tierd import mover as movers
from tierd.core.formats.model import BlockStatus, Durability, TierKind
from tierd.errors import TierFailed
from tierd.testing import chain, content_of

NAMES = chain(1, 4)
SEALED = CONFIG.replace("[[host]]", "[[host]]\nsealed_puts = true")
OTHER = b"\xee" * BLOCK_BYTES


def used(world: World) -> tuple[int, int]:
    """Bytes of the host tier in use, and its reserved pages."""
    tier = world.cache.core.tier_stats()[0]
    return tier.used_bytes, tier.pages_reserved


def right(world: World, extents: np.ndarray) -> list[bool]:
    """For each page, if it holds the right content."""
    return [
        bytes(world.page(extent)) == content_of(name, BLOCK_BYTES).tobytes()
        for extent, name in zip(extents, NAMES, strict=True)
    ]


async def test_who_writes_after_the_commit_changes_nothing() -> None:
    """Hits serve the bytes of the commit, though the writer changes its pages afterwards."""
    async with opened(SEALED) as world:
        reserved = await world.reserve(NAMES)
        assert (await world.commit(reserved.reservation)).statuses.tolist() == [BlockStatus.READY] * 4
        for _ in range(2):
            for extent in reserved.extents[0]:
                world.page(extent)[:] = OTHER
            lease = await world.acquire(NAMES)
            assert right(world, lease.served.extents) == [True] * 4


async def test_what_is_hashed_is_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that changes its pages during hashing gets a block whose checksum fits the served bytes."""
    async with opened(SEALED) as world:
        reserved = await world.reserve(NAMES)
        inner, scribbled = movers.slice_sums, []

        def scribbling(view: memoryview, lengths: Sequence[int]) -> np.ndarray:
            scribbled.append(len(view))
            for extent in reserved.extents[0]:
                world.page(extent)[:] = bytes([len(scribbled)]) * BLOCK_BYTES
            return inner(view, lengths)

        monkeypatch.setattr(movers, "slice_sums", scribbling)
        committed = await world.commit(reserved.reservation)
        monkeypatch.undo()
        assert len(scribbled) >= 4
        metas = world.cache.core.metas(committed.blocks)
        metas["layers"] = 1
        assert (await world.cache.parts.mover.check(committed.extents, metas)).tolist() == [True] * 4


async def test_a_first_hit_is_not_verified_again() -> None:
    """After sealed puts no get hashes; after other puts the first get hashes all pages."""
    for config, first in ((SEALED, 0), (CONFIG, 4)):
        async with opened(config) as world:
            await world.put(NAMES)
            counted = Counted(world)
            for pages in (first, first):
                assert (await world.acquire(NAMES)).served.tokens == 4 * TOKENS
                assert counted.pages == pages


async def test_what_was_found_at_start_is_verified_again() -> None:
    """A sealed block that changes while no daemon runs is a miss after the next start."""
    with directories() as places:
        async with opened(SEALED, places=places) as world:
            committed = await world.put(NAMES)
            world.page(committed.extents[3])[7] ^= 1
        async with opened(SEALED, places=places) as world:
            assert (await world.acquire(NAMES)).served.tokens == 3 * TOKENS


async def test_a_commit_that_cannot_be_copied_fails_as_a_whole() -> None:
    """If the sealing copy fails, all blocks of the commit are FAILED and all pages are freed."""
    async with opened(SEALED) as world:
        before = used(world)
        reserved = await world.reserve(NAMES)

        async def failing(*_: object) -> None:
            raise TierFailed("host.0: no memory")

        world.cache.parts.mover.seal = failing  # type: ignore[method-assign,assignment]
        committed = await world.commit(reserved.reservation)
        assert committed.statuses.tolist() == [BlockStatus.FAILED] * 4
        assert used(world) == before
        assert not world.pins


async def test_a_writers_sums_do_not_count() -> None:
    """The daemon serves its own copy of a sealed put under its own sums and ignores the writer's sums."""
    async with opened(SEALED) as world:
        reserved = await world.reserve(NAMES)
        for extent in reserved.extents[0]:
            world.page(extent)[:] = OTHER
        committed = await world.commit(reserved.reservation, sums=sums_of(NAMES))
        metas = world.cache.core.metas(committed.blocks)
        metas["layers"] = 1
        assert (await world.cache.parts.mover.check(committed.extents, metas)).tolist() == [True] * 4
        assert right(world, committed.extents) == [False] * 4


async def test_a_sealed_put_can_be_durable() -> None:
    """Durable blocks of sealed puts come back from the store byte by byte after memory drops them."""
    async with opened(SEALED) as world:
        assert (await world.put(NAMES, durability=Durability.DURABLE)).statuses.tolist() == [BlockStatus.READY] * 4
        core, now = world.cache.core, world.cache.clock.now()
        world.cache.flights.start(core.evict(core.blocks(), tier=0, now=now))
        lease = await world.acquire(NAMES)
        assert right(world, lease.served.extents) == [True] * 4


@pytest.mark.parametrize("size", [1, (256 << 10) + 1, (3 << 20) - 5])
async def test_pieces_have_the_sums_of_the_whole(size: int) -> None:
    """A piecewise copy of a block of any length and layers has the bytes and slice sums of its staging
    page."""
    config = SEALED.replace('"4 MiB"\nsegment = "1 MiB"', '"64 MiB"\nsegment = "4 MiB"')
    async with opened(config) as world:
        query = world.put_query(NAMES)
        query.blocks["length"] = size
        reserved = await world.cache.reserve(world.session, [query], kind=TierKind.HOST)
        for number, extent in enumerate(reserved.extents[0]):
            world.page(extent)[:] = np.random.default_rng(number).bytes(size)
        core, mover = world.cache.core, world.cache.parts.mover
        commit = core.begin_commit(world.session, reservation=reserved.reservation, blocks=None, now=1.0)
        commit.metas["layers"] = np.minimum(size, [1, 3, 80, 1])
        sealed = await mover.seal(commit.staging, commit.extents, commit.metas)
        for extents in (commit.staging, commit.extents):
            whole = await mover.hash_pages(extents, commit.metas)
            assert np.array_equal(sealed.digests, whole.digests)
            assert all(map(np.array_equal, sealed.slices, whole.slices))


TWO = SEALED.replace("[[nvme]]", '[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\narena_dir = "{arena}"\n[[nvme]]')


async def test_a_commit_over_a_sealed_tier_and_another_has_the_right_sums() -> None:
    """Blocks striped over a sealed and a plain tier are hashed in place, in the order of the commit."""
    async with opened(TWO) as world:
        names = chain(5, 16)
        reserved = await world.reserve(names, kind=TierKind.HOST)
        committed = await world.commit(reserved.reservation)
        assert set(committed.extents["tier"].tolist()) == {0, 1}
        metas = world.cache.core.metas(committed.blocks)
        metas["layers"] = 1
        assert (await world.cache.parts.mover.check(committed.extents, metas)).all()
        assert committed.extents["flags"].tolist() == committed.extents["tier"].tolist()  # 1: UNVERIFIED
