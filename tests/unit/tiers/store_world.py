"""A small NVMe store and its surroundings: pages of memory, blocks with bytes by their key, plans."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from tierd.checksum import slice_sums
from tierd.core.formats.block import slice_lengths
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import EXTENT, FREED, BlockStatus, SegmentAssignment, StructArray, TierKind, TierSpec
from tierd.core.plan import Plan
from tierd.tiers.store import store_files
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.tier import HashRows, Recovered, SliceTable

POSITION = 2
READY, FAILED, CORRUPT = BlockStatus.READY, BlockStatus.FAILED, BlockStatus.CORRUPT
CLASS_BYTES = 64 << 10
PAGES = 8
SEGMENT_BYTES = CLASS_BYTES * PAGES
PLACES = 4
LENGTH = 50_000
"""Bytes of a block: no multiple of 4 KiB, and less than its slot has."""
LAYERS = 5


def content(key: int, length: int = LENGTH) -> bytes:
    """The bytes of a block: a function of its key."""
    return np.random.default_rng(key).bytes(length)


def spec(*, places: int = PLACES, segment_bytes: int = SEGMENT_BYTES) -> TierSpec:
    return TierSpec(TierKind.NVME, 0, places * segment_bytes, segment_bytes, slot_overhead_bytes=4096)


def segment(number: int, *, place: int = 0, pages: int = PAGES, class_bytes: int = CLASS_BYTES) -> SegmentAssignment:
    return SegmentAssignment(POSITION, place, number, 1, class_bytes, pages, 0, None, False)


def extents_of(number: int, slots: Sequence[int], *, generation: int, length: int = LENGTH) -> StructArray:
    rows = np.zeros(len(slots), dtype=EXTENT)
    rows["tier"], rows["segment"], rows["slot"], rows["length"] = POSITION, number, slots, length
    rows["offset"] = np.array(slots, dtype=np.uint64) * CLASS_BYTES
    rows["generation"] = np.arange(len(slots)) + generation
    return rows


def metas_of(keys: Sequence[int], length: int = LENGTH) -> StructArray:
    """META rows as the core gives them: names, lengths, digests, but no place."""
    metas = new_meta(len(keys))
    metas["hash"] = np.frombuffer(b"".join(k.to_bytes(32, "little") for k in keys), dtype=np.uint8).reshape(-1, 32)
    metas["namespace"], metas["domain"], metas["tokens"], metas["layers"] = 3, 1, 16, LAYERS
    metas["stored_length"] = metas["logical_length"] = length
    for row, table in zip(metas, tables_of(keys, length), strict=True):
        row["digest"] = np.frombuffer(table_digest(table), dtype=np.uint8)
    return metas


def tables_of(keys: Sequence[int], length: int = LENGTH) -> list[np.ndarray]:
    return [slice_sums(content(k, length), slice_lengths(length, LAYERS)) for k in keys]


def table_digest(table: SliceTable) -> bytes:
    """The digest of one slice table, computed independently."""
    return xxhash.xxh3_128_digest(table.tobytes())


def told(tables: Sequence[SliceTable | None]) -> HashRows:
    """A callback that returns these tables for rows."""
    return lambda rows: [tables[row] for row in rows]


def freed(extents: StructArray) -> StructArray:
    rows = np.zeros(len(extents), dtype=FREED)
    rows["extent"], rows["was_ready"] = extents, True
    return rows


def key_of(meta: np.void) -> int:
    return int.from_bytes(meta["hash"].tobytes(), "little")


@dataclass
class World:
    """A store and its neighbours. `next_generation` counts as the core does. `held` maps a key to
    its EXTENT and META rows. With `knows`, writes pass known tables, as a host tier's do."""

    store: NvmeStore
    next_generation: int = 1
    held: dict[int, tuple[StructArray, StructArray]] = field(default_factory=dict)
    knows: bool = True

    @classmethod
    def at(cls, path: Path, **options: object) -> World:
        return cls(NvmeStore(options.pop("spec", spec()), position=POSITION, path=path, **options))  # type: ignore[arg-type]

    async def open(self) -> Recovered:
        found = (await self.store.open()).gathered()
        self.next_generation = max(self.next_generation, found.next_generation)
        self.held = {key_of(m): (found.extents[i : i + 1], found.metas[i : i + 1]) for i, m in enumerate(found.metas)}
        return found

    async def begin(self, number: int, *, place: int = 0, **changes: int) -> None:
        begun = segment(number, place=place, **changes)
        self.store.apply(Plan(segments=[begun]))
        await self.store.prepare([begun])

    async def write(
        self, keys: Sequence[int], *, segment: int, slots: Sequence[int], length: int = LENGTH
    ) -> list[int]:
        """Reserves pages with new generations and writes the blocks there."""
        extents = extents_of(segment, slots, generation=self.next_generation, length=length)
        self.next_generation += len(slots)
        self.store.apply(Plan(reserved=extents))
        metas, sources = metas_of(keys, length), pages(len(keys))
        for key, source in zip(keys, sources, strict=True):
            source[:length] = content(key, length)
        tables = tables_of(keys, length)
        statuses = await self.store.write(extents, metas, told(tables), sources, known=tables if self.knows else ())
        for i in np.flatnonzero(statuses == BlockStatus.READY):
            self.held[keys[i]] = (extents[i : i + 1], metas[i : i + 1])
        return [int(s) for s in statuses]

    def free(self, keys: Sequence[int]) -> None:
        rows = [self.held.pop(key)[0] for key in keys]
        self.store.apply(Plan(freed=freed(np.concatenate(rows))))

    async def read(self, keys: Sequence[int]) -> list[bytes | int]:
        """The mover's result for each block: bytes that passed every check, or else the status."""
        extents = np.concatenate([self.held[key][0] for key in keys])
        metas, targets = np.concatenate([self.held[key][1] for key in keys]), pages(len(keys))
        result = await self.store.read(extents, targets, metas)
        return [
            judged(int(status), view, meta, table)
            for status, view, meta, table in zip(result.statuses, targets, metas, result.slices, strict=True)
        ]


def judged(status: int, view: memoryview, meta: np.void, table: np.ndarray) -> bytes | int:
    """Judges a block that a store has read, as the mover does."""
    if status != BlockStatus.READY:
        return status
    length = int(meta["stored_length"])
    sums = slice_sums(view, slice_lengths(length, LAYERS))
    good = table_digest(sums) == meta["digest"].tobytes() and np.array_equal(sums, table)
    return bytes(view[:length]) if good else int(BlockStatus.CORRUPT)


def pages(number: int) -> list[memoryview]:
    """Page-aligned memory, CLASS_BYTES each."""
    area = memoryview(mmap.mmap(-1, max(1, number) * CLASS_BYTES))
    return [area[i * CLASS_BYTES : (i + 1) * CLASS_BYTES] for i in range(number)]


# -- restarts of a store, and its files


def slot_file(tmp_path: Path, place: int = 0) -> Path:
    return store_files.slots_path(tmp_path / "store", place)


async def next_life(tmp_path: Path, **options: object) -> World:
    """Opens the store again without a close of the former one, whose lock is free as after its death."""
    other = World.at(tmp_path / "store", **options)
    await other.open()
    return other


def die(world: World) -> None:
    """Releases the lock and flushes nothing, as SIGKILL does."""
    world.store._opened.lock.release()


def raiser(code: int) -> Callable[..., None]:
    def fail(*_: object, **_named: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def kind_of(fd: int) -> str:
    """`seg` or `journal`: the file behind a descriptor."""
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name.split("-")[0]
