"""The core's questions to an admission policy, and its use of the answers."""

from __future__ import annotations

import numpy as np

from tests.unit.core.kit import HOST, NVME, PAGE, Kit, chain, group, tier
from tierd.core.admission import Balance, Sizes, Verdict, Verdicts
from tierd.core.core import Core
from tierd.core.formats.model import Reason, TierSpec
from tierd.core.index.blocks import Blocks
from tierd.core.plan import Ids, Start
from tierd.policies.named import NamedPolicies


class Told:
    """Declines blocks of odd positions, or all, and records the core's calls."""

    def __init__(self, spec: TierSpec, blocks: Blocks) -> None:
        self._blocks = blocks
        self.name = spec.name
        self.all = False
        self.asked: list[int] = []
        self.uses: list[int] = []
        self.written_bytes = 0

    def touch(self, blocks: Ids, now: float) -> None:
        self.uses += blocks.tolist()

    def admit(self, blocks: Ids, sizes_bytes: Sizes, now: float) -> Verdicts:
        assert (sizes_bytes == PAGE).all()
        self.asked += blocks.tolist()
        odd = self._blocks.position[blocks] % 2 == 1
        return np.where(odd | self.all, Verdict.UNLIKELY, Verdict.WRITE).astype(np.uint8)

    def wrote(self, size_bytes: int, now: float) -> None:
        self.written_bytes += size_bytes

    def balance(self, now: float) -> Balance:
        return Balance(1.0, 2.0, 3.0)

    def resume(self, level_bytes: float, now: float) -> None:
        raise AssertionError("nothing was kept")


class Telling(NamedPolicies):
    """Policies whose admissions are recorded in `told`."""

    def __init__(self, told: list[Told]) -> None:
        super().__init__()
        self._told = told

    def admission(self, spec: TierSpec, blocks: Blocks) -> Told:
        self._told.append(Told(spec, blocks))
        return self._told[-1]


class Asked(Kit):
    """A kit whose store has an admission that records into `told`."""

    def __init__(self, *tiers: TierSpec) -> None:
        super().__init__(*tiers)
        self.told: list[Told] = []
        self.core = Core(tiers, policies=Telling(self.told), session_share=1.0, start=Start())
        self.core.open_session(1, domain=1)


def asked() -> Asked:
    """A store below eight pages of host memory, whose watermarks make every block due for writing."""
    return Asked(tier(HOST, 8, high_watermark=0.01, low_watermark=0.001), tier(NVME, 16))


def test_policies_hear_of_a_get() -> None:
    """A get is one use of each block, the last block of the sequence first."""
    kit, names = asked(), chain("a", 2)
    kit.put(names)
    blocks, told = kit.ids(names).tolist(), kit.told[0]
    told.uses.clear()
    kit.core.acquire(1, groups=[group(names)], kind=HOST, now=kit.tick())
    assert told.uses == blocks[::-1]


def test_each_store_has_its_own_and_no_other_tier_has_one() -> None:
    """The core makes one admission for each NVMe tier, and none for others."""
    kit = Asked(tier(HOST, 8), tier(NVME, 8), tier(NVME, 8, index=1))
    assert [told.name for told in kit.told] == ["nvme.0", "nvme.1"]


def test_what_is_declined_is_not_written_and_not_asked_about_again() -> None:
    """Demotion writes the admitted blocks. It asks once about a declined block and counts it."""
    kit = asked()
    hashes = chain("a", 6)
    kit.put(hashes)
    plan = kit.demote()
    ids = kit.ids(hashes)
    assert sorted(plan.transfers["block"].tolist()) == sorted(ids[::2].tolist())
    kit.land()
    assert kit.demote().is_empty
    assert sorted(kit.told[0].asked) == sorted(ids.tolist())
    assert kit.core.tier_stats()[1].declined == {"unlikely": 3}
    assert kit.core.describe(ids)["declined"].tolist() == [0, Verdict.UNLIKELY] * 3
    assert kit.told[0].written_bytes == 3 * PAGE


def test_a_plan_is_empty_only_where_nothing_is_to_be_written() -> None:
    """Demotion with a small limit skips declined blocks until it finds one to write."""
    kit = asked()
    hashes = chain("a", 8)
    kit.put(hashes)
    written = []
    while not (plan := kit.demote(limit=1)).is_empty:
        written += plan.transfers["block"].tolist()
        assert len(plan.transfers) == 1
        kit.land()
    assert sorted(written) == sorted(kit.ids(hashes)[::2].tolist())
    assert len(kit.told[0].asked) == 8


def test_a_use_makes_a_block_new() -> None:
    """The core asks again about a declined block after its next use."""
    kit = asked()
    kit.told[0].all = True
    hashes = chain("a", 4)
    kit.put(hashes)
    assert kit.demote().is_empty
    kit.told[0].all = False
    assert kit.demote().is_empty
    acquired = kit.acquire(group(hashes))
    kit.settle(acquired)
    kit.release(acquired.lease)
    ids = kit.ids(hashes)
    assert kit.core.describe(ids)["declined"].tolist() == [0] * 4
    assert sorted(kit.demote().transfers["block"].tolist()) == sorted(ids[::2].tolist())


def test_what_a_store_has_is_known() -> None:
    """`kept` is set from the begin of a block's write to a store until the store drops it."""
    kit, hashes = asked(), chain("a", 6)
    kit.put(hashes)
    ids, kept = kit.ids(hashes), kit.core._index.blocks.kept
    assert not kept[ids].any()
    kit.demote()
    assert kept[ids].tolist() == [True, False] * 3
    kit.land()
    kit.core.evict(ids[:1], tier=1, now=kit.now)
    kit.core.check()
    assert kept[ids].tolist() == [False, False, True, False, True, False]


def test_what_is_declined_is_dropped_for_room() -> None:
    """Under pressure a declined block is EVICTED without a write, and a clean one is DEMOTED."""
    kit = asked()
    hashes = chain("a", 8)
    kit.put(hashes)
    kit.demote()
    kit.land()
    plan = kit.reserve(chain("b", 8)).plan
    reasons = plan.freed["reason"].tolist()
    assert reasons.count(Reason.EVICTED) == reasons.count(Reason.DEMOTED) == 4
    assert kit.tiers_of(hashes) == [1, -1] * 4


def test_durable_blocks_are_written_unasked() -> None:
    """`persist` writes blocks without asking the admission, and reports the bytes to it."""
    kit = asked()
    kit.told[0].all = True
    kit.put(chain("a", 4))
    ids = kit.ids(chain("a", 4))
    plan = kit.took(kit.core.persist(ids, now=kit.tick()))
    assert len(plan.transfers) == 4 and kit.told[0].asked == []
    assert kit.told[0].written_bytes == 4 * PAGE


def test_uses_are_heard_wherever_blocks_lie() -> None:
    """A commit and each demand are uses in all tiers, the last block of the sequence first."""
    kit = asked()
    hashes = chain("a", 3)
    kit.put(hashes)
    ids = kit.ids(hashes).tolist()
    assert kit.told[0].uses == ids[::-1]
    kit.get(group(hashes))
    assert kit.told[0].uses == ids[::-1] * 2


def test_the_budget_is_asked_through_the_core() -> None:
    """`tuning.wear_balance` returns the admission's balance."""
    assert asked().core.tuning.wear_balance(1, 5.0) == (1.0, 2.0, 3.0)
