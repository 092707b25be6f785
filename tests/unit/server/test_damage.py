"""Files damaged between two runs: the next run serves the rest, or refuses with an error of ours.

It never serves a wrong byte, nor gives away memory of a living client of the previous run, even if
the session table is damaged. All of the daemon runs but its sockets. DAMAGE_SEED repeats a seed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.depth import count, report
from tests.unit.cache.world import World, directories, opened
from tierd.core.formats.model import BlockStatus, Durability, StructArray
from tierd.errors import TierdError
from tierd.server.session.peers import find_start_time
from tierd.testing import chain, is_content
from tierd.tiers.arena.arena import Arena
from tierd.tiers.arena.holds import Holder, read_boot_id

SEED = int(os.environ.get("DAMAGE_SEED", "1"))
DURABLE, VOLATILE, HELD, JOURNALED = chain(1, 12), chain(2, 12), chain(3, 4), chain(4, 4)
"""Blocks in the store's snapshot; in memory only; leased by a living client; in the store's journal."""
EVERYTHING = (DURABLE, VOLATILE, HELD, JOURNALED)
WHOLE = sum(map(len, EVERYTHING))
STORE_FILES = ("store.json", "snapshot-*.bin", "journal-*.log")
"""These are damaged after memory is wiped, because memory would serve their blocks."""
HOLDER_SESSION = 77 << 32
PRESSURE = 8
"""Reservations of 64 blocks that fill the host tier once."""
HEADS = {
    "*.cat": 128,
    "arena.tbl": 56,
    "sessions.tbl": 24,
    "namespaces.log": 48,
    "store.json": 64,
    "snapshot-*.bin": 88,
    "journal-*.log": 64,
    "namespaces.jsonl": 96,
    "instance": 16,
}
"""Files, and the number of bytes from their start that are damaged one by one."""


@dataclass(frozen=True)
class Left:
    """The files of a killed daemon. held: EXTENT of the pages that a living process holds."""

    keep: Path
    places: dict[str, str]
    held: StructArray

    def put_back(self) -> set[tuple[int, int]]:
        """Restores all files. Returns the held pages' inodes and offsets."""
        for name, path in self.places.items():
            shutil.rmtree(path)
            shutil.copytree(self.keep / name, path)
        return {(self._inode(int(row["segment"])), int(row["offset"])) for row in self.held}

    def wipe_memory(self) -> None:
        """Removes all memory files, as a reboot does."""
        for path in Path(self.places["arena"]).iterdir():
            shutil.rmtree(path)

    def find(self, pattern: str) -> list[Path]:
        """Files of that name."""
        return [path for place in self.places.values() for path in sorted(Path(place).rglob(pattern))]

    def _inode(self, segment: int) -> int:
        (path,) = self.find(f"{segment}.data")
        return path.stat().st_ino


@pytest.fixture(scope="module")
def client() -> Iterator[int]:
    """The pid of a process that outlives all tests of the module."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def left(client: int, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Left]:
    """Two runs: one that ended, which writes a snapshot, and one that was killed."""
    keep = tmp_path_factory.mktemp("kept")
    with directories() as places:
        async with opened(places=places) as world:
            await world.put(DURABLE, durability=Durability.DURABLE)
            assert await world.daemon.cache.flights.idle(timeout_s=10)
        async with opened(places=places) as world:
            await world.put(VOLATILE)
            await world.put(HELD)
            await world.put(JOURNALED, durability=Durability.DURABLE)
            start = find_start_time(client)
            assert start is not None
            holder = Holder(HOLDER_SESSION, client, start, read_boot_id(), os.getuid(), 1, "t")
            world.cache.open_session(HOLDER_SESSION, tenant="t", holder=holder)
            lease = await world.cache.acquire(
                HOLDER_SESSION, [world.query(HELD)], kind=world.daemon.tiers[0].spec.kind, timeout_s=10
            )
            held = lease.served.groups[0].extents.reshape(-1).copy()
            for name, path in places.items():  # as after a kill: the daemon does not know
                shutil.copytree(path, keep / name)
        yield Left(keep, places, held)


def change(path: Path, at: int, chance: random.Random) -> None:
    """Changes one byte to another value."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([chance.choice([old ^ (1 << chance.randrange(8)), old ^ 0xFF, 0 if old else 0x80])]))


def used(path: Path, *, beyond: int) -> list[int]:
    """Offsets of bytes that are not zero, from one on."""
    found = np.flatnonzero(np.fromfile(path, dtype=np.uint8))
    return [int(at) for at in found[found >= beyond]]


async def served(world: World) -> int:
    """The number of served blocks, with each byte compared."""
    blocks = 0
    for names in EVERYTHING:
        lease = await world.acquire(names)
        extents = [row for group in lease.served.groups for row in group.extents.reshape(-1)]
        for row, name in zip(extents, names, strict=False):
            assert is_content(world.page(row), name), "a wrong byte"
        world.cache.release(world.session, [lease.lease])
        blocks += len(extents)
    return blocks


async def given(world: World) -> set[tuple[int, int]]:
    """Evicts, loads from the store, and fills the host tier twice. Returns the host pages handed out."""
    tier = world.daemon.tiers[0]
    assert isinstance(tier, Arena)
    core = world.cache.core
    ids = [core.find_block(world.namespace.id, name.tobytes()) for name in (*HELD, *DURABLE)]
    there = np.array([i for i in ids if i is not None], dtype=np.int64)
    world.cache.flights.start(core.evict(there, tier=0, now=world.cache.clock.now()))
    lease = await world.acquire(DURABLE)
    pages = set[tuple[int, int]]()
    for group in lease.served.groups:
        pages |= _places(tier, group.extents.reshape(-1))
    world.cache.release(world.session, [lease.lease])
    for turn in range(2 * PRESSURE):
        reserved = await world.reserve(chain(1000 + turn, 64))
        rows = reserved.extents[0][reserved.statuses[0] == BlockStatus.RESERVED]
        assert len(rows), "it serves, but takes nothing"
        pages |= _places(tier, rows)
        await world.commit(reserved.reservation)
    return pages


def _places(tier: Arena, rows: StructArray) -> set[tuple[int, int]]:
    """Inode and offset of EXTENT [n]."""
    inodes = {int(s): (Path(tier.place) / f"{s}.data").stat().st_ino for s in np.unique(rows["segment"])}
    return {(inodes[int(row["segment"])], int(row["offset"])) for row in rows}


async def start(left: Left, held: set[tuple[int, int]]) -> str:
    """The outcome of the next run: the name of its error, or the number of blocks that it serves."""
    try:
        async with opened(places=left.places) as world:
            blocks = await served(world)
            assert not held & await given(world), "a page that a living client holds was given away"
            return str(blocks)
    except TierdError as error:
        return type(error).__name__


@pytest.mark.asyncio(loop_scope="module")
async def test_undamaged(left: Left) -> None:
    """Without damage every block is served, and held pages are not given away."""
    held = left.put_back()
    assert await start(left, held) == str(WHOLE)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pattern", HEADS)
async def test_damaged_file(left: Left, pattern: str) -> None:
    """A changed byte in the head, or in a sample of the rest, loses blocks or gives an error of ours."""
    chance = random.Random(f"{SEED} {pattern}")
    left.put_back()
    places = [(path, range(min(HEADS[pattern], path.stat().st_size))) for path in left.find(pattern)]
    assert places, f"no {pattern}"
    heads = [(path, at) for path, head in places[:1] for at in head]
    bodies = [(path, at) for path, head in places for at in used(path, beyond=len(head))]
    wanted = count(test=1, nightly=len(heads), weekly=4 * len(heads))
    cases = [heads[i % len(heads)] for i in range(wanted)] if wanted >= len(heads) else chance.sample(heads, wanted)
    cases += chance.choices(bodies, k=count(test=1, nightly=20, weekly=300)) if bodies else []
    outcomes = Counter[str]()
    for path, at in cases:
        held = left.put_back()
        if pattern in STORE_FILES:
            left.wipe_memory()
        change(path, at, chance)
        try:
            outcomes[await start(left, held)] += 1
        except Exception as error:
            raise AssertionError(f"DAMAGE_SEED={SEED}: byte {at} of {path.name}") from error
    report(f"damage to {pattern}", seed=SEED, starts=len(cases), outcomes=dict(outcomes))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "zeros", "holders gone"])
async def test_lost_session_table(left: Left, how: str) -> None:
    """With a missing or damaged session table blocks are served, and held pages stay with their client."""
    held = left.put_back()
    (path,) = left.find("sessions.tbl")
    length = path.stat().st_size
    if how == "gone":
        path.unlink()
    elif how in ("empty", "cut"):
        os.truncate(path, 0 if how == "empty" else 5000)
    else:
        with path.open("r+b") as file:
            file.seek(0 if how == "zeros" else 4096)
            file.write(bytes(length if how == "zeros" else 8192))
    async with opened(places=left.places) as world:
        assert await served(world) == WHOLE
    assert await start(left, held) == str(WHOLE)


async def extent_of(world: World, seed: int) -> Any:
    """The extent of a seed's block after a hit whose lease has ended; None after a miss."""
    lease = await world.acquire(chain(seed, 1))
    world.cache.release(world.session, [lease.lease])
    return lease.served.groups[0].extents.reshape(-1)[0].copy() if lease.served.tokens else None


async def test_first_hit_of_every_block_is_verified() -> None:
    """A page that was changed while the daemon was down is a counted miss at its first hit; others hit."""
    pages, chance = count(test=48, nightly=300, weekly=400), random.Random(SEED)
    with directories() as places:
        async with opened(places=places) as world:
            for seed in range(pages):
                await world.put(chain(seed, 1))
            extents = [await extent_of(world, seed) for seed in range(pages)]
            tier = world.daemon.tiers[0]
        damaged = set(chance.sample(range(pages), pages // 2))
        for seed in damaged:
            at = int(extents[seed]["offset"]) + chance.randrange(int(extents[seed]["length"]))
            change(Path(tier.place) / f"{extents[seed]['segment']}.data", at, chance)
        async with opened(places=places) as world:
            hits = [await extent_of(world, seed) is not None for seed in range(pages)]
            corrupt = world.cache.metrics.counters()['tierd_corrupt_total{tier="host.0"}']
    assert [seed for seed, hit in enumerate(hits) if not hit] == sorted(damaged)
    assert corrupt == len(damaged)
    report("host pages damaged while down", seed=SEED, pages=pages, damaged=len(damaged), misses=hits.count(False))


@pytest.mark.parametrize("is_known", [False, True], ids=["table gone", "table whole"])
@pytest.mark.asyncio(loop_scope="module")
async def test_nobodys_pages_are_verified_at_every_hit(left: Left, is_known: bool) -> None:
    """If writers are unknown, each hit verifies the page; otherwise only the first hit does."""
    left.put_back()
    if not is_known:
        left.find("sessions.tbl")[0].unlink()
    async with opened(places=left.places) as world:
        names = VOLATILE[:1]
        lease = await world.acquire(names)
        extent = lease.served.groups[0].extents.reshape(-1)[0].copy()
        world.cache.release(world.session, [lease.lease])
        world.page(extent)[5] ^= 1
        assert bool((await world.acquire(names)).served.tokens) is is_known
        world.page(extent)[5] ^= 1
