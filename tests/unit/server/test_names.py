"""The clients' names of blocks, as a put delivers them to a daemon with events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.cache.world import World, opened
from tests.unit.server.test_assembly import service_of
from tierd._proto import cache_pb2 as pb
from tierd.errors import InvalidArgument
from tierd.events.router_view import Names
from tierd.testing import chain


def _reserve(world: World, *hashes: np.ndarray, **said: Any) -> pb.ReserveRequest:
    """A group for each array of hashes; said: fields of the last group."""
    groups = [
        pb.PutGroup(namespace=world.namespace.id, blocks=world.put_query(each).blocks.tobytes()) for each in hashes
    ]
    groups[-1].MergeFrom(pb.PutGroup(**said))
    return pb.ReserveRequest(groups=groups, tier=pb.TIER_KIND_HOST)


async def test_names_come_with_a_put_whole_or_not_at_all() -> None:
    """Each group's names are noted in order; if one group is invalid, no group of its put is noted."""
    async with opened() as world:
        service, told, (a, b, c) = service_of(world), list[Names](), (chain(seed, 2) for seed in (1, 2, 3))
        service.note_names = told.append
        said = {"engine_hashes": b"one!two!", "engine_per_block": 1}
        await service.Reserve(_reserve(world, a, b, **said), None)
        assert [(names.hashes, names.names) for names in told] == [(a.tobytes(), b""), (b.tobytes(), b"one!two!")]
        with pytest.raises(InvalidArgument, match="engine_hashes"):
            await service.Reserve(_reserve(world, c, a, engine_hashes=b"odd"), None)
        assert len(told) == 2
