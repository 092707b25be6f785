"""Operator verbs over all blocks run in pieces, and changes between two pieces make no result wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.cache.world import SOON_S, World, directories, opened
from tierd._proto import admin_pb2 as pb
from tierd.cache.operator import SORT_COLUMNS, BlockFilter, Operator
from tierd.config import EventsConfig
from tierd.core.core import Core
from tierd.core.formats.block import Namespace
from tierd.core.formats.model import Durability
from tierd.core.index import namespaces
from tierd.errors import NotFound, Overloaded, TierFailed
from tierd.events.feed import Feed
from tierd.events.publisher import Publisher
from tierd.events.router_view import RouterView
from tierd.server.operators.tree import Trees
from tierd.testing import chain

PIECE = 4
NAMES = chain(1, 30)
OTHERS = chain(2, 30)
GOES_THROUGH = ("blocks", "find_by_prefix", "column", "tier_bits", "names", "describe", "evict", "free_forgotten")
"""The core's methods that take many ids."""


class Turns:
    """The number of ids per core method, or per column, at each turn of the loop."""

    def __init__(self, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rows = 0, Counter[tuple[int, str]]()
        self._core = core
        for name in GOES_THROUGH:
            monkeypatch.setattr(core, name, partial(self._noted, name, getattr(core, name)))
        self._count()

    def _count(self) -> None:
        self.now += 1
        asyncio.get_running_loop().call_soon(self._count)

    def _noted(self, name: str, ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = options.get("of", next((arg for arg in args if isinstance(arg, np.ndarray)), None))
        what = f"column {args[0]}" if name == "column" else name
        self.rows[self.now, what] += self._core._index.blocks.top if given is None else len(given)
        return ask(*args, **options)


def whole(name: np.ndarray) -> str:
    return name.tobytes().hex()


async def tell_all(world: World) -> None:
    """Feeds all blocks, as for routers that subscribe."""
    feed = Feed(world.cache, None)  # type: ignore[arg-type]
    for ids in world.cache.core.pieces():
        assert all(step.is_stored for step in feed._held(ids))
        await asyncio.sleep(0)


VERBS: dict[str, Callable[[World, Operator], Awaitable[Any]]] = {
    "evict": lambda _, operator: operator.evict([], ""),
    "evict a tier": lambda _, operator: operator.evict([], "host.0"),
    "evict by name": lambda _, operator: operator.evict([whole(NAMES[3])[:16], whole(NAMES[9])], ""),
    "pin": lambda _, operator: operator.pin([whole(NAMES[3])[:16]]),
    "list": lambda _, operator: operator.blocks(BlockFilter(), offset=0, limit=PIECE),
    "list some": lambda _, operator: operator.blocks(BlockFilter(hash_prefix="0"), offset=0, limit=PIECE),
    "count": lambda _, operator: operator.counts(),
    "find": lambda _, operator: operator.find(whole(NAMES[3])),
    "find a prefix": lambda _, operator: operator.find(whole(NAMES[3])[:16]),
    "flush": lambda _, operator: operator.flush(timeout_s=SOON_S),
    "bump": lambda world, _: world.end_epoch(),
    "feed": lambda world, _: tell_all(world),
    "tree": lambda world, _: Trees(world.cache).reply(pb.TreeRequest()),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_no_step_goes_through_all_blocks(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns of the loop a verb makes the core visit at most two pieces of blocks."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        await world.put(OTHERS, durability=Durability.DURABLE)
        monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
        turns = Turns(world.cache.core, monkeypatch)
        await VERBS[verb](world, Operator(world.cache))
        assert max(turns.rows.values(), default=0) <= 2 * PIECE
    assert len(NAMES) + len(OTHERS) > 10 * PIECE


def after_first(core: Core, name: str, what: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `what` after the core's first call of this method."""
    ask = getattr(core, name)

    def asked(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(core, name, ask)
        answer = ask(*args, **options)
        asyncio.get_running_loop().call_soon(what)
        return answer

    monkeypatch.setattr(core, name, asked)


def ids_of(world: World, names: np.ndarray) -> np.ndarray:
    return world.cache.core.find_blocks(world.namespace.id, names)


def drop(world: World, names: np.ndarray) -> None:
    core = world.cache.core
    world.cache.flights.start(core.evict(ids_of(world, names), tier=None, now=world.cache.clock.now()))


def used_bytes(world: World) -> int:
    return sum(tier.used_bytes for tier in world.cache.core.tier_stats())


async def test_what_somebody_pins_before_its_turn_comes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction checks pins at the moment of each piece, and counts dropped and pinned blocks."""
    async with opened() as world:
        await world.put(NAMES)
        core, last = world.cache.core, ids_of(world, NAMES[-1:])
        monkeypatch.setattr(core, "piece_blocks", PIECE)
        after_first(core, "evict", lambda: core.pin_blocks(last), monkeypatch)
        gone = await Operator(world.cache).evict([], "")
        assert (gone.blocks, gone.pinned) == (len(NAMES) - 1, 1)
        assert core.blocks().tolist() == last.tolist()
        core.check()


async def test_an_eviction_that_is_cut_short_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled eviction keeps the remaining blocks intact, and the next eviction drops them."""
    async with opened() as world:
        await world.put(NAMES)
        monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
        evicting = asyncio.ensure_future(Operator(world.cache).evict([], ""))
        after_first(world.cache.core, "evict", evicting.cancel, monkeypatch)
        with pytest.raises(asyncio.CancelledError):
            await evicting
        left = len(world.cache.core.blocks())
        assert 0 < left < len(NAMES)
        assert (await Operator(world.cache).evict([], "")).blocks == left
        assert used_bytes(world) == 0


async def test_an_id_that_gets_another_block_is_not_taken_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb skips a block that is evicted while it resolves other names, and never pins the id's new
    block."""
    async with opened() as world:
        one, two, three = NAMES[:1], OTHERS[:1], chain(3, 1)
        await world.put(one)
        await world.put(two)
        operator, first = Operator(world.cache), ids_of(world, one)
        find = operator.find

        async def find_after(prefix: str) -> int:
            if prefix == whole(two):
                drop(world, one)
                await world.put(three)
            return await find(prefix)

        monkeypatch.setattr(operator, "find", find_after)
        assert await operator.pin([whole(one), whole(two)]) == 1
        assert ids_of(world, three) == first
        assert world.cache.core.blocks(pinned=True).tolist() == ids_of(world, two).tolist()


@pytest.mark.parametrize("digits", [16, 64])
async def test_a_name_of_an_ended_epoch_is_not_found(digits: int) -> None:
    """A name of an ended epoch is NotFound, by its full hash or by its first digits."""
    async with opened() as world:
        await world.put(NAMES)
        wanted = whole(NAMES[2])[:digits]
        assert await Operator(world.cache).find(wanted) == ids_of(world, NAMES[2:3])
        await world.end_epoch()
        with pytest.raises(NotFound, match="no tier holds"):
            await Operator(world.cache).find(wanted)


@pytest.mark.parametrize("sort", ["", "-recent", "hits", "position", "-position", "bytes"])
async def test_a_listing_in_pieces_is_the_listing_at_once(sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a listing contain every block once, in the requested order."""
    async with opened() as world:
        await world.put(NAMES)
        await world.acquire(NAMES[:7])
        operator, wanted = Operator(world.cache), BlockFilter(sort=sort)
        at_once = (await operator.blocks(wanted, offset=0, limit=100)).rows
        assert len(at_once) == len(NAMES)
        key = at_once[SORT_COLUMNS[sort.removeprefix("-") or "recent"]].tolist()
        assert key == sorted(key, reverse=sort in {"", "hits", "bytes", "-position"})
        monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
        pages = [await operator.blocks(wanted, offset=at, limit=8) for at in range(0, 32, 8)]
        assert [page.total for page in pages] == [len(NAMES)] * 4
        assert np.concatenate([page.rows for page in pages]).tobytes() == at_once.tobytes()


async def test_a_listing_shows_nothing_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing shows neither a block evicted meanwhile nor the new block of its id."""
    async with opened() as world:
        await world.put(NAMES)
        monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
        after_first(world.cache.core, "column", lambda: drop(world, NAMES[:2]), monkeypatch)
        wanted = BlockFilter(tier="host.0", hash_prefix=whole(NAMES[0])[:1])
        page = await Operator(world.cache).blocks(wanted, offset=0, limit=100)
        shown = {row["hash"].tobytes() for row in page.rows}
        assert shown == {n.tobytes() for n in NAMES[2:] if whole(n)[0] == whole(NAMES[0])[0]}


# -- epochs


async def test_an_epoch_ends_at_once_and_is_freed_when_the_next_life_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bump hides all blocks before its first await, and frees them only after the epoch is on disk."""
    async with opened() as world:
        await world.put(NAMES, durability=Durability.DURABLE)
        core, used = world.cache.core, used_bytes(world)
        monkeypatch.setattr(core, "piece_blocks", PIECE)
        kept = list[Namespace]()

        async def keep(*fresh: Namespace) -> None:
            for _ in range(3):
                assert used_bytes(world) == used
                assert (ids_of(world, NAMES) == -1).all()
                assert core.stats().blocks == len(core.blocks()) == 0
                await asyncio.sleep(0)
            await world.daemon.keep_namespaces(*fresh)
            kept.extend(fresh)

        fresh, blocks = await Operator(world.cache).bump_epoch(model="m", namespace_id=0, keep=keep)
        assert (fresh, blocks) == (kept, len(NAMES))
        assert used_bytes(world) == 0
        core.check()


async def test_a_bump_goes_on_without_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled bump still ends the epoch, and frees its blocks after the epoch is on disk."""
    async with opened() as world:
        await world.put(NAMES)
        monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
        may_end, used = asyncio.Event(), used_bytes(world)
        bump = Operator(world.cache).bump_epoch

        async def keep(*_fresh: Namespace) -> None:
            await may_end.wait()

        bumping = asyncio.ensure_future(bump(model="m", namespace_id=0, keep=keep))
        await asyncio.sleep(0)
        bumping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bumping
        assert used_bytes(world) == used
        (end,) = world.cache.background._ends
        may_end.set()
        await end
        assert used_bytes(world) == 0
        world.cache.core.check()


async def test_a_bump_for_which_one_tenant_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one tenant is at its limit, no epoch ends."""
    async with opened() as world:
        cache = world.cache
        cache.open_session(12, tenant="full")
        cache.open_namespace(12, replace(world.namespace.spec, rank_count=3))
        await world.put(NAMES)
        monkeypatch.setattr(namespaces, "TENANT_LIMIT", 4)
        with pytest.raises(Overloaded, match="full has 3"):
            await world.end_epoch()
        assert all(map(cache.registry.is_current, cache.registry.all()))
        assert (ids_of(world, NAMES) >= 0).all()


async def test_a_bump_that_the_next_life_cannot_be_told_of() -> None:
    """If the new epoch cannot be stored, the caller gets the error, and the epoch still ends in this life."""
    async with opened() as world:
        await world.put(NAMES)

        async def keep(*_fresh: Namespace) -> None:
            raise TierFailed("state: no room")

        with pytest.raises(TierFailed, match="no room"):
            await Operator(world.cache).bump_epoch(model="m", namespace_id=0, keep=keep)
        assert (ids_of(world, NAMES) == -1).all()
        assert used_bytes(world) == 0


async def test_an_end_in_the_middle_of_a_bump_leaves_nothing_to_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that stops while it frees an ended epoch stops at once. The next life has none of its
    blocks."""
    with directories() as places:
        async with opened(places=places) as world:
            await world.put(NAMES, durability=Durability.DURABLE)
            monkeypatch.setattr(world.cache.core, "piece_blocks", PIECE)
            stopping = list[asyncio.Task[None]]()
            stop = world.cache.background.stop
            after_first(
                world.cache.core, "free_forgotten", lambda: stopping.append(asyncio.create_task(stop())), monkeypatch
            )
            with pytest.raises(asyncio.CancelledError):
                await world.end_epoch()
            await stopping[0]
            assert used_bytes(world) > 0
        async with opened(places=places) as world:
            assert len(world.cache.core.blocks()) == 0
            assert world.namespace.epoch == 2
            world.cache.core.check()


# -- events


async def test_routers_are_right_after_all_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers end up with exactly the held blocks, though blocks come and go during the feed."""
    async with opened() as world:
        await world.put(NAMES)
        core = world.cache.core
        monkeypatch.setattr(core, "piece_blocks", PIECE)
        told = RouterView(("CPU", "STORAGE"), 1000)
        publisher = Publisher(EventsConfig(enabled=True, bind=f"ipc://{tmp_path}/e", replay_bind=""), told)
        again = list[asyncio.Task[Any]]()

        def meanwhile() -> None:
            drop(world, NAMES[[0, 1, -1]])
            again.append(asyncio.create_task(world.put(NAMES[[1]])))

        after_first(core, "tier_bits", meanwhile, monkeypatch)
        feed = asyncio.create_task(Feed(world.cache, publisher).run())
        async with asyncio.timeout(SOON_S):
            while not again:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await again[0]
            world.cache.events.close()
            await feed
        held = {name for (_, name), block in told._blocks.items() if block.held}
        await asyncio.to_thread(publisher.close, timeout_s=SOON_S)
        assert held == {name.tobytes() for name in NAMES[1:-1]}
