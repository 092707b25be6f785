"""Tiers that serve reads and accept no new blocks."""

from __future__ import annotations

from tests.unit.core.kit import HOST, NVME, Kit, chain, group, tier


def _kit(stores: int = 1) -> Kit:
    """A host tier that demotes early, and `stores` stores of 8 pages."""
    host = tier(HOST, 4, high_watermark=0.5, low_watermark=0.25)
    return Kit(host, *(tier(NVME, 8, index=i) for i in range(stores)))


def test_nothing_is_demoted_there() -> None:
    """No block is demoted to a store that is not writable. Demotion resumes when it is writable again."""
    kit = _kit()
    kit.put(chain("a", 3))
    kit.core.set_writable(1, False)
    assert kit.demote().is_empty
    kit.core.set_writable(1, True)
    assert len(kit.demote().transfers) == 2


def test_what_it_holds_is_served() -> None:
    """The blocks of such a store are hits and are promoted. The core persists nothing new to it."""
    kit = _kit()
    kit.put(chain("a", 2))
    kit.took(kit.core.persist(kit.ids(chain("a", 2)), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(chain("a", 2)), tier=0, now=kit.tick()))
    kit.core.set_writable(1, False)
    assert kit.get(group(chain("a", 2))).tokens == 32
    kit.put(chain("b", 1))
    assert kit.took(kit.core.persist(kit.ids(chain("b", 1)), now=kit.tick())).is_empty


def test_the_other_store_takes_over() -> None:
    """With two stores, every new block goes to the writable one."""
    kit = _kit(stores=2)
    kit.core.set_writable(2, False)
    for name in "abcd":
        kit.put(chain(name, 1))
        plan = kit.took(kit.core.persist(kit.ids(chain(name, 1)), now=kit.tick()))
        assert plan.transfers["target"]["tier"].tolist() == [1]
        kit.land()
    assert kit.core.tier_stats()[2].writable is False
