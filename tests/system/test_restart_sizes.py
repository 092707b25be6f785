"""A next life with other sizes or directories serves the hottest blocks that fit and reports the rest."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.golden_life import Places
from tests.unit.cache.world import World, directories, opened
from tierd.core.formats.model import Durability, TierKind
from tierd.server.session.peers import find_start_time
from tierd.testing import chain, is_content
from tierd.tiers.arena.holds import Holder, read_boot_id

CHAINS, LENGTH = 40, 8
"""Chains 1 to 40, coldest first, of 8 blocks of 8 KiB: 5 segments in memory, fewer than 4 in the
store."""
FRESH = itertools.count(101)
HOLDER_SESSION = 77 << 32


@pytest.fixture
def places() -> Iterator[Places]:
    """Directories and a second arena, all in memory, because no test here depends on a disk."""
    with directories() as one, directories() as two, directories() as three:
        yield {"root": one["arena"], "arena": two["arena"], "other": three["arena"]}


def config(
    *,
    host: str = 'capacity = "4 MiB"\nsegment = "512 KiB"',
    arena: str = "{arena}",
    nvme: str = 'capacity = "4 MiB"\nsegment = "1 MiB"',
    front: str = "",
    behind: str = "",
) -> str:
    """A configuration. front, behind: tables before and after the host tier."""
    return f"""
[server]
runtime_dir = "{{root}}/run"
state_dir = "{{root}}/state"
{front}
[[host]]
arena_dir = "{arena}"
{host}
{behind}
[[nvme]]
path = "{{root}}/nvme"
{nvme}
"""


async def _store(places: Places, text: str, durability: Durability) -> None:
    async with opened(text, places=places) as world:
        for seed in range(1, CHAINS + 1):
            await world.put(chain(seed, LENGTH), durability=durability)
            await asyncio.sleep(0.002)  # makes the next chain hotter, by the millisecond


async def _served(places: Places, text: str) -> tuple[list[int], str]:
    async with opened(text, places=places) as world:
        counts = [await _count(world, seed) for seed in range(1, CHAINS + 1)]
        for seed in itertools.islice(FRESH, 3):  # new blocks are stored too
            await world.put(chain(seed, LENGTH), durability=Durability.DURABLE)
            assert await _count(world, seed) == LENGTH
        return counts, "\n".join(notice for tier in world.daemon.tiers for notice in tier.notices)


async def _count(world: World, seed: int) -> int:
    names = chain(seed, LENGTH)
    lease = await world.acquire(names)
    rows = [row for group in lease.served.groups for row in group.extents.reshape(-1)]
    assert all(is_content(world.page(row), name) for row, name in zip(rows, names, strict=False)), "a wrong byte"
    world.cache.release(world.session, [lease.lease])
    return len(rows)


def next_life(
    places: Places, before: str, after: str, *, durability: Durability = Durability.MEMORY, is_wiped: bool = False
) -> tuple[list[int], str]:
    """Stores under `before`. Returns each chain's blocks and notices under `after`. is_wiped: memory lost."""
    asyncio.run(_store(places, before, durability))
    if is_wiped:
        for path in Path(places["arena"]).iterdir():
            shutil.rmtree(path)
    return asyncio.run(_served(places, after))


ALL = [LENGTH] * CHAINS
SIZE = 'capacity = "{}"\nsegment = "{}"'


def test_host_halved(places: Places) -> None:
    """With half the host memory, the daemon serves the hottest segments, drops the coldest and says so."""
    counts, said = next_life(places, config(), config(host=SIZE.format("2 MiB", "512 KiB")))
    assert counts == [0] * LENGTH + [LENGTH] * (CHAINS - LENGTH)
    assert "beyond the tier's capacity" in said


def test_store_halved(places: Places) -> None:
    """With half the store, the daemon serves the hottest segments, drops the coldest and says so."""
    smaller = config(nvme=SIZE.format("2 MiB", "1 MiB"))
    counts, said = next_life(places, config(), smaller, durability=Durability.DURABLE, is_wiped=True)
    kept = sum(count == LENGTH for count in counts)
    assert kept >= CHAINS // 3 and counts[-kept:] == [LENGTH] * kept, counts
    assert sum(counts[: -kept - 1]) == 0, counts
    assert "do not fit" in said
    again, _ = asyncio.run(_served(places, smaller))
    assert again == counts


@pytest.mark.parametrize(
    "change",
    [
        {"host": SIZE.format("8 MiB", "512 KiB")},
        {"nvme": SIZE.format("8 MiB", "1 MiB") + '\nqueue_depth = 3\ndirect = "off"'},
        {"host": SIZE.format("4 MiB", "512 KiB") + '\nverify = "always"\nhigh_watermark = 0.99'},
        {"front": '[[device]]\nkind = "cpu"\ncapacity = "1 MiB"\nsegment = "512 KiB"'},
        {"behind": '[[host]]\narena_dir = "{arena}"\ncapacity = "1 MiB"\nsegment = "512 KiB"'},
    ],
    ids=["host doubled", "store doubled", "verify", "device added", "host added"],
)
def test_nothing_is_lost(places: Places, change: dict[str, str]) -> None:
    """With more memory, a larger store, added tiers or other settings, and after a return, all is served."""
    counts, _ = next_life(places, config(), config(**change))
    assert counts == ALL
    assert asyncio.run(_served(places, config()))[0] == ALL


def test_host_segments_changed(places: Places) -> None:
    """If the host segment size changes, memory is dropped with a notice and the store serves its blocks."""
    counts, said = next_life(
        places, config(), config(host=SIZE.format("4 MiB", "1 MiB")), durability=Durability.DURABLE
    )
    assert counts == ALL and "segments of this tier now have" in said


@pytest.mark.parametrize("segment", ["512 KiB", "2 MiB"])
def test_store_segments_changed(places: Places, segment: str) -> None:
    """After a change of the store's segment size, a block is right or a miss, and new blocks are stored."""
    changed = config(nvme=SIZE.format("4 MiB", segment))
    counts, said = next_life(places, config(), changed, durability=Durability.DURABLE, is_wiped=True)
    assert counts == ALL or "do not fit" in said or sum(counts) == 0


def test_arena_moved_and_back(places: Places) -> None:
    """With another arena_dir, memory is cold and the old arena is kept; changed back, it is warm."""
    moved = config(arena="{other}")
    counts, _ = next_life(places, config(), moved)
    assert counts == [0] * CHAINS
    assert asyncio.run(_served(places, config()))[0] == ALL


def test_held_pages_when_tiers_change_places(places: Places) -> None:
    """Pages that a living client holds stay pinned when their tier's number changes."""
    front = '[[device]]\nkind = "cpu"\ncapacity = "1 MiB"\nsegment = "512 KiB"'

    async def hold(text: str, pid: int) -> None:
        async with opened(text, places=places) as world:
            start = find_start_time(pid)
            assert start is not None
            holder = Holder(HOLDER_SESSION, pid, start, read_boot_id(), os.getuid(), 1, "t")
            world.cache.open_session(HOLDER_SESSION, tenant="t", holder=holder)
            query = [world.query(chain(1, LENGTH))]
            assert (await world.cache.acquire(HOLDER_SESSION, query, kind=TierKind.HOST, timeout_s=10)).lease

    async def kept(text: str) -> tuple[int, str]:
        async with opened(text, places=places) as world:
            said = "\n".join(notice for tier in world.daemon.tiers for notice in tier.notices)
            return sum(tier.pages_pinned for tier in world.cache.core.tier_stats()), said

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as client:
        asyncio.run(_store(places, config(), Durability.MEMORY))
        asyncio.run(hold(config(), client.pid))
        for text in (config(), config(front=front), config()):
            count, said = asyncio.run(kept(text))
            assert count == LENGTH and "not known" not in said, said
        client.kill()
