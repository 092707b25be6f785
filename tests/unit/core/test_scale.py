"""What a block costs in the core's memory, and that no call pays for the growth of the whole."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from array import array
from typing import Any

import numpy as np
import pytest

from tests.depth import count, report
from tests.unit.core.kit import HOST, PAGE, Kit, chain, tier
from tierd.core.arrays.columns import Columns
from tierd.core.formats.model import PUT_BLOCK
from tierd.core.plan import PutQuery
from tools.bench.index_scale import POLICIES, Filled

BYTES_LIMIT = 256
STEP_BYTES = 16 << 20
"""More than any one call may touch: 2^15 rows of all columns, or as much of the next table as 256 blocks are due."""


def arrays_of(thing: Any, seen: set[int]) -> int:
    """Bytes of every array that an object of ours leads to, each once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes if thing.base is None else arrays_of(thing.base, seen)
    if isinstance(thing, array):
        return sys.getsizeof(thing)
    if isinstance(thing, dict | list | tuple):
        return sum(arrays_of(one, seen) for one in (thing.values() if isinstance(thing, dict) else thing))
    if not type(thing).__module__.startswith("tierd."):
        return 0
    slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    return sum(arrays_of(one, seen) for one in [*slots, *getattr(thing, "__dict__", {}).values()])


def row_bytes(columns: Columns) -> int:
    """Of one row of all columns of a table."""
    return sum(column.itemsize * (column.shape[1] if column.ndim > 1 else 1) for column, _ in columns._all)


def addresses(core: Any) -> list[int]:
    """Where the columns of a core's tables lie."""
    tables = [core._index.blocks._columns, core._index.tiers[0]._columns]
    return [column.__array_interface__["data"][0] for table in tables for column, _ in table._all]


def test_columns_stay_where_they_are() -> None:
    """A core that fills moves no column: to move a mapping took tens of milliseconds in the middle of a call."""
    filled = Filled(50_000, "lru")
    before = addresses(filled.core)
    filled.fill(50_000)
    assert addresses(filled.core) == before and len(before) > 20


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_block_takes_no_more_than_promised(policy: str) -> None:
    """All columns, tables and logs of a core with 200,000 blocks, its policy's too, are at most 256 bytes a block."""
    blocks = 200_000
    filled = Filled(blocks, policy)
    empty = arrays_of(filled.core, set())
    filled.fill(blocks)
    assert filled.core.stats().blocks == filled.count
    size = (arrays_of(filled.core, set()) - empty) / filled.count
    index = filled.core._index  # room for all of them is there from the beginning
    rows = row_bytes(index.blocks._columns) + index.blocks.hash.itemsize * 4 + row_bytes(index.tiers[0]._columns)
    report("bytes a block", policy=policy, blocks=blocks, bytes=round(size + rows, 1))
    assert rows > 64 and size + rows <= BYTES_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ten_million_blocks_fit_and_none_waits_for_growth(policy: str) -> None:
    """Filled to 10 million, a process has grown by at most 256 bytes a block, and no call took longer than ten times what touching 16 MiB takes."""
    blocks = count(test=100_000, nightly=10_000_000, weekly=10_000_000)
    command = [sys.executable, "-m", "tools.bench.index_scale", "--json", "--policy", policy, "--blocks", str(blocks)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000).stdout)
    begun = time.thread_time()
    np.zeros(STEP_BYTES, np.uint8)[:] = 1
    touch_ms = (time.thread_time() - begun) * 1e3
    report("scale", policy=policy, blocks=blocks, **{name: round(told[name], 2) for name in ("bytes", "longest_ms")})
    assert told["bytes"] <= BYTES_LIMIT
    assert told["longest_ms"] <= 10 * touch_ms


def test_a_parent_is_known_before_it_is_written() -> None:
    """A block whose parent was never written is its child when that comes; every block's record has the name of its parent, and no trace is left."""
    kit, names = Kit(tier(HOST, 8)), chain("a", 3)
    for number in (2, 1, 0):
        block = np.zeros(1, PUT_BLOCK)
        block["hash"], block["tokens"], block["length"] = names[number], 16, PAGE
        parent = names[number - 1].tobytes() if number else bytes(32)
        kit.commit(kit.core.reserve(1, groups=[PutQuery(1, parent, number, block)], kind=HOST, now=kit.tick()))
    ids = kit.ids(names)
    assert kit.core.stats().blocks == 3 and kit.core._index.blocks.top == 3
    assert kit.core._index.blocks.parent[ids].tolist() == [-1, *ids[:2].tolist()]
    assert kit.core.metas(ids)["parent"].tolist() == [[0] * 32, *names[:2].tolist()]
    kit.took(kit.core.evict(ids, tier=None, now=kit.tick()))
    assert len(kit.core._index.blocks.known()) == 0
