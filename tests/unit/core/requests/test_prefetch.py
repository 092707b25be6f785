"""Limits of a prefetch, and what it shares with others."""

from __future__ import annotations

import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.plan import Allowance


def stored(kit: Kit, name: str, count: int) -> None:
    """Puts a chain and writes it to the store. It stays in the host tier."""
    kit.put(chain(name, count))
    kit.took(kit.core.persist(kit.ids(chain(name, count)), now=kit.tick()))
    kit.land()


def away(kit: Kit, name: str, count: int) -> None:
    """The chain leaves the host tier."""
    kit.took(kit.core.evict(kit.ids(chain(name, count)), tier=0, now=kit.tick()))


@pytest.mark.parametrize(("allowed", "brought"), [(0, 0), (PAGE - 1, 0), (2 * PAGE, 2), (9 * PAGE, 4)])
def test_a_prefetch_brings_no_more_bytes_than_allowed(allowed: int, brought: int) -> None:
    """It brings the first blocks that the allowance holds, and none after them."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    stored(kit, "a", 4)
    away(kit, "a", 4)
    ask = {"groups": [group(chain("a", 4))], "kind": HOST}
    plan = kit.core.prefetch(1, now=kit.tick(), allowance=Allowance(bytes=allowed), **ask)  # type: ignore[arg-type]
    kit.took(plan)
    assert plan.is_short == (brought < 4)
    kit.land()
    assert kit.tiers_of(chain("a", 4)) == [0] * brought + [1] * (4 - brought)


def test_a_prefetch_waits_for_what_others_began() -> None:
    """Its plan names the transfers of earlier plans that bring its blocks, and begins only the others."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    stored(kit, "a", 4)
    away(kit, "a", 4)
    first = kit.took(kit.core.prefetch(1, groups=[group(chain("a", 2))], kind=HOST, now=kit.tick()))
    both = kit.took(kit.core.prefetch(1, groups=[group(chain("a", 4))], kind=HOST, now=kit.tick()))
    assert sorted(both.waits.tolist()) == sorted(first.transfers["id"].tolist())
    assert (len(first.transfers), len(both.transfers), both.is_short) == (2, 2, False)
