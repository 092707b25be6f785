"""Checks whether the daemon's files still exist.

If a store's files were removed, it leaves service. If an arena's were, the daemon ends with a
logged reason, and its supervisor restarts it. A check that hangs at one tier does not block the
others. Failing disks are watched in tierd.cache.watch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from tierd.core.core import Core
from tierd.server.assembly import Assembly
from tierd.server.process.watchdog import end_now
from tierd.tiers.arena.arena import Arena
from tierd.tiers.store.nvme import NvmeStore
from tierd.tiers.tier import Tier

log = structlog.get_logger(__name__)

LOOK_S = 1.0


@contextlib.asynccontextmanager
async def watched(daemon: Assembly) -> AsyncIterator[None]:
    """Checks every LOOK_S while the context lasts."""
    tasks = [
        asyncio.create_task(_watch(tier, daemon.cache.core))
        for tier in daemon.tiers
        if isinstance(tier, Arena | NvmeStore)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LOOK_S)


async def _watch(tier: Tier, core: Core) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if isinstance(tier, NvmeStore):
                await tier.inspect()
            elif isinstance(tier, Arena) and (fault := await asyncio.to_thread(tier.find_removed)):
                end_now(fault)
            elif isinstance(tier, Arena) and tier.has_room:
                core.bar(tier.position, None)
        except Exception:
            log.exception("files not checked", tier=tier.spec.name)
