"""The core's memory per block, and a bound on the time of any call while the core grows."""

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
"""More than any call touches: 2^15 rows of all columns, or a part of the next table for 256 blocks."""


def arrays_of(thing: Any, seen: set[int]) -> int:
    """Bytes of every array reachable from a tierd object, each counted once."""
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
    """Bytes of one row of all columns of a table."""
    return sum(column.itemsize * (column.shape[1] if column.ndim > 1 else 1) for column, _ in columns._all)


def addresses(core: Any) -> list[int]:
    """The addresses of the columns of a core's tables."""
    tables = [core._index.blocks._columns, core._index.tiers[0]._columns]
    return [column.__array_interface__["data"][0] for table in tables for column, _ in table._all]


def test_columns_stay_where_they_are() -> None:
    """A core that fills moves no column. Moving a mapping took tens of milliseconds within a call."""
    filled = Filled(50_000, "lru")
    before = addresses(filled.core)
    filled.fill(50_000)
    assert addresses(filled.core) == before and len(before) > 20


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_block_takes_no_more_than_promised(policy: str) -> None:
    """A core with 200,000 blocks spends at most 256 bytes a block on all columns, tables and logs."""
    blocks = 200_000
    filled = Filled(blocks, policy)
    empty = arrays_of(filled.core, set())
    filled.fill(blocks)
    assert filled.core.stats().blocks == filled.count
    size = (arrays_of(filled.core, set()) - empty) / filled.count
    index = filled.core._index  # the columns reserve room for all rows at the beginning
    rows = row_bytes(index.blocks._columns) + index.blocks.hash.itemsize * 4 + row_bytes(index.tiers[0]._columns)
    report("bytes a block", policy=policy, blocks=blocks, bytes=round(size + rows, 1))
    assert rows > 64 and size + rows <= BYTES_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ten_million_blocks_fit_and_none_waits_for_growth(policy: str) -> None:
    """10 million blocks take at most 256 bytes each. No call takes ten times as long as touching 16 MiB."""
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
    """A block links to its parent when the parent comes later, its record names it, and no row stays."""
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
