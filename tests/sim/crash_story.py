"""A life of a real NVMe store on a simulated disk, and its promises, which a crash must not break.

Blocks have few names, and the store gets each name again and again with other bytes: a block of an
earlier time shows. The story notes promises outside the store, when a call returns.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from tests.sim.disk import DiskFaults, SimDisk
from tests.unit.tiers.store_world import (
    content,
    extents_of,
    freed,
    judged,
    metas_of,
    pages,
    segment,
    spec,
    table_digest,
    tables_of,
    told,
)
from tierd.core.formats.model import BlockStatus, SegmentAssignment, StructArray
from tierd.core.plan import Plan
from tierd.errors import TierFailed
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.store.slots import HEADER_BYTES, read_tables
from tierd.tiers.tier import Recovered

HOME = Path("/sim/store")
NAMES = 20
"""Number of block names: few, so that a block often takes a slot that had its name before."""
PLACES, PAGES, CLASS_BYTES = 3, 8, 3 * 4096
TROUBLES = ("failed_sync", "failed_sync", "no_space", "write_error", "write_short")
"""Disk faults that a store must also survive without a crash; the first is the worst."""
LENGTHS = (64, 700, 4096, 5000, 8192)
"""Block lengths in bytes; all blocks of a name have one length."""
LAST = 0
"""The key of the block that `judge` stores in a recovered store; no story uses it."""


class Violation(AssertionError):
    """A crash has broken a promise."""


@dataclass
class Promise:
    """The state that must survive if the machine dies now. spaces: acknowledged namespaces.
    blocks: name to key, acknowledged durable and not removed since. next_segment, next_generation:
    as the present life found them."""

    blocks: dict[int, int] = field(default_factory=dict)
    spaces: set[bytes] = field(default_factory=set)
    next_segment: int = 0
    next_generation: int = 0

    def copy(self) -> Promise:
        return Promise(dict(self.blocks), set(self.spaces), self.next_segment, self.next_generation)


@dataclass
class Book:
    """Every block that the store ever got. A key is one block: name and length follow from it."""

    keys: dict[bytes, int] = field(default_factory=dict)
    """Keys by digest."""
    spaces: set[bytes] = field(default_factory=set)
    segments: set[tuple[int, ...]] = field(default_factory=set)
    """Place, segment, class and pages of each segment that began."""

    def new(self, names: list[int]) -> list[int]:
        """A new key for each name, recorded under its digest."""
        base = (len(self.keys) + 1) * NAMES
        keys = [base + i * NAMES + name for i, name in enumerate(names)]
        for key in keys:
            self.keys[table_digest(tables_of([key], length_of(key))[0])] = key
        return keys


def length_of(key: int) -> int:
    return LENGTHS[key % NAMES % len(LENGTHS)]


def metas_named(keys: list[int]) -> StructArray:
    """META of blocks, each under its name."""
    metas = np.concatenate([metas_of([key], length_of(key)) for key in keys])
    metas["hash"] = 0
    metas["hash"][:, 0] = [key % NAMES for key in keys]
    return metas


def store_on(disk: SimDisk) -> NvmeStore:
    store = NvmeStore(spec(places=PLACES, segment_bytes=PAGES * CLASS_BYTES), position=2, path=HOME, queue_depth=4)
    store.disk = disk
    return store


class Story:
    """Seeded operations on a store, life after life. promise: at present. log: operations, to
    read."""

    def __init__(self, chance: Random) -> None:
        self.disk = SimDisk(Random(chance.random()))
        self.promise = Promise()
        self.book = Book()
        self.log: list[str] = []
        self._chance = chance
        self._store: NvmeStore
        self._segments: dict[int, int] = {}  # by place
        self._held: dict[int, StructArray] = {}  # name to its extent, READY or recovered, and not removed
        self._keys: dict[int, int] = {}
        self._spaces: set[bytes] = set()
        self._busy: set[object] = set()  # names, slots and places in flight
        self._next_segment = self._next_generation = 1

    async def live(self, steps: int) -> None:
        """Runs at least this many operations, some of them several at once."""
        await self._open()
        acts = (self._write, self._sync, self._remove, self._begin, self._name_space, self._wait)
        while steps > 0:
            chosen = self._chance.choices(acts, (10, 8, 1, 1, 2, 1), k=self._chance.choice((1, 1, 2, 4)))
            steps -= len(chosen)
            is_bad = self._chance.random() < 0.15
            trouble = self._chance.choice(TROUBLES)
            self.disk.faults = DiskFaults(**{trouble: 0.5 * is_bad})
            self.log += [f"trouble: {trouble}"] * is_bad
            ends = await asyncio.gather(*(act() for act in chosen), return_exceptions=True)
            self.disk.faults = DiskFaults()
            self._busy.clear()
            for end in ends:
                if end is not None and not ((is_bad or self._store.health().fault) and isinstance(end, TierFailed)):
                    raise end
            await self._see_to_it()

    async def _see_to_it(self) -> None:
        """After a failed sync, mends or restarts the store or does nothing; may restart a sound
        one."""
        is_ill = bool(self._store.health().fault)
        if is_ill and self._chance.random() < 0.6:
            self.log.append("mend")
            self.disk.faults = DiskFaults(failed_sync=0.2 * (self._chance.random() < 0.2))
            with suppress(TierFailed):
                await self._store.probe()
            self.disk.faults = DiskFaults()
        elif self._chance.random() < (0.3 if is_ill else 0.05):
            await self._restart(is_killed=self._chance.random() < 0.5)

    async def _open(self) -> None:
        """Opens the store and checks every promise. Recovered blocks count as durable."""
        self._store = store_on(self.disk)
        found = (await self._store.open()).gathered()
        self._keys = await judge_found(self._store, found, promise=self.promise, book=self.book)
        self.promise = Promise(dict(self._keys), set(found.namespaces), found.next_segment, found.next_generation)
        self._spaces = set(found.namespaces)
        self._held = {name: found.extents[i : i + 1] for i, name in enumerate(names_in(found))}
        self._segments = {s.slot: s.segment for s in found.segments}
        self._next_segment, self._next_generation = found.next_segment, found.next_generation

    async def _restart(self, *, is_killed: bool) -> None:
        self.log.append("SIGKILL, open" if is_killed else "close, open")
        if is_killed:
            self.disk.end_process()
        else:
            kept = self._kept()
            await self._store.close(release=False)
            if not self._store.health().fault:
                self.promise.blocks.update(kept)
        await self._open()

    async def _write(self) -> None:
        places = [place for place in self._segments if place not in self._busy]
        names = [name for name in range(NAMES) if name not in self._busy]
        if not places or not names:
            return await self._begin()
        place = self._chance.choice(places)
        slots = [slot for slot in range(PAGES) if (place, slot) not in self._busy]
        many = self._chance.randint(1, min(3, len(slots), len(names))) if slots else 0
        if not many:
            return None
        slots, names = sorted(self._chance.sample(slots, many)), self._chance.sample(names, many)
        number = self._segments[place]
        self._put_back(names, number, slots)
        self._free(
            [n for n, e in self._held.items() if n in names or (e["segment"][0] == number and e["slot"][0] in slots)]
        )
        taken: set[object] = {place, *names, *((place, slot) for slot in slots)}
        self._busy |= taken
        await self._store_blocks(number, slots, names)
        self._busy -= taken
        return None

    def _put_back(self, names: list[int], number: int, slots: list[int]) -> None:
        """Often gives a block the slot that another block of its name had."""
        if self._chance.random() < 0.5:
            there = {int(e["slot"][0]): n for n, e in self._held.items() if e["segment"][0] == number}
            for i, slot in enumerate(slots):
                name = there.get(slot, names[i])
                if name not in self._busy and name not in names:
                    names[i] = name

    async def _store_blocks(self, number: int, slots: list[int], names: list[int]) -> None:
        keys = self.book.new(names)
        extents = extents_of(number, slots, generation=self._next_generation)
        extents["length"] = [length_of(key) for key in keys]
        self._next_generation += len(keys)
        self.log.append(f"write names {names} into segment {number}, slots {slots}")
        self._store.apply(Plan(reserved=extents))
        sources = pages(len(keys))
        for key, source in zip(keys, sources, strict=True):
            source[: length_of(key)] = content(key, length_of(key))
        tables = [tables_of([key], length_of(key))[0] for key in keys]
        statuses = await self._store.write(extents, metas_named(keys), told(tables), sources)
        for i in np.flatnonzero(statuses == BlockStatus.READY).tolist():
            self._held[names[i]], self._keys[names[i]] = extents[i : i + 1], keys[i]

    async def _sync(self) -> None:
        keys, spaces = self._kept(), set(self._spaces)
        self.log.append("sync")
        await self._store.sync()
        self.promise.blocks.update({name: key for name, key in keys.items() if self._keys.get(name) == key})
        self.promise.spaces |= spaces

    def _kept(self) -> dict[int, int]:
        """The blocks that the store still holds."""
        return {name: key for name, key in self._keys.items() if self._store.holds(self._held[name]).all()}

    async def _remove(self) -> None:
        names = [name for name in self._held if name not in self._busy]
        self._free(self._chance.sample(names, min(len(names), self._chance.randint(1, 3))))

    def _free(self, names: list[int]) -> None:
        if not names:
            return
        self.log.append(f"remove names {names}")
        extents = [self._held.pop(name) for name in names]
        for name in names:
            self._keys.pop(name, None)  # an unreadable recovered block has no key
            self.promise.blocks.pop(name, None)
        self._store.apply(Plan(freed=freed(np.concatenate(extents))))

    async def _begin(self) -> None:
        place = self._chance.randrange(PLACES)
        if place in self._busy or (place in self._segments and self._chance.random() < 0.6):
            return
        number, before = self._next_segment, self._segments.get(place)
        self._next_segment += 1
        self._free([n for n, e in self._held.items() if e["segment"][0] == before])
        self.log.append(f"begin segment {number} at place {place}")
        self._busy.add(place)
        begun = segment(number, place=place, pages=PAGES, class_bytes=CLASS_BYTES)
        self.book.segments.add(shape(begun))
        self._store.apply(Plan(segments=[begun]))
        await self._store.prepare([begun])
        self._segments[place] = number
        self._busy.discard(place)

    async def _name_space(self) -> None:
        record = b"space %d " % len(self.book.spaces) + bytes(range(1, 250)) * 3
        self.book.spaces.add(record)
        self._spaces.add(record)
        self.log.append(f"keep {record[:9]!r}")
        await self._store.keep_namespace(record)

    async def _wait(self) -> None:
        await asyncio.sleep(self._chance.choice((0.001, 1.5)))


def names_in(found: Recovered) -> list[int]:
    """Names of recovered blocks, readable or not, in their order."""
    return [int(name) for name in found.metas["hash"][:, 0]]


def shape(it: SegmentAssignment) -> tuple[int, ...]:
    """A tuple that identifies a segment."""
    return it.slot, it.segment, it.class_bytes, it.pages


async def judge(disk: SimDisk, promise: Promise, book: Book) -> None:
    """Opens the store after a crash and checks everything. Raises Violation."""
    store = store_on(disk)
    found = (await store.open()).gathered()
    await judge_found(store, found, promise=promise, book=book)
    _judge_marks(disk, found)
    disk.before_change = None  # the recovery ends here
    await _go_on(store, found)


async def judge_found(store: NvmeStore, found: Recovered, *, promise: Promise, book: Book) -> dict[int, int]:
    """Name to key of every readable block. Raises Violation."""
    if found.next_segment < promise.next_segment or found.next_generation < promise.next_generation:
        raise Violation(f"marks went back from {promise} to {found.next_segment}, {found.next_generation}")
    if not promise.spaces <= set(found.namespaces) <= book.spaces:
        known = [sorted(s[:9] for s in spaces) for spaces in (promise.spaces, found.namespaces, book.spaces)]
        raise Violation("namespaces: {} were acknowledged, {} are there, {} were kept".format(*known))
    if not {shape(it) for it in found.segments} <= book.segments:
        raise Violation(f"of {found.segments} not all ever began")
    if len(set(names_in(found))) < len(found.metas):
        raise Violation(f"a name is there twice in {sorted(names_in(found))}")
    there = await _judge_blocks(store, found, book)
    lost = {name: key for name, key in promise.blocks.items() if there.get(name) != key}
    if lost:
        raise Violation(f"names {sorted(lost)} were acknowledged durable and are gone; there are {sorted(there)}")
    return there


async def _judge_blocks(store: NvmeStore, found: Recovered, book: Book) -> dict[int, int]:
    there: dict[int, int] = {}
    if not len(found.metas):
        return there
    targets = pages(len(found.metas))
    result = await store.read(found.extents, targets, found.metas)
    for meta, status, table, target in zip(found.metas, result.statuses, result.slices, targets, strict=True):
        if status != BlockStatus.READY:
            continue
        if table_digest(table) != meta["digest"].tobytes():
            raise Violation(f"the slot of {meta['hash'][0]} is another block's, and the store calls it READY")
        data = judged(int(status), target, meta, table)
        if isinstance(data, int):
            continue
        key = book.keys.get(meta["digest"].tobytes())
        name = int(meta["hash"][0])
        if key is None or key % NAMES != name or data != content(key, length_of(key)):
            raise Violation(f"name {name} has bytes that were never stored under it")
        there[name] = key
    return there


def _judge_marks(disk: SimDisk, found: Recovered) -> None:
    """Checks that the next numbers are above those of every slot on this disk."""
    for place in range(PLACES):
        slots = np.frombuffer(disk.get(HOME / f"seg-{place:06d}.slots"), dtype=np.uint8).reshape(PAGES, CLASS_BYTES)
        metas, tables = read_tables(np.ascontiguousarray(slots[:, :HEADER_BYTES]))
        used = metas[[table is not None for table in tables]]
        if len(used) and int(used["generation"].max()) >= found.next_generation:
            raise Violation(
                f"generation {used['generation'].max()} is on the disk, and {found.next_generation} is next"
            )
        if len(used) and int(used["segment"].max()) >= found.next_segment:
            raise Violation(f"segment {used['segment'].max()} is on the disk, and {found.next_segment} is next")


async def _go_on(store: NvmeStore, found: Recovered) -> None:
    """Checks that the store accepts a block and makes it durable."""
    begun = segment(found.next_segment, place=0, pages=PAGES, class_bytes=CLASS_BYTES)
    store.apply(Plan(segments=[begun]))
    await store.prepare([begun])
    length = length_of(LAST)
    extents = extents_of(begun.segment, [0], generation=found.next_generation, length=length)
    store.apply(Plan(reserved=extents))
    status = await store.write(extents, metas_named([LAST]), told(tables_of([LAST], length)), pages(1))
    await store.sync()
    if status.tolist() != [BlockStatus.READY]:
        raise Violation("the store that was recovered takes no block")
