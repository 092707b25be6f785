"""The prefix tree of a daemon's blocks, asked for as an operator does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.cache.world import TOKENS, World, opened
from tierd._proto import admin_pb2 as pb
from tierd.core.formats.model import Durability
from tierd.errors import InvalidArgument, NotFound
from tierd.server.operators.tree import Trees
from tierd.testing import chain

COMMON, LEFT, RIGHT = chain(1, 6), chain(2, 3), chain(3, 2)


async def put_both(world: World) -> None:
    """Puts two prompts with the same first six blocks, one of them also on NVMe, and reads it once."""
    left, right = np.concatenate((COMMON, LEFT)), np.concatenate((COMMON, RIGHT))
    await world.put(left, durability=Durability.DURABLE)
    await world.put(right)
    lease = await world.acquire(left)
    world.cache.release(world.session, [lease.lease])


async def test_two_prompts_share_a_run() -> None:
    """Two prompts with a common prefix are three runs, with their tokens, uses and tiers."""
    async with opened() as world:
        await put_both(world)
        tree = await Trees(world.cache).reply(pb.TreeRequest())
        assert [node.hash for node in tree.nodes] == [names[-1].tobytes() for names in (COMMON, LEFT, RIGHT)]
        assert [(node.parent, node.position, node.blocks, node.hits) for node in tree.nodes] == [
            (-1, 0, 6, 1), (0, 6, 3, 1), (0, 6, 2, 0),
        ]  # fmt: skip
        common = tree.nodes[0]
        assert (common.tokens, common.tokens_below, common.leaves) == (6 * TOKENS, 5 * TOKENS, 2)
        assert dict(common.tier_blocks) == {"host.0": 6}
        assert (tree.blocks, tree.tokens, tree.tokens_shared) == (11, 11 * TOKENS, 6 * TOKENS)
        assert (tree.runs, tree.is_cut, [row.blocks for row in tree.depths]) == (3, False, [11])
        await world.daemon.cache.flights.idle(timeout_s=10)
        for ids in world.cache.core.pieces():
            world.cache.flights.start(world.cache.core.evict(ids, tier=0, now=world.cache.clock.now()))
        tree = await Trees(world.cache).reply(pb.TreeRequest())
        assert [dict(node.tier_blocks) for node in tree.nodes] == [{"nvme.0": 9}]


PARTS = {
    "limit": (pb.TreeRequest(limit=2), 2, True),
    "under": (pb.TreeRequest(root=LEFT[0].tobytes().hex()), 1, False),
    "under the middle of a run": (pb.TreeRequest(root=COMMON[3].tobytes().hex()[:10]), 3, False),
    "model": (pb.TreeRequest(model="m"), 3, False),
    "namespace": (pb.TreeRequest(namespace=1, has_namespace=True, sort="recent"), 3, False),
}


async def test_a_part_of_the_tree() -> None:
    """Each way to ask for a part lists that part, and a reply that leaves runs out says so."""
    async with opened() as world:
        await put_both(world)
        for name, (request, runs, is_cut) in PARTS.items():
            tree = await Trees(world.cache).reply(request)
            assert (len(tree.nodes), tree.is_cut) == (runs, is_cut), name


WRONG = {
    "sort": (pb.TreeRequest(sort="size"), InvalidArgument, "hits, tokens, recent"),
    "absent": (pb.TreeRequest(root="00ff00ff00"), NotFound, "tierctl blocks"),
    "no hash": (pb.TreeRequest(root="xyz"), InvalidArgument, "hexadecimal"),
    "model": (pb.TreeRequest(model="n"), NotFound, "tierctl namespaces"),
    "namespace": (pb.TreeRequest(namespace=9, has_namespace=True), NotFound, "not known"),
    "of another": (
        pb.TreeRequest(namespace=2, has_namespace=True, root=LEFT[0].tobytes().hex()),
        NotFound,
        "namespaces",
    ),
}


async def test_a_wrong_request_is_refused() -> None:
    """A wrong request gets an error with a remedy, and the next one is answered."""
    async with opened() as world:
        await put_both(world)
        world.cache.open_namespace(world.session, replace(world.namespace.spec, salt="other"))
        trees = Trees(world.cache)
        for request, error, said in WRONG.values():
            with pytest.raises(error, match=said):
                await trees.reply(request)
        assert (await trees.reply(pb.TreeRequest())).blocks == 11


async def test_blocks_that_change_meanwhile_make_no_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all blocks are evicted and others get their ids, a run has the first bytes of its own hash."""
    async with opened() as world:
        await world.put(COMMON)
        trees, core = Trees(world.cache), world.cache.core
        thread = trees._in_thread

        async def and_replaced(work: Callable[..., Any], *given: Any) -> Any:
            done = await thread(work, *given)
            monkeypatch.undo()
            ids = core.find_blocks(world.namespace.id, COMMON)
            world.cache.flights.start(core.evict(ids, tier=None, now=world.cache.clock.now()))
            await world.put(LEFT)
            await world.put(RIGHT)
            return done

        monkeypatch.setattr(trees, "_in_thread", and_replaced)
        (node,) = (await trees.reply(pb.TreeRequest())).nodes
        assert COMMON[-1].tobytes().startswith(node.hash) and len(node.hash) == 8


async def test_trees_are_computed_one_at_a_time() -> None:
    """Several callers at once each get the whole tree, and a cancelled one leaves the next its turn."""
    async with opened() as world:
        await put_both(world)
        trees = Trees(world.cache)
        first = asyncio.create_task(trees.reply(pb.TreeRequest()))
        others = [asyncio.create_task(trees.reply(pb.TreeRequest())) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        assert [(await other).blocks for other in others] == [11] * 3
