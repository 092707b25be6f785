"""Ends of ranges of generations, segments, pages and leases: no number is given twice, and held blocks
stay."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, Kit, chain, group, tier
from tierd.core.formats.model import BlockStatus
from tierd.core.index import blocks, pages
from tierd.core.index.blocks import Names, words
from tierd.core.index.pages import GENERATION_LIMIT, SEGMENT_LIMIT
from tierd.core.plan import ID_LIMIT, Reserved, Start
from tierd.errors import InvalidArgument

RESERVED, NO_ROOM = BlockStatus.RESERVED, BlockStatus.NO_ROOM


def statuses(reserved: Reserved) -> list[int]:
    return [int(status) for part in reserved.statuses for status in part]


def generations(reserved: Reserved) -> list[int]:
    return [int(g) for part in reserved.extents for g in part["generation"][part["page"] >= 0]]


def test_the_last_generations_are_given_once():
    """Three generations are left: the core gives three pages, then none. Stored blocks are still served."""
    kit = Kit(tier(HOST, 8), start=Start(generation=GENERATION_LIMIT - 3))
    reserved = kit.reserve(chain("a", 5))
    assert statuses(reserved) == [RESERVED] * 3 + [NO_ROOM] * 2
    assert generations(reserved) == [GENERATION_LIMIT - 3, GENERATION_LIMIT - 2, GENERATION_LIMIT - 1]
    kit.commit(reserved)
    kit.took(kit.core.evict(kit.ids(chain("a", 3))[2:], tier=None, now=kit.tick()))
    assert statuses(kit.reserve(chain("b", 2))) == [NO_ROOM] * 2
    assert kit.put(chain("a", 3)) is None
    assert kit.tiers_of(chain("a", 3)) == [0, 0, -1]


def test_no_generation_left_is_no_transfer():
    """When no page can be given, a far block stays a hit in its tier and is not promoted."""
    kit = Kit(tier(HOST, 4), tier(NVME, 8), start=Start(generation=GENERATION_LIMIT - 4))
    kit.put(chain("a", 2))
    kit.took(kit.core.persist(kit.ids(chain("a", 2)), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(chain("a", 2)), tier=0, now=kit.tick()))
    acquired = kit.acquire(group(chain("a", 2)))
    assert (acquired.lease, acquired.whole, len(acquired.plan.transfers)) == (0, False, 0)
    assert kit.tiers_of(chain("a", 2)) == [1, 1]


def test_generations_near_their_end_are_told_apart():
    """A verdict reaches only the page of its exact generation, also above the precision of a float64."""
    kit = Kit(tier(HOST, 4), start=Start(generation=GENERATION_LIMIT - 100))
    kit.put(chain("a", 4))
    served = kit.get(group(chain("a", 4)))
    extents = served.groups[0].extents.reshape(-1)
    assert extents["generation"].tolist() == [GENERATION_LIMIT - 100 + i for i in range(4)]
    old = extents.copy()
    old["generation"] -= np.uint64(4)
    assert kit.took(kit.core.condemn(old, now=kit.tick())).is_empty
    kit.took(kit.core.condemn(extents[3:], now=kit.tick()))
    assert kit.tiers_of(chain("a", 4)) == [0, 0, 0, -1]


def test_the_last_segment_begins_once():
    """After the last segment id the core empties no segment: other sizes get no room, present ones go on."""
    kit = Kit(tier(HOST, 8), start=Start(segment=SEGMENT_LIMIT - 2))
    kit.put(chain("a", 8))
    assert [used.segment for used in kit.core.segments(0)] == [SEGMENT_LIMIT - 2, SEGMENT_LIMIT - 1]
    assert statuses(kit.reserve(chain("b", 1), length=8192)) == [NO_ROOM]
    assert kit.tiers_of(chain("a", 8)) == [0] * 8
    assert statuses(kit.reserve(chain("c", 2))) == [RESERVED] * 2
    assert [used.segment for used in kit.core.segments(0)] == [SEGMENT_LIMIT - 2, SEGMENT_LIMIT - 1]


def test_page_ids_end(monkeypatch: pytest.MonkeyPatch):
    """When page ids are used up, the core reuses those of ended segments under new generations."""
    monkeypatch.setattr(pages, "PAGE_LIMIT", 4)
    kit = Kit(tier(HOST, 8))
    first = kit.reserve(chain("a", 8))
    assert statuses(first) == [RESERVED] * 4 + [NO_ROOM] * 4
    kit.took(kit.core.abort(1, reservation=first.reservation, now=kit.tick()))
    second = kit.reserve(chain("b", 8))
    assert statuses(second) == [RESERVED] * 4 + [NO_ROOM] * 4
    assert not set(generations(first)) & set(generations(second))


def test_block_ids_never_wrap(monkeypatch: pytest.MonkeyPatch):
    """More blocks than ids stop the core, because an id of two blocks would serve one for the other."""
    monkeypatch.setattr(blocks, "ID_LIMIT", 3)
    kit = Kit(tier(HOST, 8))
    kit.put(chain("a", 3))
    with pytest.raises(AssertionError, match="more blocks than ids"):
        kit.put(chain("b", 1))


def test_leases_have_half_of_8_bytes_to_go():
    """Lease numbers may begin at 2^63 and go on from there. A core refuses to begin above it."""
    kit = Kit(tier(HOST, 4), start=Start(id=ID_LIMIT))
    kit.put(chain("a", 2))
    lease = kit.acquire(group(chain("a", 2))).lease
    assert 1 << 63 < lease < 1 << 64
    kit.release(lease - 1, lease - (1 << 63))
    assert kit.core.stats().leases == 1
    kit.release(lease)
    assert kit.core.stats().leases == 0
    with pytest.raises(InvalidArgument, match="begin lower"):
        Kit(tier(HOST, 4), start=Start(id=ID_LIMIT + 1))


# -- the table of names


def made_up(kind: str, count: int) -> np.ndarray:
    """Names that a hostile client chooses: equal first 8 bytes, or words that differ only in their top
    bits."""
    hashes = np.zeros((count, 4), np.uint64)
    if kind == "first words":
        hashes[:, 1] = np.arange(1, count + 1)
    else:
        for word in range(4):
            hashes[:, word] = (np.arange(count).astype(np.uint64) >> np.uint64(3 * word) & np.uint64(7)) << np.uint64(
                61
            )
        hashes[:, 0] |= np.uint64(1)
    return hashes.view(np.uint8).reshape(count, 32)


@pytest.mark.parametrize("kind", ["first words", "top bits"])
def test_made_up_names_share_no_place(kind: str):
    """Keys of 2,000 alike names differ as much as any others, also in their upper halves."""
    kit = Kit(tier(HOST, 2048, segment=2048), start=Start(seed=7))
    kit.put(made_up(kind, 2000))
    names = Names(np.ones(2000, np.uint32), words(made_up(kind, 2000)))
    keys = kit.core._index.blocks.keys_of(names)
    assert len(np.unique(keys >> np.uint64(32))) >= 1998


def test_the_seed_changes_no_answer():
    """Two cores with different seeds give the same plans, ids and pages for the same calls."""
    kits = [Kit(tier(HOST, 8), tier(NVME, 16), start=Start(seed=seed)) for seed in (1, 2)]
    for turn in range(40):
        name = chain(f"{turn % 7}", 1 + turn % 5)
        leases = []
        for kit in kits:
            kit.put(name)
            got = kit.get(group(name))
            kit.demote()
            kit.land()
            leases.append([(g.extents.tobytes(), g.blocks.tolist()) for g in got.groups])
            kit.release(*list(kit.core._sessions.leases))
        assert leases[0] == leases[1]
