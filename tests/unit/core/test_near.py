"""Gets with near blocks take a short path, and get the same answers as on the long path."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.depth import count
from tests.unit.core.kit import DEVICE, HOST, NVME, TOKENS, Kit, chain, group, tier
from tierd.core.formats.model import Need
from tierd.core.plan import Acquisition, Served

NAMES = "abcde"
WORLDS = {
    "host": [tier(HOST, 12)],
    "host and store": [tier(HOST, 12), tier(NVME, 16)],
    "two hosts": [tier(HOST, 8), tier(HOST, 8, index=1)],
    "device": [tier(DEVICE, 8), tier(HOST, 12), tier(NVME, 16)],
}


def long_way(kit: Kit) -> Kit:
    """The same kit without the short path."""
    kit.core._gets._acquire_near = lambda *_, **__: None  # type: ignore[method-assign]
    return kit


def told(served: Served) -> tuple[object, ...]:
    """All fields of an answer."""
    groups = [
        (g.first, g.count, g.extents.tobytes(), g.tokens.tobytes(), g.extents.shape, g.blocks.tolist())
        for g in served.groups
    ]
    return served.tokens, groups


def books(kit: Kit) -> tuple[object, ...]:
    """The core's descriptions of its blocks and its stats."""
    described = kit.core.describe(kit.core.blocks()).tobytes()
    return described, kit.core.stats(), kit.core.tier_stats(), kit.core.session_stats()


def acquired(kit: Kit, answer: Acquisition, *, lands: bool) -> tuple[object, ...]:
    """The fields of an acquisition and of its settle. lands: all transfers finish before the settle."""
    said = (answer.lease, answer.tokens, answer.tier_tokens, answer.whole, answer.shut, answer.plan.transfers.tobytes())
    asked = (answer.question.kind, [ids.tolist() for ids in answer.question.used])
    if lands:
        kit.land()
    served = kit.settle(answer) if answer.lease else None
    if answer.served is not None and served is not None:
        assert told(answer.served) == told(served), "what was said at once is what there is"
    return said, asked, told(served) if served is not None else None


def step(kit: Kit, chooser: random.Random, leases: list[int]) -> object:
    """One random call and its answer."""
    verb, name, count = (
        chooser.choice(["put", "get", "get", "get", "twice", "release", "far", "other"]),
        chooser.choice(NAMES),
        chooser.randint(1, 6),
    )
    hashes, kind = chain(name, count), chooser.choice([HOST, HOST, HOST, DEVICE])
    if verb == "put":
        reserved = kit.reserve(hashes)
        return kit.commit(reserved).statuses.tolist() if reserved.reservation else None
    if verb == "far":
        kit.took(kit.core.persist(kit.core.blocks(), now=kit.tick()))
        kit.land()
        return kit.took(kit.core.evict(kit.core.blocks()[::2], tier=0, now=kit.tick())).freed.tobytes()
    if verb == "release":
        kit.release(*leases[: len(leases) // 2 + 1])
        del leases[: len(leases) // 2 + 1]
        return None
    if verb == "twice":  # a query may name a block more than once
        hashes = np.concatenate((hashes, hashes[:1]))
    need = Need.LAST_TOKENS if verb == "other" else Need.PREFIX
    tokens = TOKENS * len(hashes) - chooser.choice([0, 0, 3])
    answer = kit.acquire(group(hashes, tokens=tokens, need=need, last=20), kind=kind)
    leases.append(answer.lease)
    return acquired(kit, answer, lands=chooser.random() < 0.7)


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_answers(world: str) -> None:
    """Two cores give the same answers and books for the same calls, one of them only on the long path."""
    answered = 0
    for seed in range(count(test=4, nightly=12, weekly=48)):
        kits = [Kit(*WORLDS[world], share=0.7), long_way(Kit(*WORLDS[world], share=0.7))]
        choosers, leases = [random.Random(seed) for _ in kits], [list[int](), list[int]()]
        for _ in range(60):
            short, long = (step(*those) for those in zip(kits, choosers, leases, strict=True))
            assert short == long
            assert books(kits[0]) == books(kits[1])
        answered += sum(1 for lease in leases[0] if lease)
    assert answered > 0


@pytest.mark.parametrize("world", ["host", "host and store", "device"])
def test_it_is_answered_at_once(world: str) -> None:
    """An acquisition already holds the answer if the requested tier has the blocks and no nearer tier
    does."""
    kit = Kit(*WORLDS[world])
    kit.put(chain("a", 3), kind=HOST)
    for blocks in (3, 5):
        answer = kit.acquire(group(chain("a", blocks)))
        assert answer.served is not None
        assert (answer.tokens, answer.whole, answer.served.groups[0].count) == (3 * TOKENS, True, 3)


def test_what_lies_apart_is_not() -> None:
    """If the requested tier lacks some of the held blocks, the get takes the long path."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    kit.put(chain("a", 4))
    kit.took(kit.core.persist(kit.ids(chain("a", 4)), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(chain("a", 4))[2:3], tier=0, now=kit.tick()))
    assert kit.acquire(group(chain("a", 4))).served is None


@pytest.mark.parametrize("world", ["host", "host and store"])
@pytest.mark.parametrize("seed", range(3))
def test_gets_that_clients_make_by_themselves_teach_the_same(world: str, seed: int) -> None:
    """A get without a lease affects evictions as one with a lease does, and pins nothing."""
    chance, asked, alone = random.Random(seed), Kit(*WORLDS[world]), Kit(*WORLDS[world])
    chains = {name: chain(name, chance.randrange(1, 5)) for name in NAMES}
    gets = 0
    for _ in range(80):
        hashes, is_put = chains[chance.choice(NAMES)], chance.random() < 0.4
        is_near = asked.tiers_of(hashes) == [0] * len(hashes)
        for kit in (asked, alone):
            if is_put:
                kit.put(hashes)
                kit.land()
        if is_near and not is_put:
            gets += 1
            asked.release(asked.acquire(group(hashes)).lease)
            assert alone.core.used(1, groups=[group(hashes)], kind=HOST, now=alone.tick()).tokens == TOKENS * len(
                hashes
            )
            alone.tick()
            alone.core.check()
        assert [asked.tiers_of(each) for each in chains.values()] == [alone.tiers_of(each) for each in chains.values()]
    assert gets > 10 and alone.core.stats().leases == 0


def test_a_copy_in_flight_is_not_served() -> None:
    """Pages that a transfer still fills are answered when it has landed, not at once."""
    kit = Kit(tier(HOST, 8), tier(NVME, 8))
    kit.put(chain("a", 3))
    kit.took(kit.core.persist(kit.ids(chain("a", 3)), now=kit.tick()))
    kit.land()
    kit.took(kit.core.evict(kit.ids(chain("a", 3)), tier=0, now=kit.tick()))
    first, second = (kit.acquire(group(chain("a", 3))) for _ in range(2))
    assert first.served is None and second.served is None and kit.flying
    kit.land()
    assert kit.acquire(group(chain("a", 3))).served is not None
