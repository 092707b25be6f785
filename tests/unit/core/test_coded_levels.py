"""Levels of stores of which some keep blocks encoded: copies end, and gets find what lookups promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.core.kit import DEVICE, HOST, NVME, TOKENS, chain, tier
from tests.unit.core.test_forms import LIMIT, READY, Coded
from tierd.core.formats.model import StructArray

LOW: dict[str, Any] = {"high_watermark": 0.3, "low_watermark": 0.1}


def demote(k: Coded) -> None:
    """Demotes until nothing is left to do."""
    for _ in range(20):
        k.demote()
        if not k.flying:
            return
        k.end_all()
    raise AssertionError("demotion writes the same blocks for ever")


def copy(k: Coded, names: StructArray, where: int) -> None:
    """Copies blocks to one of three stores."""
    for store in (1, 2, 3):
        k.core.set_writable(store, writable=store == where)
    k.took(k.core.persist(k.ids(names), now=k.tick()))
    k.end_all()


@pytest.mark.parametrize("near", [HOST, DEVICE])
def test_coarse_blocks_reach_a_plain_disk_once(near: int) -> None:
    """A coarse block of the store in memory has other bytes than the one near. A disk without a codec
    gets the latter, once: not the former again and again. Those of a device stay there."""
    k = Coded(
        tier(DEVICE, 128, segment=32),
        tier(HOST, 128, segment=32, high_watermark=0.2, low_watermark=0.1),
        tier(NVME, 24, segment=12, level=0, **LOW),
        tier(NVME, 128, segment=16, index=1),
    )
    k.forms.coded = {2}
    for i in range(3):
        k.write(chain(f"{i}", 4))
    if near is DEVICE:
        for i in range(3):
            k.acquire(k.asked(chain(f"{i}", 4), LIMIT), kind=DEVICE)
            k.end_all()
        k.core.set_writable(3, writable=False)
        demote(k)
        for i in range(3):
            k.took(k.core.evict(k.ids(chain(f"{i}", 4)), tier=1, now=k.tick()))
        k.core.set_writable(3, writable=True)
    demote(k)
    seconds = [k.ids(chain(f"{i}", 4)[1:]) for i in range(3)]
    on_disk = k.core.extents(np.concatenate(seconds), tier=3)["page"] >= 0
    assert on_disk.any() == (near is HOST)


@pytest.mark.parametrize("coded", [{1}, {1, 2}, {2}, {1, 3}, {1, 2, 3}])
def test_a_get_serves_what_a_lookup_finds(coded: set[int]) -> None:
    """Gets serve all blocks that lookups find, with codecs on any of the levels."""
    k = Coded(
        tier(HOST, 64, segment=32, **LOW),
        tier(NVME, 48, segment=16, level=0, **LOW),
        tier(NVME, 60, segment=16, index=1, **LOW),
        tier(NVME, 512, segment=16, index=2, level=2),
    )
    k.forms.coded, k.forms.accepted = coded, 9.0
    names = [chain(f"{i}", 3) for i in range(10)]
    for each in names:
        k.write(each)
        demote(k)
    for i in np.random.default_rng(1).zipf(1.3, 60) % len(names):
        demand = k.asked(names[i], 9.0)
        found = k.core.lookup([demand], k.now).tokens // TOKENS
        assert k.check_served(names[i], 9.0) == found
        demote(k)


def test_another_store_serves_a_block_of_which_one_has_other_bytes() -> None:
    """A farther store keeps a block as decoded, with a greater error than a nearer one. The first get
    from the nearer one is refused; the next is served from the farther."""
    k, names = (
        Coded(tier(HOST, 64, segment=32), *(tier(NVME, 64, segment=16, index=i, level=i + 1) for i in range(3))),
        chain("a", 2),
    )
    k.forms.coded = {1, 2}
    k.write(names)
    copy(k, names, 1)
    k.took(k.core.evict(k.ids(names), tier=0, now=k.tick()))
    copy(k, names, 2)
    k.core.set_serving(1, serving=False)
    copy(k, names, 3)
    k.core.set_serving(1, serving=True)
    k.took(k.core.evict(k.ids(names), tier=2, now=k.tick()))
    assert k.core.errors(k.core.extents(k.ids(names)[1:], tier=3)).tolist() == [0.5]
    assert k.check_served(names, LIMIT) == 1
    assert k.check_served(names, LIMIT) == 2


def test_a_finer_copy_is_loaded_from_a_farther_store() -> None:
    """If the store in memory has a block coarser than the disk, a get with a demand reads the disk."""
    k = Coded(
        tier(DEVICE, 128, segment=32),
        tier(HOST, 64, segment=16),
        tier(NVME, 64, segment=16, level=0),
        tier(NVME, 64, segment=16, index=1),
        tier(NVME, 64, segment=16, index=2),
    )
    names = chain("a", 3)
    k.write(names)
    ids = k.ids(names)
    for store, error in ((4, 0.05), (3, 0.5)):
        for other in (3, 4):
            k.core.set_writable(other, writable=other == store)
        k.took(k.core.persist(ids, now=k.tick()))
        k.end([READY] * 64, error=error)
    k.took(k.core.evict(ids, tier=1, now=k.tick()))
    k.acquire(k.asked(names, LIMIT))
    assert {int(flight["source"]["tier"]) for flight in k.flying if flight["block"] != ids[0]} == {4}
