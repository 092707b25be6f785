"""The prefix tree of cached blocks, against one that is built block by block."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.reports.prefix_tree import (
    FIRST_DEPTH_TOKENS,
    SORTS,
    Runs,
    Seen,
    blocks_cut_off,
    chosen,
    listed,
    reuse_by_depth,
    runs_of,
    shared_tokens,
)

TOKENS, TIERS, MOST = 16, 3, 1 << 20


@dataclass
class Block:
    """One cached block, and the blocks that follow it."""

    id: int
    parent: int
    namespace: int
    position: int
    hits: int
    last_used: int
    tier: int
    kids: list[Block] = field(default_factory=list)


@st.composite
def caches(draw: st.DrawFn) -> list[Block]:
    """Blocks of random trees. Some parents are evicted, or their ids stand for other blocks."""
    out: list[Block] = []
    for number in range(draw(st.sampled_from([0, 1, 3, 12, 30, 30]))):
        above = draw(st.one_of(st.none(), st.sampled_from(out))) if out else None
        wrong = [2 * number + 1, 2 * draw(st.integers(0, 29))]  # evicted; another block has the id by now
        parent = -1 if above is None else draw(st.sampled_from([above.id] * 6 + wrong))
        position = draw(st.integers(0, 3)) if above is None else above.position + 1
        namespace = draw(st.sampled_from([1, 1, 1, 2])) if above is None or parent != above.id else above.namespace
        small = [draw(st.integers(0, 3)) for _ in range(3)]
        out.append(Block(2 * number, parent, namespace, position, small[0], small[1], min(small[2], TIERS - 1)))
    return out


def seen_of(blocks: list[Block]) -> Seen:
    """The blocks as columns."""
    kinds = {"parent": np.int32, "last_used": np.float64, "tier": np.int8, "position": np.uint32, "hits": np.uint32}
    given = {name: np.array([getattr(b, name) for b in blocks], kinds.get(name, np.int64)) for name in
             ("id", "parent", "namespace", "position", "hits", "last_used", "tier")}  # fmt: skip
    given["depth_tokens"] = given["position"].astype(np.int64) * TOKENS
    given["tokens"] = np.full(len(blocks), TOKENS, np.uint32)
    given["name"] = given["id"].astype(np.uint64)
    return Seen(**given)


def grown(blocks: list[Block]) -> list[Block]:
    """The roots, with every block among the kids of its parent."""
    by_id, roots = {block.id: block for block in blocks}, []
    for block in blocks:
        above = by_id.get(block.parent)
        if above is None or above.namespace != block.namespace or above.position >= block.position:
            roots.append(block)
        else:
            above.kids.append(block)
    return roots


def run_from(block: Block) -> list[Block]:
    """The run that begins with the block."""
    run = [block]
    while len(run[-1].kids) == 1:
        run.append(run[-1].kids[0])
    return run


def below(block: Block) -> list[Block]:
    """The block and all that follow it."""
    return [block, *(other for kid in block.kids for other in below(kid))]


def facts_of(block: Block, level: int = 0) -> dict[int, tuple[object, ...]]:
    """By the last block of each run from this block on: what a listed run tells."""
    run = run_from(block)
    all_of, under = below(block), [other for kid in run[-1].kids for other in below(kid)]
    tiers = [sum(one.tier == tier for one in run) for tier in range(TIERS)]
    leaves = sum(not one.kids for one in all_of)
    used = [max(one.hits for one in run), max(one.last_used for one in run)]
    sums = [len(run), len(under), sum(one.hits for one in under), len(run[-1].kids), leaves, level]
    out: dict[int, tuple[object, ...]] = {run[-1].id: (block.position, *used, *sums, *tiers)}
    for kid in run[-1].kids:
        out |= facts_of(kid, level + 1)
    return out


def told(runs: Runs, rows: np.ndarray) -> dict[int, tuple[object, ...]]:
    """The same of the listed runs."""
    names = ("position", "hits", "last_used", "blocks", "blocks_below", "hits_below", "children", "leaves")
    nodes = listed(runs, rows, tiers=TIERS)
    assert (nodes["tokens"] == TOKENS * nodes["blocks"]).all()
    assert (nodes["tokens_below"] == TOKENS * nodes["blocks_below"]).all()
    return {
        int(node["id"]): (*(node[name] for name in names), level, *node["tier_blocks"].tolist())
        for node, level in zip(nodes, runs.level[rows].tolist(), strict=True)
    }


@given(caches(), st.sampled_from(SORTS))
def test_runs_are_those_of_the_tree(blocks: list[Block], sort: str) -> None:
    """Each run, its sums and its level are those of a tree built block by block; a parent comes first."""
    runs = runs_of(seen_of(blocks))
    rows = chosen(runs, sort=sort, limit=MOST, depth=MOST)
    wanted: dict[int, tuple[object, ...]] = {}
    roots = grown(blocks)
    for root in roots:
        wanted |= facts_of(root)
    assert told(runs, rows) == wanted
    nodes = listed(runs, rows, tiers=TIERS)
    assert (nodes["parent"] < np.arange(len(nodes))).all()
    assert blocks_cut_off(runs) == sum(len(below(root)) for root in roots if root.position)
    assert shared_tokens(runs) == TOKENS * sum(row[3] for row in wanted.values() if row[6])  # type: ignore[misc]


def test_an_id_that_stands_for_another_block_is_no_parent() -> None:
    """A parent of another namespace, or not before the block, is none, so there is no circle either."""
    parents = {0: (-1, 1, 0), 2: (0, 2, 1), 4: (6, 1, 1), 6: (4, 1, 1), 8: (0, 1, 0)}
    runs = runs_of(seen_of([Block(own, *facts, 0, 0, 0) for own, facts in parents.items()]))
    assert runs.parent.tolist() == [-1] * len(parents)


@given(caches(), st.data())
def test_a_subtree_is_that_of_its_block(blocks: list[Block], data: st.DataObject) -> None:
    """Under a block there are the block and those that follow it, also if it is inside a run."""
    if not blocks:
        return
    seen = seen_of(blocks)
    grown(blocks)
    top = data.draw(st.sampled_from(blocks))
    runs = runs_of(seen, under=top.id)
    assert told(runs, chosen(runs, sort="hits", limit=MOST, depth=MOST)) == facts_of(top)


@given(caches(), st.sampled_from(SORTS), st.integers(1, 6), st.integers(0, 2))
def test_a_cut_tree_has_the_greatest_runs(blocks: list[Block], sort: str, limit: int, depth: int) -> None:
    """A cut tree is the start of the whole one without the deeper runs, so no run lacks its parent."""
    runs = runs_of(seen_of(blocks))
    whole = chosen(runs, sort=sort, limit=MOST, depth=MOST)
    rows = chosen(runs, sort=sort, limit=limit, depth=depth)
    assert rows.tolist() == [row for row in whole.tolist() if runs.level[row] <= depth][:limit]
    parents = listed(runs, rows, tiers=TIERS)["parent"]
    assert ((parents >= 0) == (runs.level[rows] > 0)).all()


@given(caches())
def test_depths_count_every_block(blocks: list[Block]) -> None:
    """Reuse by depth counts each block once, in the range that has its depth."""
    for block in blocks:
        block.position *= FIRST_DEPTH_TOKENS // TOKENS
    rows = reuse_by_depth(seen_of(blocks))
    for row in rows:
        there = [block for block in blocks if row.from_tokens <= block.position * TOKENS < row.to_tokens]
        assert (row.blocks, row.hits) == (len(there), sum(block.hits for block in there))
    assert sum(row.blocks for row in rows) == len(blocks)
    assert [row.from_tokens for row in rows[1:]] == [row.to_tokens for row in rows[:-1]]


@pytest.mark.parametrize("shape", ["chain", "comb"])
def test_deep_trees_take_few_rounds(shape: str) -> None:
    """65,536 blocks in a row, without a branch or with one at each, are summed by few steps."""
    ids = np.arange(1 << 16)
    parents = ids - 1 if shape == "chain" else np.where(ids % 2 == 0, ids - 2, ids - 1)
    positions = ids if shape == "chain" else (ids + 1) // 2
    blocks = seen_of([Block(0, -1, 1, 0, 1, 0, 0)])
    many = Seen(*(np.repeat(getattr(blocks, one.name), len(ids)) for one in fields(Seen)))
    columns = {one.name: getattr(many, one.name) for one in fields(Seen)}
    columns |= {"id": ids, "parent": np.maximum(parents, -1), "position": positions, "name": ids}
    runs = runs_of(Seen(**columns))
    top = chosen(runs, sort="hits", limit=1, depth=0)
    assert (runs.hits[top].tolist(), runs.blocks[top].tolist()) == ([len(ids)], [len(ids)])
    assert runs.leaves[top].tolist() == [1 if shape == "chain" else len(ids) // 2]
