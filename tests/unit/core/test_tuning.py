"""Changes of a running core: specs, shares, eviction and admission policies."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.formats.model import BlockStatus
from tierd.core.plan import Ids
from tierd.core.space.handover import Handover
from tierd.errors import InvalidArgument
from tierd.policies.eviction import EVICTION

NONE = np.zeros(0, np.int64)
PAIRS = list(zip(sorted(EVICTION), [*sorted(EVICTION)[1:], "arc"], strict=True))
"""Each policy once before and once after."""


def spec_of(kit: Kit, number: int = 0, **changes: Any) -> Any:
    return dataclasses.replace(kit.core._index.tiers[number].spec, **changes)


def use(kit: Kit, name: str, count: int = 1) -> None:
    """A get of a chain, and its release."""
    acquired = kit.acquire(group(chain(name, count)))
    kit.land()
    kit.settle(acquired)
    kit.release(acquired.lease)


def by_last_use(kit: Kit, number: int = 0) -> Ids:
    """The blocks of a tier, coldest first."""
    blocks = kit.core.tuning.tracked(number, np.concatenate([*kit.core.pieces(), NONE]))
    return blocks[
        np.lexsort((-kit.core.column("position", blocks).astype(np.int64), kit.core.column("last_used", blocks)))
    ]


def steps(kit: Kit, size: int) -> Iterator[None]:
    """Hands a tier's blocks over, `size` at a time; the caller acts between the steps."""
    blocks = by_last_use(kit)
    for begun in range(0, len(blocks), size):
        kit.core.tuning.hand_over(0, blocks[begun : begun + size], kit.now)
        kit.core.check()
        yield
    while kit.core.tuning.is_handing_over(0):
        kit.core.tuning.hand_over(0, NONE, kit.now)
        kit.core.check()


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_policy_changes_under_load(old: str, new: str) -> None:
    """Puts, gets and evictions between the pieces of a handover lose no block of either policy."""
    kit, rng = Kit(tier(HOST, 24, eviction=old), tier(NVME, 40)), random.Random(f"{old} {new}")

    def act() -> None:
        name = f"{rng.randrange(12)}"
        kit.put(chain(name, rng.randint(1, 4)))
        use(kit, name, 3)
        if rng.random() < 0.3:
            kit.took(kit.core.evict(kit.ids(chain(name, 2))[:1], tier=0, now=kit.tick()))
        kit.demote()
        kit.land()

    for _ in range(10):
        act()
    assert kit.core.tuning.set_spec(0, spec_of(kit, eviction=new), kit.tick())
    for _ in steps(kit, 3):
        act()
    policy = kit.core._index.policies[0]
    assert not isinstance(policy, Handover) and kit.core.tier_stats()[0].pages_ready > 10
    for _ in range(10):
        act()


def test_the_order_of_use_goes_over() -> None:
    """After a handover to LRU the least recently used leave first, by uses of the meantime too."""
    kit = Kit(tier(HOST, 8, eviction="lfu"))
    for name in "abcdefgh":
        kit.put(chain(name, 1))
    for name in "aab":
        use(kit, name)
    kit.core.tuning.set_spec(0, spec_of(kit, eviction="lru"), kit.tick())
    for step, _ in enumerate(steps(kit, 3)):
        if step == 0:  # among the coldest, and handed over already
            use(kit, "c")
        if step == 1:
            use(kit, "d")
    left = []
    for name in "stuvwx":
        before = {n: kit.tiers_of(chain(n, 1)) for n in "abcdefgh"}
        kit.put(chain(name, 1))
        left += [n for n in before if before[n] == [0] and kit.tiers_of(chain(n, 1)) == [-1]]
    assert left == list("efghab")


def test_one_handover_at_a_time() -> None:
    """A second change of a tier's spec during a handover is refused, and changes nothing."""
    kit = Kit(tier(HOST, 8))
    kit.put(chain("a", 3))
    kit.core.tuning.set_spec(0, spec_of(kit, eviction="lfu"), kit.tick())
    with pytest.raises(InvalidArgument, match="under way"):
        kit.core.tuning.set_spec(0, spec_of(kit, eviction="arc"), kit.tick())
    assert kit.core._index.tiers[0].spec.eviction == "lfu"


def test_a_retired_policy_observes_nothing() -> None:
    """The learner's lists hold the policies in use alone, however often they change."""
    kit = Kit(tier(HOST, 8, eviction="reuse-index"), tier(NVME, 8, admission="learned", wear_bytes_per_s=1.0))
    kit.put(chain("a", 3))
    traffic = kit.core.tuning._policies.traffic  # type: ignore[attr-defined]
    sizes = [len(traffic.rivals), len(traffic.above), len(traffic.thresholds)]
    for name, admission in (("lru", "all"), ("reuse-index", "learned")) * 3:
        kit.core.tuning.set_spec(0, spec_of(kit, eviction=name), kit.tick())
        list(steps(kit, 8))
        kit.core.tuning.set_spec(1, spec_of(kit, 1, admission=admission), kit.tick())
    assert [len(traffic.rivals), len(traffic.above), len(traffic.thresholds)] == sizes == [1, 1, 1]


def test_a_learner_can_come_later() -> None:
    """A core that began without a learner observes requests once a policy needs one."""
    kit = Kit(tier(HOST, 8, eviction="lru"), tier(NVME, 8, admission="all"))
    assert kit.core._index.listener is None
    kit.core.tuning.set_spec(0, spec_of(kit, eviction="reuse-index"), kit.tick())
    list(steps(kit, 8))
    kit.put(chain("a", 3))
    kit.get(group(chain("a", 3)))
    assert kit.core._index.listener is not None


def test_another_admission_asks_again() -> None:
    """A block that the old admission declined is written by the new one; the budget's level stays."""
    kit = Kit(
        tier(HOST, 8, high_watermark=0.1, low_watermark=0.05),
        tier(NVME, 8, admission="second-touch", wear_bytes_per_s=1000.0, wear_burst_s=100.0),
    )
    kit.put(chain("a", 4))
    kit.now += 90
    assert len(kit.demote().transfers) == 0
    level = kit.core.tuning.wear_balance(1, kit.now).level_bytes
    kit.core.tuning.set_spec(1, spec_of(kit, 1, admission="all"), kit.now)
    assert kit.core.tuning.wear_balance(1, kit.now).level_bytes == level > 4 * PAGE
    assert len(kit.demote().transfers) == 4


def test_watermarks_and_shares_hold_at_once() -> None:
    """A lower watermark starts demotion, headroom evicts, and a smaller share refuses pages."""
    kit = Kit(tier(HOST, 16, high_watermark=0.9, low_watermark=0.8), tier(NVME, 16))
    for name in "abc":
        kit.put(chain(name, 4))
    assert len(kit.demote().transfers) == 0
    kit.core.tuning.set_spec(0, spec_of(kit, high_watermark=0.2, low_watermark=0.1), kit.tick())
    assert len(kit.demote().transfers) >= 8
    kit.land()
    kit.core.tuning.set_spec(0, spec_of(kit, headroom_bytes=8 * PAGE), kit.tick())
    kit.demote()
    kit.land()
    kit.demote()
    assert kit.core.tier_stats()[0].used_bytes <= 8 * PAGE
    kit.core.tuning.set_session_share(0.25)
    statuses = kit.reserve(chain("d", 6)).statuses[0].tolist()
    assert statuses == [BlockStatus.RESERVED] * 4 + [BlockStatus.NO_ROOM] * 2


def test_a_spec_of_yesterday_names_its_tier() -> None:
    """A request that holds the tier's earlier spec still finds that tier."""
    kit = Kit(tier(HOST, 8), tier(HOST, 8, index=1))
    kit.put(chain("a", 2))
    before = kit.core._index.tiers[1].spec
    kit.core.tuning.set_spec(1, dataclasses.replace(before, high_watermark=0.9), kit.tick())
    assert kit.core._index.serving(before) == kit.core._index.serving(kit.core._index.tiers[1].spec) == [1]
