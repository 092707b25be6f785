"""Limits of a prefetch: bytes, free pages, and the pages of colder blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.plan import Allowance, Plan
from tierd.policies.eviction import EVICTION


def stored(kit: Kit, name: str, count: int) -> None:
    """Puts a chain and writes it to the store. It stays in the host tier."""
    kit.put(chain(name, count))
    kit.took(kit.core.persist(kit.ids(chain(name, count)), now=kit.tick()))
    kit.land()


def guess(kit: Kit, name: str, count: int) -> Plan:
    """A prefetch of the chain that is a guess."""
    return kit.took(
        kit.core.prefetch(
            1, groups=[group(chain(name, count))], kind=HOST, now=kit.tick(), allowance=Allowance(is_guess=True)
        )
    )


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
    kit.took(kit.core.prefetch(1, now=kit.tick(), allowance=Allowance(bytes=allowed), **ask))  # type: ignore[arg-type]
    kit.land()
    assert kit.tiers_of(chain("a", 4)) == [0] * brought + [1] * (4 - brought)


def test_a_guess_takes_free_pages() -> None:
    """If pages are free, a guess brings its blocks and evicts none."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    stored(kit, "a", 4)
    away(kit, "a", 4)
    plan = guess(kit, "a", 4)
    assert (len(plan.transfers), len(plan.freed)) == (4, 0)


def test_a_guess_evicts_what_is_colder() -> None:
    """Blocks that were used before all that it brings give way, tails first."""
    kit = Kit(tier(HOST, 4, segment=2, eviction="lru"), tier(NVME, 16, eviction="lru"))
    stored(kit, "hot", 2)
    stored(kit, "cold", 2)
    away(kit, "hot", 2)
    stored(kit, "more", 2)
    kit.release(kit.acquire(group(chain("hot", 2))).lease)
    kit.land()
    away(kit, "hot", 2)
    stored(kit, "last", 2)
    plan = guess(kit, "hot", 2)
    assert kit.tiers_of(chain("last", 2)) == [0, 0]
    assert len(plan.transfers) == len(plan.freed) == 2


def test_a_guess_evicts_nothing_that_is_not_stored() -> None:
    """Blocks that only the host tier holds stay, however cold."""
    kit = Kit(tier(HOST, 4, segment=2, eviction="lru"), tier(NVME, 16, eviction="lru"))
    stored(kit, "b", 4)
    away(kit, "b", 4)
    kit.put(chain("a", 4))
    kit.release(*[lease for lease in [kit.acquire(group(chain("b", 0))).lease] if lease])
    assert len(guess(kit, "b", 4).transfers) == 0
    assert kit.tiers_of(chain("a", 4)) == [0] * 4


@given(
    steps=st.lists(st.tuples(st.sampled_from(["use", "guess"]), st.integers(0, 5)), max_size=24),
    eviction=st.sampled_from(sorted(EVICTION)),
)
def test_a_guess_never_evicts_what_is_worth_more(steps: list[tuple[str, int]], eviction: str) -> None:
    """Under every policy each evicted block is colder, by the store's order, than all that comes."""
    kit = Kit(tier(HOST, 8, segment=2, eviction=eviction), tier(NVME, 32, eviction=eviction))
    for number in range(6):
        stored(kit, str(number), 3)
    for verb, number in steps:
        if verb == "use":
            lease = kit.acquire(group(chain(str(number), 3))).lease
            kit.land()
            if lease:
                kit.release(lease)
            continue
        order = rank(kit)
        plan = guess(kit, str(number), 3)
        brought = [order.index(block) for block in plan.transfers["block"].tolist()]
        gone = [order.index(int(kit.ids(name[None])[0])) for name in plan.freed["hash"]]
        assert not gone or max(gone) < min(brought)
        kit.land()


def rank(kit: Kit) -> list[int]:
    """All blocks, coldest first, in the store's order."""
    index = kit.core._index
    count = index.blocks.top
    found = index.policies[1].victims(len(index.policies[1]), np.zeros(count, bool))
    assert found is not None
    return [int(block) for block in found]
