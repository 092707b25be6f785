"""Slots that are torn, misplaced or restored from the past give a miss or the right bytes.

The store is real; `MISPLACED_SEED=` selects other pairs.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from tests.depth import count, report
from tests.unit.tiers.store_world import CLASS_BYTES, PAGES, World, content
from tierd.core.formats.model import BlockStatus
from tierd.tiers.store.slots import HEADER_BYTES
from tierd.tiers.store.store_files import slots_path

SEED = int(os.environ.get("MISPLACED_SEED", "1"))
KEYS = list(range(100, 100 + 2 * PAGES))
"""Keys of a store's blocks: two full segments."""
CUTS = [*range(HEADER_BYTES + 1), *range(HEADER_BYTES, CLASS_BYTES, 512)]
SWAPS = count(test=200, nightly=10_000, weekly=20_000)


class Slot(NamedTuple):
    """The place of a slot of the test's stores."""

    path: Path
    offset: int

    def read(self) -> bytes:
        """The slot's bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(CLASS_BYTES)

    def write(self, data: bytes, *, at: int = 0) -> None:
        """Writes bytes to the slot."""
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, data, self.offset + at)
        finally:
            os.close(fd)


def slot_of(home: Path, number: int) -> Slot:
    """The slot of the block KEYS[number]."""
    return Slot(slots_path(home, number // PAGES), number % PAGES * CLASS_BYTES)


async def _filled(home: Path) -> World:
    world = World.at(home)
    await world.open()
    for segment in (0, 1):
        await world.begin(segment + 1, place=segment)
        keys = KEYS[segment * PAGES : (segment + 1) * PAGES]
        assert await world.write(keys, segment=segment + 1, slots=range(PAGES)) == [BlockStatus.READY] * PAGES
    return world


@pytest_asyncio.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[World]]:
    """Two stores with the same blocks in the same slots, of the same generations."""
    worlds = [await _filled(tmp_path / name) for name in ("one", "two")]
    yield worlds
    for world in worlds:
        await world.store.close(release=False)


async def _judge(world: World, keys: list[int]) -> Counter[str]:
    """Counts the reads of these blocks as `right` or `miss`; any other result fails."""
    said: Counter[str] = Counter()
    for key, found in zip(keys, await world.read(keys), strict=True):
        if isinstance(found, bytes):
            assert found == content(key), f"block {key}: wrong bytes"
        else:
            assert found == BlockStatus.CORRUPT
        said["right" if isinstance(found, bytes) else "miss"] += 1
    return said


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rest", ["zeros", "another block", "an older life"])
async def test_torn(stores: list[World], tmp_path: Path, rest: str) -> None:
    """A slot cut at any header byte or payload sector, with other bytes behind, is a miss or right."""
    world, slot = stores[0], slot_of(tmp_path / "one", 3)
    older = slot.read()
    world.free([KEYS[3]])
    await world.write([KEYS[3]], segment=1, slots=[3])  # the same block, of a later generation
    whole = slot.read()
    behind = {"zeros": bytes(CLASS_BYTES), "another block": slot_of(tmp_path / "one", 4).read(), "an older life": older}
    said: Counter[str] = Counter()
    for cut in _cuts():
        slot.write(whole[:cut] + behind[rest][cut:])
        said += await _judge(world, [KEYS[3]])
    slot.write(whole)
    assert await _judge(world, [KEYS[3]]) == {"right": 1}
    report("torn slots", rest=rest, cuts=said.total(), **said)
    assert said["miss"] >= len([cut for cut in _cuts() if cut < 256])


def _cuts() -> list[int]:
    """All cuts at night; else every byte of META and of the slice table, and one in 64 of the rest."""
    return CUTS if count(test=0, nightly=1, weekly=1) else CUTS[:300] + CUTS[300::64]


@pytest.mark.timeout(3600)
async def test_swapped(stores: list[World], tmp_path: Path) -> None:
    """Two slots swapped, whole or in part, within a segment, a store or between stores, are misses."""
    chance, said = random.Random(SEED), Counter[str]()
    for _ in range(SWAPS):
        across = chance.random() < 0.3
        first, second = chance.sample(range(len(KEYS)), 2)
        second = first if across and chance.random() < 0.5 else second  # of another store: even the same block
        one, other = slot_of(tmp_path / "one", first), slot_of(tmp_path / ("two" if across else "one"), second)
        at, length = chance.choice([(0, CLASS_BYTES), (0, HEADER_BYTES), (HEADER_BYTES, CLASS_BYTES - HEADER_BYTES)])
        before, behind = one.read(), other.read()
        one.write(behind[at : at + length], at=at)
        other.write(before[at : at + length], at=at)
        found = await _judge(stores[0], [KEYS[first]]) + await _judge(stores[1 if across else 0], [KEYS[second]])
        # The same block of another store is foreign too: only its payload alone belongs there.
        expected = {"right": 2} if first == second and at == HEADER_BYTES else {"miss": 2}
        assert found == expected, (first, second, at, length, across)
        said += found
        one.write(before)
        other.write(behind)
    for world in stores:
        assert await _judge(world, KEYS) == {"right": len(KEYS)}
    report("swapped slots", seed=SEED, pairs=SWAPS, **said)


@pytest.mark.timeout(3600)
async def test_earlier_occupant(stores: list[World], tmp_path: Path) -> None:
    """An earlier image put back in a slot makes its current block a miss, the same block or not."""
    world, said = stores[0], Counter[str]()
    for turn in range(count(test=20, nightly=2_000, weekly=2_000)):
        number = turn % len(KEYS)
        slot, key = slot_of(tmp_path / "one", number), KEYS[number]
        image = slot.read()
        held = next(k for k, (extent, _) in world.held.items() if _lies_at(extent, number))
        new = key if turn % 3 == 0 else 10_000 + turn
        world.free([held])
        await world.write([new], segment=number // PAGES + 1, slots=[number % PAGES])
        now = slot.read()
        slot.write(image)
        said += await _judge(world, [new])
        slot.write(now)
        assert await _judge(world, [new]) == {"right": 1}
    assert said["right"] == 0
    report("earlier occupants", images=said.total(), **said)


def _lies_at(extent: object, number: int) -> bool:
    return bool(extent["segment"][0] == number // PAGES + 1 and extent["slot"][0] == number % PAGES)  # type: ignore[index]


@pytest.mark.parametrize("what", ["seg-*", "journal-*", "snapshot-*", "[js]*-*", "*-*"])
async def test_files_put_back(tmp_path: Path, what: str) -> None:
    """With older slot files, journal or snapshot put back, the store opens; blocks are right or a miss."""
    home, old = tmp_path / "store", tmp_path / "old"
    world = await _filled(home)
    await world.store.close(release=False)
    shutil.copytree(home, old)
    world = World.at(home)
    await world.open()
    world.free(KEYS[: PAGES // 2])
    await world.write([7000 + i for i in range(PAGES // 2)], segment=1, slots=range(PAGES // 2))
    world.free(KEYS[PAGES:])
    await world.begin(9, place=1)
    await world.write([8000 + i for i in range(PAGES)], segment=9, slots=range(PAGES))
    await world.store.close(release=False)
    for path in home.glob("[js]*-*") if what == "*-*" else []:
        path.unlink()  # removes all later files
    for path in old.glob(what):
        shutil.copy(path, home / path.name)
    world = World.at(home)
    await world.open()
    said = await _judge(world, list(world.held))
    await world.store.close(release=False)
    assert said.total() > 0 and (what != "*-*" or said == {"right": len(KEYS)})
    report("files put back", files=what, **said)
