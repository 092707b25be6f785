"""Hits and misses of tokens, by tier: they add up whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator

import pytest

from tests.unit.cache.world import SOON_S, TOKENS, World, opened
from tierd import failpoint
from tierd.cache.counting import served_by_tier
from tierd.cache.operator import Operator
from tierd.core.formats.model import Durability, Need, TierKind
from tierd.core.plan import GroupQuery
from tierd.testing import chain

STEPS = 120
HOST, STORE = 0, 1


def counted(world: World, name: str) -> dict[str, int]:
    """A counter's values by its one label's value."""
    found = {key: value for key, value in world.cache.metrics.counters().items() if key.startswith(name + "{")}
    return {key.split('"')[1]: value for key, value in found.items()}


def tiers(world: World) -> dict[str, tuple[int, int]]:
    """(found, missed) tokens of each tier."""
    hits, missed = (counted(world, f"tierd_{name}_total") for name in ("tokens_hit", "tier_tokens_missed"))
    return {name: (hits.get(name, 0), missed.get(name, 0)) for name in ("host.0", "nvme.0")}


async def get(world: World, query: GroupQuery) -> None:
    """A get that is released at once."""
    lease = await world.cache.acquire(world.session, [query], kind=TierKind.HOST, timeout_s=SOON_S)
    assert sum(lease.tier_tokens) == lease.served.tokens
    if lease.lease:
        world.cache.release(world.session, [lease.lease])
    await asyncio.sleep(0)  # the get is counted after its answer


async def step(world: World, rng: random.Random) -> int:
    """One random action; the tokens that it asked for, as the counters see it."""
    names = chain(rng.randrange(6), rng.randrange(1, 12))
    query, cache, core = world.query(names), world.cache, world.cache.core
    ids = core.find_blocks(world.namespace.id, names)
    hashes = [name.tobytes().hex() for name in names[ids >= 0]]
    match rng.choices(["put", "get", "lookup", "used", "evict", "turn", "damage", "fail"], [5, 6, 2, 2, 5, 1, 2, 3])[0]:
        case "put":
            if reservation := (await world.reserve(names)).reservation:
                await world.commit(reservation, durability=Durability.DURABLE)
        case "get":
            await get(world, query)
            return query.tokens
        case "lookup":
            return query.tokens - cache.lookup(world.session, [query]).tokens
        case "used":
            if held := core.lookup([query], now=0.0).tokens // TOKENS:
                times = rng.randrange(1, 4)
                cache.note_used(world.session, [world.query(names[:held])], times=times)
                return times * held * TOKENS
        case "evict" if hashes:
            await Operator(cache).evict(hashes, rng.choice(["host.0", "host.0", ""]))
        case "turn":
            core.set_serving(STORE, not core.is_serving(STORE))
        case "damage":
            held = core.extents(ids[ids >= 0], tier=HOST)
            for extent in held[held["page"] >= 0][-1:]:
                world.page(extent)[0] ^= 0xFF
        case "fail":
            failpoint.disarm()
            if rng.random() < 0.5:
                failpoint.arm("mover.load.before_verify", "error:EIO")
    return 0


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    failpoint.disarm()


async def run(seed: int) -> tuple[list[int], set[str]]:
    """Checks the sums of random traffic. The tokens of each kind in it, and the reasons of misses."""
    rng = random.Random(seed)
    async with opened() as world:
        asked, near_only = 0, 0
        for _ in range(STEPS):
            before, is_only = tiers(world), not world.cache.core.is_serving(STORE)
            asked += await step(world, rng)
            near_only += is_only * (tiers(world)["host.0"][1] - before["host.0"][1])
        failpoint.disarm()
        hits, missed = (sum(counted(world, f"tierd_tokens_{name}_total").values()) for name in ("hit", "missed"))
        host, store = tiers(world)["host.0"], tiers(world)["nvme.0"]
        assert (hits + missed, sum(host)) == (asked, asked)
        assert (host[1] - near_only, near_only + store[1]) == (sum(store), missed)
        world.cache.core.check()
        return [*host, *store, near_only], set(counted(world, "tierd_tokens_missed_total"))


async def test_every_token_asked_for_is_counted_once() -> None:
    """Over random traffic with failures: all hits and all misses are all tokens asked for. So are
    the hits of all tiers and the misses of the last. Each tier is asked for what the nearer missed."""
    found, reasons = zip(*[await run(seed) for seed in range(4)], strict=True)
    assert all(map(sum, zip(*found, strict=True))), "the traffic had all of it"
    assert {"absent", "failed"} <= set().union(*reasons)


async def test_a_block_that_was_put_meanwhile_is_counted() -> None:
    """The read of a windowed get's last block fails. An earlier window is served, which was put after
    the get began: its tokens count for the memory that has them."""
    async with opened() as world:
        names = chain(7, 3)
        await world.put(names, durability=Durability.DURABLE)
        await Operator(world.cache).evict([name.tobytes().hex() for name in names[:2]], "")
        await Operator(world.cache).evict([names[2].tobytes().hex()], "host.0")
        query = dataclasses.replace(world.query(names), need=Need.LAST_TOKENS, need_tokens=TOKENS)
        failpoint.arm("mover.load.before_verify", "error:EIO")
        now = world.cache.clock.now
        got = world.cache.core.acquire(world.session, groups=[query], kind=TierKind.HOST, now=now(), shut=())
        assert (got.tokens, got.nearest.tolist()) == (3 * TOKENS, [-1, -1, STORE])
        world.cache.flights.start(got.plan)
        await world.put(names[:2])
        await world.cache.flights.landed(got.plan, timeout_s=SOON_S)
        served = world.cache.core.settle(got.lease, now=now())
        assert served.tokens == 2 * TOKENS
        assert served_by_tier([query], got, served) == [TOKENS, 0]
