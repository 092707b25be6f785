"""Levels of stores in the core: where demotion and durable puts go."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.core.kit import HOST, NVME, Kit, chain, group, tier
from tierd.core.formats.model import StructArray
from tierd.core.plan import Ids

LOW: dict[str, Any] = {"high_watermark": 0.5, "low_watermark": 0.25}
HOST_TIER, MEMORY, DISK, COLD = range(4)


def kit() -> Kit:
    """A host tier, a store in memory, a disk and a colder disk."""
    return Kit(
        tier(HOST, 8, **LOW),
        tier(NVME, 8, level=0, **LOW),
        tier(NVME, 8, index=1, **LOW),
        tier(NVME, 64, index=2, level=2, **LOW),
    )


def demoted(k: Kit) -> set[tuple[int, int]]:
    """Demotes until nothing is left to do. The links that were used, as (source, target)."""
    links = set[tuple[int, int]]()
    while True:
        k.demote()
        if not k.flying:
            return links
        links |= {(int(flight["source"]["tier"]), int(flight["target"]["tier"])) for flight in k.flying}
        k.land()


def has(k: Kit, where: int, ids: Ids) -> list[bool]:
    """Which blocks have a page in a tier."""
    return [bool(page >= 0) for page in k.core.extents(ids, tier=where)["page"]]


def on_disk_and_in_memory() -> tuple[Kit, StructArray]:
    """A kit after a durable put of four blocks, and demotion of some of them; and their names."""
    k, names = kit(), chain("a", 4)
    k.put(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.land()
    k.put(chain("b", 4))
    demoted(k)
    return k, names


def test_each_level_gets_what_the_one_before_evicts() -> None:
    """Blocks go from host memory to the store in memory, on to the disk, and to the colder one."""
    k, links = kit(), set[tuple[int, int]]()
    for i in range(12):
        k.put(chain(f"{i}", 4))
        links |= demoted(k)
    assert links == {(HOST_TIER, MEMORY), (MEMORY, DISK), (DISK, COLD)}


def test_a_durable_block_goes_to_a_disk() -> None:
    """A store in memory does not make blocks durable: they go to the first disk in service."""
    k, names = kit(), chain("a", 4)
    k.put(names)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.land()
    assert [has(k, t, k.ids(names)) for t in (MEMORY, DISK, COLD)] == [[False] * 4, [True] * 4, [False] * 4]
    k.core.set_writable(DISK, writable=False)
    more = chain("b", 4)
    k.put(more)
    k.took(k.core.persist(k.ids(more), now=k.tick()))
    k.land()
    assert all(has(k, COLD, k.ids(more)))


def test_a_block_in_memory_alone_becomes_durable() -> None:
    """A durable put of a block that only the store in memory has copies it from there to the disk."""
    k, names = kit(), chain("a", 4)
    k.put(names)
    k.put(chain("b", 4))
    k.demote()
    k.land()
    ids = k.ids(names)
    k.took(k.core.evict(ids, tier=HOST_TIER, now=k.tick()))
    there = np.asarray(has(k, MEMORY, ids))
    assert there.any()
    k.took(k.core.persist(ids[there], now=k.tick()))
    assert {(int(f["source"]["tier"]), int(f["target"]["tier"])) for f in k.flying} == {(MEMORY, DISK)}
    k.land()
    assert all(has(k, DISK, ids[there]))


def test_blocks_of_a_disk_go_to_memory_too() -> None:
    """A block that a disk holds is written to the store in memory before host memory drops it."""
    k, names = on_disk_and_in_memory()
    assert any(has(k, MEMORY, k.ids(names)))


def test_a_memory_out_of_service_is_passed_over() -> None:
    """If the store in memory takes nothing, blocks go to the disk."""
    k = kit()
    k.core.set_writable(MEMORY, writable=False)
    k.put(chain("a", 4))
    k.put(chain("b", 4))
    assert demoted(k) == {(HOST_TIER, DISK), (DISK, COLD)}


def test_a_block_comes_from_the_nearest_level() -> None:
    """A get reads the store in memory, not a disk that has the block too."""
    k, names = on_disk_and_in_memory()
    near = [i for i, is_there in enumerate(has(k, MEMORY, k.ids(names))) if is_there]
    k.took(k.core.evict(k.ids(names), tier=HOST_TIER, now=k.tick()))
    acquired = k.acquire(group(names))
    sources = {int(f["block"]): int(f["source"]["tier"]) for f in k.flying}
    assert near and all(sources[int(k.ids(names)[i])] == MEMORY for i in near)
    k.land()
    assert k.settle(acquired).tokens == 64


def test_constant_puts_leave_the_disk_its_share() -> None:
    """While each plan is full of blocks from host memory, blocks of the store in memory are written
    to the disk too. So none is lost."""
    k, count = Kit(tier(HOST, 64, **LOW), tier(NVME, 64, level=0, **LOW), tier(NVME, 512, index=1)), 60
    for i in range(count):
        k.put(chain(f"{i}", 4))
        k.demote(limit=4)
        k.land()
    assert all((k.ids(chain(f"{i}", 4)) >= 0).all() for i in range(count))
