"""Directories of trust domains: each lists the near blocks of its own domain, and of no other."""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.cache.world import BLOCK_BYTES, TOKENS, World, opened
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.directory import Directory
from tierd.core.formats.model import TierKind
from tierd.core.formats.words import words_of
from tierd.testing import chain

NAMES = chain(1, 4)


class Reader:
    """A client's mapping of its domain's directory."""

    def __init__(self, world: World, tenant: str) -> None:
        domain = world.cache.registry.domain_of(tenant)
        self.fd, length = world.cache.directories.give(domain)
        self.memory = mmap.mmap(self.fd, length, prot=mmap.PROT_READ)
        self.directory = Directory(words_of(self.memory, count=length // 8))

    async def places(self, namespace: int, names: np.ndarray = NAMES) -> list[tuple[int, int]]:
        """The places of those of the blocks that are entered, after pending entries are written."""
        await asyncio.sleep(0)
        found = (self.directory.place(namespace, name.tobytes()) for name in names)
        return [place for place in found if place is not None]


async def test_what_is_published_is_entered_and_what_leaves_is_not() -> None:
    """A directory lists a block from its publication until its page is freed."""
    async with opened() as world:
        reader = Reader(world, "t")
        reserved = await world.reserve(NAMES)
        assert await reader.places(world.namespace.id) == []
        await world.commit(reserved.reservation)
        lie = [
            (int(extent["tier"]) << 32 | int(extent["segment"]), int(extent["slot"])) for extent in reserved.extents[0]
        ]
        assert await reader.places(world.namespace.id) == lie
        assert await world.end_epoch() == 4
        assert await reader.places(world.namespace.id) == []


async def test_what_comes_near_is_entered_too() -> None:
    """Blocks from before the domain's first session are entered after a client asks for them."""
    async with opened() as world:
        await world.put(NAMES)
        reader = Reader(world, "t")
        assert await reader.places(world.namespace.id) == []
        query = [world.query(NAMES)]
        await world.cache.acquire(
            world.session, query, kind=TierKind.HOST, timeout_s=1.0, doubted=np.zeros(0, np.uint64)
        )
        assert len(await reader.places(world.namespace.id)) == 4


async def test_another_domain_sees_nothing_of_it() -> None:
    """Blocks of two tenants in one batch are entered in their own tenant's directory only."""
    async with opened() as world:
        world.cache.open_session(12, tenant="u")
        spec = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
        other = World(world.daemon, world.cache.open_namespace(12, spec), session=12)
        both = [await world.put(NAMES), await other.put(chain(2, 3))]
        mine, theirs = Reader(world, "t"), Reader(world, "u")
        world.cache.directories.add(
            np.concatenate([its.extents for its in both]),
            world.cache.core.metas(np.concatenate([its.blocks for its in both])),
        )
        assert len(await mine.places(world.namespace.id)) == 4
        assert len(await theirs.places(other.namespace.id, chain(2, 3))) == 3
        assert await mine.places(other.namespace.id, chain(2, 3)) == await theirs.places(world.namespace.id) == []


async def test_a_namespace_is_read_without_a_call_until_its_epoch_ends() -> None:
    """`runs` holds from a session's open of a namespace to its epoch's end, in its own directory only."""
    async with opened() as world:
        reader, theirs = Reader(world, "t").directory, Reader(world, "u").directory
        assert not reader.runs(world.namespace.id)  # the session opened it before the directory existed
        namespace = world.cache.open_namespace(world.session, replace(world.namespace.spec, rank_count=3))
        assert [reader.runs(i) for i in namespace.ids] == [True] * 3
        assert not any(theirs.runs(i) for i in namespace.ids)
        again = world.cache.open_namespace(world.session, world.namespace.spec)
        assert again == world.namespace and reader.runs(again.id)
        await world.put(NAMES)
        await world.end_epoch()
        assert not any(reader.runs(i) for i in (again.id, *namespace.ids))
        fresh = world.cache.open_namespace(world.session, world.namespace.spec)
        assert fresh.id != again.id and reader.runs(fresh.id) and not reader.runs(again.id)


async def test_a_client_can_change_nothing_of_it() -> None:
    """A client can neither map the descriptor for writing, nor resize it, nor reopen it as writable."""
    async with opened() as world:
        reader = Reader(world, "t")
        again = os.open(f"/proc/self/fd/{reader.fd}", os.O_RDWR)  # a client of the daemon's own user can do this
        for fd in (reader.fd, again):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, mmap.PAGESIZE)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        for change in (0, 1 << 30):
            with pytest.raises(OSError, match="."):
                os.ftruncate(again, change)
