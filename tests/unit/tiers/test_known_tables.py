"""Blocks with known slice tables are written while they are hashed, and count only once both are done."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.unit.tiers.store_world import (
    CORRUPT,
    FAILED,
    LENGTH,
    READY,
    World,
    content,
    die,
    extents_of,
    metas_of,
    next_life,
    pages,
    tables_of,
    told,
)
from tierd.core.formats.model import StructArray
from tierd.core.plan import Plan
from tierd.tiers.io.calls import HangError
from tierd.tiers.store import slots
from tierd.tiers.store.moves import VerifyJob
from tierd.tiers.store.nvme import Patience
from tierd.tiers.store.slots import HEADER_BYTES, TABLE_SLICES
from tierd.tiers.tier import HashRows, SliceTable

SOON_S = 10.0
KEYS = [1, 2, 3]


def _reserved(world: World) -> tuple[StructArray, StructArray, list[memoryview]]:
    """Adjacent slots, names, and pages that hold the blocks."""
    extents, sources = extents_of(1, [0, 1, 2], generation=1), pages(3)
    for key, source in zip(KEYS, sources, strict=True):
        source[:LENGTH] = content(key)
    world.store.apply(Plan(reserved=extents))
    return extents, metas_of(KEYS), sources


async def _write(world: World, hash_rows: HashRows, known: Sequence[SliceTable | None]) -> list[int]:
    extents, metas, sources = _reserved(world)
    statuses = await world.store.write(extents, metas, hash_rows, sources, known=known)
    world.held = {key: (extents[i : i + 1], metas_of([key])) for i, key in enumerate(KEYS)}
    return [int(status) for status in statuses]


def _told_of_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when a run has been written."""
    is_written, write_at = threading.Event(), slots.write_at

    def write(*given: object) -> None:
        write_at(*given)  # type: ignore[arg-type]
        is_written.set()

    monkeypatch.setattr(slots, "write_at", write)
    return is_written


async def test_the_disk_does_not_wait_for_sums(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with known tables reach the disk before they are hashed, but count as stored only afterwards."""
    tables, is_written = tables_of(KEYS), _told_of_writes(monkeypatch)

    def hash_rows(rows: Sequence[int]) -> list[SliceTable | None]:
        assert is_written.wait(SOON_S)
        assert not world.store.holds(extents_of(1, [0, 1, 2], generation=1)).any()
        return told(tables)(rows)  # type: ignore[return-value]

    assert await _write(world, hash_rows, tables) == [READY] * 3
    assert await world.read(KEYS) == [content(key) for key in KEYS]


async def test_wrong_bytes_are_never_told_of(world: World, tmp_path: Path) -> None:
    """A block that proves wrong during its write is CORRUPT and never held, even after a restart."""
    tables = tables_of(KEYS)
    assert await _write(world, told([tables[0], None, tables[2]]), tables) == [READY, CORRUPT, READY]
    await world.store.sync()
    assert world.store.holds(extents_of(1, [0, 1, 2], generation=1)).tolist() == [True, False, True]
    die(world)
    other = await next_life(tmp_path)
    assert sorted(other.held) == [1, 3]
    assert await other.read([1, 3]) == [content(1), content(3)]
    await other.store.close(release=False)


async def test_what_nobody_could_look_at_does_not_count(world: World) -> None:
    """When hashing fails, the write fails, and the store holds no block of it though the disk does."""

    def hash_rows(rows: Sequence[int]) -> list[SliceTable | None]:
        raise MemoryError

    with pytest.raises(MemoryError):
        await _write(world, hash_rows, tables_of(KEYS))
    assert not world.store.holds(extents_of(1, [0, 1, 2], generation=1)).any()


async def test_what_was_given_up_does_not_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are written, but whose hashing lane hung, are FAILED."""

    is_written = _told_of_writes(monkeypatch)

    def hang(_job: VerifyJob) -> NoReturn:
        assert is_written.wait(SOON_S)
        raise HangError

    monkeypatch.setattr(VerifyJob, "run", hang)
    tables = tables_of(KEYS)
    assert await _write(world, told(tables), [tables[0], None, tables[2]]) == [FAILED, READY, FAILED]
    assert world.store.holds(extents_of(1, [0, 1, 2], generation=1)).tolist() == [False, True, False]


async def test_what_was_written_before_the_disk_hung_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk hangs under a batch of more calls than lanes, the blocks that it took still count."""
    made = World.at(tmp_path / "store", queue_depth=1)
    made.store.patience = Patience(hang_s=0.2)
    await made.open()
    for place in range(4):
        await made.begin(1 + place, place=place)
    keys, calls, gate, write_at = list(range(16)), itertools.count(), threading.Event(), slots.write_at
    extents = np.concatenate([extents_of(1 + place, [0, 2, 4, 6], generation=1 + 4 * place) for place in range(4)])
    made.store.apply(Plan(reserved=extents))
    sources = pages(16)
    for key, source in zip(keys, sources, strict=True):
        source[:LENGTH] = content(key)

    def hang(*given: object) -> None:
        if next(calls):
            assert gate.wait(SOON_S)
        write_at(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(slots, "write_at", hang)
    tables = tables_of(keys)
    write = asyncio.create_task(made.store.write(extents, metas_of(keys), told(tables), sources, known=tables))
    lanes = made.store._lanes["write"]
    async with asyncio.timeout(SOON_S):
        while len(lanes._awake) != 1:  # noqa: ASYNC110  # that the others have given up rings no bell
            await asyncio.sleep(0.001)
    gate.set()
    assert sorted((await write).tolist()) == [READY] * 2 + [FAILED] * 14  # lanes race for the turn
    await made.store.close(release=False)


async def test_all_that_the_disk_took_wears_it(world: World) -> None:
    """A block that proves wrong counts as written to the disk, like a stored one."""
    tables = tables_of(KEYS)
    await _write(world, told([tables[0], None, None]), tables)
    assert world.store.written_bytes == 3 * (HEADER_BYTES + -(-LENGTH // HEADER_BYTES) * HEADER_BYTES)


@pytest.mark.parametrize("other", [None, np.zeros(TABLE_SLICES + 1, np.uint64)], ids=["unknown", "too long"])
async def test_a_table_that_cannot_be_used_is_made(world: World, other: SliceTable | None) -> None:
    """A block without a known table, or with one too long for a header, is hashed first and then written."""
    tables = tables_of(KEYS)
    assert await _write(world, told(tables), [tables[0], other, tables[2]]) == [READY] * 3
    assert await world.read(KEYS) == [content(key) for key in KEYS]


async def test_each_row_is_hashed_once(world: World) -> None:
    """With or without a known table, a written block is hashed once."""
    tables, rows_hashed = tables_of(KEYS), list[int]()

    def hash_rows(rows: Sequence[int]) -> list[SliceTable | None]:
        rows_hashed.extend(rows)
        return told(tables)(rows)  # type: ignore[return-value]

    assert await _write(world, hash_rows, [tables[0], None, tables[2]]) == [READY] * 3
    assert sorted(rows_hashed) == [0, 1, 2]
