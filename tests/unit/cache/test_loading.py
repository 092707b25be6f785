"""The daemon's service while it still loads the index of a store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil

import numpy as np
import pytest

from tests.unit.cache.world import SOON_S, World, directories, opened
from tests.unit.core.kit import chain
from tierd.cache.operator import Operator
from tierd.core.formats.model import BlockStatus, Durability
from tierd.errors import TierFailed
from tierd.tiers.store.snapshot import FiledRows

LOOK_S = 0.2
"""The time that a test waits to see that nothing happens."""
STORE = 1
"""The store's position."""


async def left_behind(places: dict[str, str], *chains: np.ndarray, kept: bool = False) -> None:
    """A life that persists these blocks. kept: the blocks also stay in memory."""
    async with opened(places=places) as world:
        for names in chains:
            await world.put(names, durability=Durability.DURABLE)
    for name in [] if kept else os.listdir(places["arena"]):
        shutil.rmtree(os.path.join(places["arena"], name))


async def filled(world: World, names: np.ndarray, byte: int) -> int:
    """A reservation of these blocks, each page full of this byte."""
    reserved = await world.reserve(names)
    for extent in reserved.extents[0]:
        world.page(extent)[:] = bytes([byte]) * int(extent["length"])
    return reserved.reservation


async def bytes_of(world: World, names: np.ndarray) -> list[bytes]:
    lease = await world.acquire(names)
    return [bytes(world.page(extent)) for extent in lease.served.extents]


async def test_memory_serves_while_a_store_loads() -> None:
    """Memory serves and takes blocks during a load. The store's blocks are misses until all are loaded."""
    near, far, new = chain("near", 3), chain("far", 3), chain("new", 2)
    with directories() as places:
        await left_behind(places, far)
        async with opened(places=places) as world:
            await world.put(near)
        async with opened(places=places, loads=False) as world:
            core, health = world.cache.core, world.cache.health
            assert not core.is_serving(STORE) and not core.is_writable(STORE)
            assert health.trouble(STORE) == "loading, 0 %"
            assert len(await bytes_of(world, near)) == 3
            assert await bytes_of(world, far) == []
            await world.put(new)
            assert len(await bytes_of(world, new)) == 2
            await world.daemon.load()
            assert core.is_serving(STORE) and core.is_writable(STORE) and health.trouble(STORE) == ""
            assert len(await bytes_of(world, far)) == 3
            core.check()


async def test_what_is_to_be_durable_waits_for_a_store_that_loads() -> None:
    """A durable commit ends once the store is loaded, and not before."""
    with directories() as places:
        await left_behind(places, chain("far", 3))
        async with opened(places=places, loads=False) as world:
            commit = asyncio.create_task(world.put(chain("new", 2), durability=Durability.DURABLE))
            assert not (await asyncio.wait([commit], timeout=LOOK_S))[0]
            await world.daemon.load()
            assert (await commit).statuses.tolist() == [BlockStatus.READY] * 2


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_block_that_was_put_meanwhile_is_the_one_that_holds(is_same: bool) -> None:
    """A block put during the load wins over a store's copy with other bytes, also after memory is lost."""
    names = chain("a", 3)
    with directories() as places:
        await left_behind(places, names)
        async with opened(places=places, loads=False) as world:
            if is_same:
                await world.put(names)
            else:
                await world.commit(await filled(world, names, 7))
            before = await bytes_of(world, names)
            await world.daemon.load()
            assert await bytes_of(world, names) == before
            ids = world.cache.core.blocks(tier=STORE)
            assert len(ids) == (3 if is_same else 0)
            world.cache.core.check()
            assert (await Operator(world.cache).flush(timeout_s=SOON_S)).left == 0
        for name in os.listdir(places["arena"]):
            shutil.rmtree(os.path.join(places["arena"], name))
        async with opened(places=places) as world:
            assert await bytes_of(world, names) == before


async def test_a_load_that_is_cut_short_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop or a disk fault during the load leaves the store as it was."""
    names = chain("far", 5)
    stretches = FiledRows.stretches

    def failing(self: FiledRows) -> object:
        yield from stretches(self)
        raise OSError(5, "Input/output error")

    with directories() as places:
        await left_behind(places, names)
        async with opened(places=places, loads=False) as world:
            load = asyncio.create_task(world.daemon.load())
            await asyncio.sleep(0)
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
        with monkeypatch.context() as patch:
            patch.setattr(FiledRows, "stretches", failing)
            async with opened(places=places, loads=False) as world:
                with pytest.raises(TierFailed, match="Input/output error"):
                    await world.daemon.load()
                assert not world.cache.core.is_serving(STORE)
        async with opened(places=places) as world:
            assert len(await bytes_of(world, names)) == 5
