"""Operators' requests and replies over the daemon's own sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.unit.cache.world import BLOCK_BYTES, SOON_S
from tests.unit.server.grpc.test_guard import rigged
from tests.unit.tiers.arena.test_arena_files import held_up
from tierd._proto import admin_pb2 as apb
from tierd.core.formats.model import Durability
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.testing import chain
from tierd.tiers.arena.arena import Arena

NAMES = chain(1, 4)


async def test_a_drain_frees_the_arena_only_when_nothing_is_leased() -> None:
    """Drain with release keeps the arena and counts leases while one lives; otherwise it frees the arena."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        metadata = await rig.session()
        await rig.world.put(NAMES)
        lease = await rig.world.acquire(NAMES)
        drain = apb.DrainRequest(deadline_s=0.05, release=True)
        assert (await admin.Drain(drain, metadata=metadata)).leases_left == 1
        assert not rig.world.daemon.release
        rig.world.cache.release(rig.world.session, [lease.lease])
        assert (await admin.Drain(drain, metadata=metadata)).leases_left == 0
        assert rig.world.daemon.release


async def test_tiers_tell_what_was_moved() -> None:
    """A durable put's bytes are counted for the source tier as read and for the target tier as written."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        metadata = await rig.session()
        await rig.world.put(NAMES, durability=Durability.DURABLE)
        told = {tier.name: tier for tier in (await admin.Tiers(apb.TiersRequest(), metadata=metadata)).tiers}
        wanted = len(NAMES) * BLOCK_BYTES
        assert (told["host.0"].bytes_read, told["host.0"].bytes_written) == (wanted, 0)
        assert (told["nvme.0"].bytes_read, told["nvme.0"].bytes_written) == (0, wanted)


async def test_a_scrub_tells_each_page_that_it_set_aside() -> None:
    """After a scrub of a rotten page, the status names the page's tier, place and fault."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        metadata = await rig.session()
        await rig.world.put(NAMES)
        lease = await rig.world.acquire(NAMES)
        extent = lease.served.groups[0].extents[0][2].copy()
        rig.world.cache.release(rig.world.session, [lease.lease])
        rig.world.page(extent)[100] ^= 1
        passes = [
            made async for made in admin.Scrub(apb.ScrubRequest(tier="host.0"), metadata=metadata, timeout=SOON_S)
        ]
        assert passes[-1].tiers[0].bad == 1
        status: Any = await admin.ScrubStatus(apb.ScrubStatusRequest(), metadata=metadata)
        (page,) = status.quarantine
        assert (page.tier, page.segment, page.offset) == ("host.0", int(extent["segment"]), int(extent["offset"]))
        assert (page.fault, page.age_s >= 0) == ("digest", True)


async def test_an_epoch_of_many_namespaces_is_kept_at_once() -> None:
    """A bump makes all new epochs durable before it returns, with one write of the namespaces' file."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        metadata, world = await rig.session(), rig.world
        specs = [replace(world.namespace.spec, salt=str(i)) for i in range(6)]
        opened = [world.cache.open_namespace(world.session, spec) for spec in specs]
        await world.daemon.keep_namespaces(*opened)
        with mock.patch.object(
            world.daemon.keeper, "keep_namespaces", wraps=world.daemon.keeper.keep_namespaces
        ) as kept:
            reply: Any = await admin.BumpEpoch(apb.BumpEpochRequest(model="m"), metadata=metadata, timeout=SOON_S)
        next_life = NamespaceRegistry()
        world.daemon.keeper.restore_namespaces(next_life)
        assert (reply.namespaces, kept.call_count) == (7, 1)
        assert [namespace.epoch for namespace in next_life.current(model="m")] == [2] * 7


async def test_sessions_tell_what_they_hold() -> None:
    """A session that holds nothing is listed with zeros."""
    async with rigged() as rig, rig.stubs() as (_, admin):
        metadata = await rig.session(name="idle")
        listed = (await admin.Sessions(apb.SessionsRequest(), metadata=metadata)).sessions
        (mine,) = [row for row in listed if row.name == "idle"]
        assert (mine.leases, mine.reservations, mine.pinned_bytes, mine.state) == (0, 0, 0, "open")


async def test_a_daemon_serves_while_its_memory_is_made() -> None:
    """A put succeeds before the background work on memory; Tiers reports the unready bytes, 0 at the end."""
    with held_up() as go_on:
        async with rigged() as rig, rig.stubs() as (_, admin):
            metadata = await rig.session()
            await rig.world.put(NAMES)

            async def told() -> apb.TierInfo:
                tiers = (await admin.Tiers(apb.TiersRequest(), metadata=metadata)).tiers
                return next(tier for tier in tiers if tier.name == "host.0")

            host = rig.world.cache.tiers[0]
            assert isinstance(host, Arena)
            early = await told()
            assert 0 < early.unready_bytes < early.capacity_bytes and not early.unready_reason
            go_on.set()
            await asyncio.to_thread(host._data._thread.join)
            assert (await told()).unready_bytes == 0
