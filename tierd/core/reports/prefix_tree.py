"""The prefix tree of cached blocks as runs: chains of blocks without a branch.

Pure functions over columns of a snapshot of the blocks. They take time in proportion to the blocks,
so callers run them in a thread. A run ends at the block that no block follows, or more than one. A
run that others follow is shared by several cached sequences. A block whose parent is not cached
begins a tree of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import StructArray

Column = NDArray[Any]

PART = 1 << 16
"""Rows of one call that holds the interpreter lock: less than a millisecond."""
_COUNTS = "id parent namespace position blocks tokens hits blocks_below tokens_below hits_below children leaves"
NODE = [*((name, np.int64) for name in _COUNTS.split()), ("last_used", np.float64), ("name", np.uint64)]
"""Fields of a listed run.

id, name: of its last block.
parent: its row in the list, -1 for none.
position: of its first block.
blocks, tokens: of the run alone.
hits: of its most used block.
last_used: the latest use of the run.
blocks_below, tokens_below, hits_below: sums over all blocks below.
children, leaves: as in Runs.
"""
SORTS = ("hits", "tokens", "recent")
FIRST_DEPTH_TOKENS = 512
LAST_DEPTH_TOKENS = 1 << 31
"""Depths in the prompt: below the first, then doubling up to the last."""


@dataclass(frozen=True, slots=True)
class Seen:
    """n blocks as columns, ids ascending.

    parent: its id, -1 for none.
    depth_tokens: of the prompt before the block.
    tier: the nearest that has it.
    name: first 8 bytes of the hash.
    """

    id: Column
    parent: Column
    namespace: Column
    position: Column
    depth_tokens: Column
    tokens: Column
    hits: Column
    last_used: Column
    tier: Column
    name: Column

    def at(self, rows: Column) -> Seen:
        """Some of them, in ascending order."""
        return Seen(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Runs:
    """r runs as columns, a parent before its children. of: the run of each of the n blocks.

    first, last: rows of a run's blocks.
    parent: of each run, -1 for none.
    level: branches above it.
    blocks, tokens, hits: sums over the run and all runs below.
    leaves: those of these runs that no run follows.
    last_used: the latest use of these runs.
    """

    seen: Seen
    of: Column
    first: Column
    last: Column
    parent: Column
    children: Column
    level: Column
    blocks: Column
    tokens: Column
    hits: Column
    leaves: Column
    last_used: Column


class DepthCount(NamedTuple):
    """Blocks and their hits from one depth to another, in tokens of the prompt before the block."""

    from_tokens: int
    to_tokens: int
    blocks: int
    hits: int


def runs_of(seen: Seen, *, under: int | None = None) -> Runs:
    """The runs of these blocks. under: a block's id; only that block and those that follow it."""
    parent = _parent_rows(seen)
    if under is not None:
        top = int(np.searchsorted(seen.id, under))
        parent[top] = -1
        return runs_of(seen.at(_first_above(parent, parent < 0) == top))
    count = len(parent)
    children = _sums(parent, 1, count)
    is_first = parent < 0
    is_first |= children.take(parent) != 1
    first = np.flatnonzero(is_first)
    first = first[np.argsort(seen.position[first], kind="stable")]
    numbered = np.full(count, -1, np.int32)
    numbered[first] = np.arange(len(first), dtype=np.int32)
    of = numbered.take(_first_above(parent, is_first))
    is_last = children[:count] != 1
    last = np.empty(len(first), np.int64)
    last[of[is_last]] = np.flatnonzero(is_last)
    above = parent[first]
    return _summed(seen, of, first, last, np.where(above < 0, -1, of.take(above)))


def chosen(runs: Runs, *, sort: str, limit: int, depth: int) -> Column:
    """The runs with the greatest sums, at most `limit`, at most `depth` branches deep, greatest
    first. No run has a greater sum than its parent, so that comes before it. sort: one of SORTS."""
    key = {"hits": runs.hits, "tokens": runs.tokens, "recent": runs.last_used}[sort]
    rows = np.flatnonzero(runs.level <= depth)
    if len(rows) > limit:
        rows = rows[key[rows] >= np.partition(key[rows], -limit)[-limit]]
    heads = runs.first[rows]
    seen = runs.seen
    order = np.lexsort((seen.name[heads], seen.namespace[heads], seen.position[heads], -key[rows]))
    return np.asarray(rows[order[:limit]])


def listed(runs: Runs, rows: Column, *, tiers: int) -> StructArray:
    """NODE and `tier_blocks` [tiers] of these runs, rows as from `chosen`."""
    place = np.full(len(runs.first) + 1, -1, np.int32)  # the last stands for no parent
    place[rows] = np.arange(len(rows), dtype=np.int32)
    at = place.take(runs.of)
    held = np.flatnonzero(at >= 0)
    at, seen, count = at[held], runs.seen, len(rows)
    out = np.zeros(count, [*NODE, ("tier_blocks", np.int64, (tiers,))])
    out["last_used"] = -np.inf
    for part in _parts(len(at)):
        np.maximum.at(out["hits"], at[part], seen.hits[held[part]])
        np.maximum.at(out["last_used"], at[part], seen.last_used[held[part]])
    first, last = runs.first[rows], runs.last[rows]
    out["id"], out["name"] = seen.id[last], seen.name[last]
    out["parent"] = place.take(runs.parent[rows])
    out["namespace"], out["position"] = seen.namespace[first], seen.position[first]
    out["children"], out["leaves"] = runs.children[rows], runs.leaves[rows]
    for name, values in (("blocks", 1), ("tokens", seen.tokens[held]), ("hits", seen.hits[held])):
        own = _sums(at, values, count)[:count]
        if name != "hits":
            out[name] = own
        out[f"{name}_below"] = getattr(runs, name)[rows] - own
    cells = at.astype(np.int64) * tiers + seen.tier[held]
    out["tier_blocks"] = _sums(cells, 1, count * tiers)[:-1].reshape(count, tiers)
    return out


def reuse_by_depth(seen: Seen) -> list[DepthCount]:
    """Blocks and hits by depth in the prompt, up to the deepest block."""
    edges = [0]
    while edges[-1] < LAST_DEPTH_TOKENS:
        edges.append(max(FIRST_DEPTH_TOKENS, 2 * edges[-1]))
    at = np.searchsorted(np.asarray(edges[1:]), seen.depth_tokens, side="right")
    blocks = _sums(at, 1, len(edges))
    hits = _sums(at, seen.hits, len(edges))
    ends = [*edges[1:], (1 << 32) - 1]
    deepest = int(at.max(initial=-1)) + 1
    rows = zip(edges, ends, blocks.tolist(), hits.tolist(), strict=False)
    return [DepthCount(*row) for row in list(rows)[:deepest]]


def shared_tokens(runs: Runs) -> int:
    """Tokens of the runs that more than one cached sequence begins with."""
    return int(runs.seen.tokens[(runs.children > 0).take(runs.of)].sum())


def blocks_cut_off(runs: Runs) -> int:
    """Blocks that follow evicted ones. Only layers with windows can still use them."""
    return int(runs.blocks[(runs.parent < 0) & (runs.seen.position[runs.first] > 0)].sum())


def _parent_rows(seen: Seen) -> Column:
    """The row of each block's parent; -1 for none. A parent always has a lower position, so there is
    no circle, even if ids were given to other blocks during the snapshot."""
    if not len(seen.id):
        return np.zeros(0, np.int32)
    row_of = np.full(int(seen.id[-1]) + 2, -1, np.int32)  # the last is of -1 and of ids above
    row_of[seen.id] = np.arange(len(seen.id), dtype=np.int32)
    parent = row_of.take(np.where(seen.parent < 0, len(row_of) - 1, seen.parent), mode="clip")
    is_true = parent >= 0
    is_true &= seen.namespace.take(parent) == seen.namespace
    is_true &= seen.position.take(parent) < seen.position
    parent[~is_true] = -1
    return parent


def _first_above(parent: Column, is_first: Column) -> Column:
    """The nearest first row at or above each row, by pointer jumping: each round doubles the way."""
    at = np.where(is_first, np.arange(len(parent), dtype=np.int32), parent)
    while not np.array_equal(further := at.take(at), at):
        at = further
    return at


def _summed(seen: Seen, of: Column, first: Column, last: Column, parent: Column) -> Runs:
    """The runs, with sums over the runs below. Each round adds what is up to twice as far below."""
    count = len(first)
    blocks, tokens, hits = (_sums(of, each, count)[:count] for each in (1, seen.tokens, seen.hits))
    children = _sums(parent, 1, count)[:count]
    leaves = (children == 0).astype(np.int64)
    used = np.full(count, -np.inf)
    for part in _parts(len(of)):
        np.maximum.at(used, of[part], seen.last_used[part])
    level = (parent >= 0).astype(np.int32)
    rows, above = np.flatnonzero(parent >= 0), parent[parent >= 0]
    jump = parent.copy()
    while len(rows):
        for total in (blocks, tokens, hits, leaves):
            np.add(total, _sums(above, total[rows], count)[:count], out=total)
        latest = used[rows]
        for part in _parts(len(rows)):
            np.maximum.at(used, above[part], latest[part])
        level[rows] += level[above]
        jump[rows] = jump[above]
        rows = rows[jump[rows] >= 0]
        above = jump[rows]
    return Runs(seen, of, first, last, parent, children, level, blocks, tokens, hits, leaves, used)


def _sums(at: Column, values: Column | int, count: int) -> Column:
    """The sum of the values of each of `count` places, int64 [count + 1]. The last is of place -1."""
    out = np.zeros(count + 1, np.int64)
    for part in _parts(len(at)):
        np.add.at(out, at[part], values if isinstance(values, int) else values[part])
    return out


def _parts(count: int) -> list[slice]:
    return [slice(start, start + PART) for start in range(0, count, PART)]
