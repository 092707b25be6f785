"""What is before a block of a chain that grows is what a walk finds, and long chains are walked once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.unit.core.kit import HOST, PAGE, Kit, chain, tier
from tierd.core import lineage
from tierd.core.blocks import Blocks
from tierd.core.lineage import Lineage
from tierd.core.model import PUT_BLOCK, ROOT, StructArray
from tierd.core.plan import Ids, PutQuery

MOST = 40


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chains of four blocks are long; how many blocks each walk found."""
    monkeypatch.setattr(lineage, "LONG", 4)
    found, real = list[int](), Blocks.ancestors

    def counted(blocks: Blocks, ids: Ids) -> Ids:
        above = real(blocks, ids)
        found.append(len(above))
        return above

    monkeypatch.setattr(Blocks, "ancestors", counted)
    return found


def put(kit: Kit, hashes: StructArray, first: int) -> None:
    """A chain from one of its blocks on."""
    blocks = np.zeros(len(hashes) - first, PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = hashes[first:], 16, PAGE
    query = PutQuery(1, hashes[first - 1].tobytes() if first else ROOT, first, blocks)
    reserved = kit.core.reserve(1, groups=[query], kind=HOST, now=kit.tick())
    kit.took(reserved.plan)
    if reserved.reservation:
        kit.commit(reserved)


def test_a_long_chain_is_walked_once(walks: list[int]) -> None:
    """However often it grows, by one block or by several, until what is before it has changed."""
    kit, a = Kit(tier(HOST, MOST)), chain("a", 20)
    for first, end in ((0, 6), (6, 7), (7, 8), (8, 11), (11, 12)):
        put(kit, a[:end], first)
    assert walks == [0, 6]
    put(kit, np.concatenate((a[:9], chain("b", 2))), 9)
    put(kit, a[:13], 12)
    assert walks == [0, 6, 9]


def test_what_is_remembered_is_bounded(walks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more chains than that the one that has not grown for longest is walked again."""
    monkeypatch.setattr(lineage, "KEPT_LIMIT", 14)
    kit, a, b = Kit(tier(HOST, MOST)), chain("a", 10), chain("b", 10)
    for hashes in (a, b):
        put(kit, hashes[:7], 0)
        put(kit, hashes[:8], 7)
    put(kit, b[:9], 8)
    put(kit, a[:9], 8)
    assert walks == [0, 7, 0, 7, 8]
    its = kit.core._commits._lineage
    assert its._kept == sum(map(len, its._before.values())) == 8


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_walk_finds(walks: list[int], seed: int) -> None:
    """In chains that fork, grow, lose blocks and get them back, and whose ids go to others, every answer is that of a walk."""
    draw, kit = random.Random(seed), Kit(tier(HOST, MOST))
    its = kit.core._commits._lineage
    real, asked = Blocks.ancestors, 0

    def checked(ids: Ids) -> Ids:
        nonlocal asked
        found, asked = Lineage.before(its, ids), asked + 1
        assert found.tolist() == real(its._blocks, ids).tolist()
        return found

    its.before = checked  # type: ignore[method-assign]
    tails = [chain(f"{seed}/{n}", MOST // 2) for n in range(3)]
    for step in range(120):
        number = draw.randrange(3)
        if draw.random() < 0.15:
            cut = draw.randrange(1, 12)
            tails[number] = np.concatenate((tails[draw.randrange(3)][:cut], chain(f"{seed}/{step}", 10)))
        if draw.random() < 0.2:
            known = kit.ids(tails[number])
            gone = known[known >= 0]
            kit.took(
                kit.core.evict(np.array(draw.sample(gone.tolist(), len(gone) // 2), np.int64), tier=0, now=kit.tick())
            )
        end = draw.randrange(1, len(tails[number]))
        put(kit, tails[number][:end], draw.choice([0, 0, max(0, end - 1), max(0, end - 3)]))
    assert asked > 20 and len(walks) < 3 * asked
