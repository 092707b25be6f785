"""The session tables that a start reads."""

from __future__ import annotations

import shutil

from tests.unit.cache.world import CONFIG, directories, opened
from tierd.server.previous_run import TABLE_NAME
from tierd.testing import chain
from tierd.tiers.arena.arena import Arena

NAMES = chain(1, 4)
TWO_ARENAS = CONFIG + '[[device]]\nkind = "cpu"\ncapacity = "4 MiB"\nsegment = "1 MiB"\narena_dir = "{arena}"\n'


async def test_of_two_session_tables_neither_is_believed() -> None:
    """With a table beside each arena the daemon trusts neither, notes it, and keeps one."""
    with directories() as places:
        async with opened(TWO_ARENAS, places=places) as world:
            await world.put(NAMES)
            tables = [tier.tables / TABLE_NAME for tier in world.daemon.tiers if isinstance(tier, Arena)]
        (found,) = [path for path in tables if path.exists()]
        (other,) = [path for path in tables if path != found]
        shutil.copy(found, other)
        async with opened(TWO_ARENAS, places=places) as world:
            notices = [notice for tier in world.daemon.tiers for notice in tier.notices]
            assert sum("there are two session tables" in notice for notice in notices) == 1
            assert [path.exists() for path in tables].count(True) == 1
            assert (await world.acquire(NAMES)).served.tokens == 16 * len(NAMES)
