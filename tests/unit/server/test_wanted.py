"""The tier that a request means: any of a kind, or one of several GPUs by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cache.world import opened
from tierd.core.formats.model import TierKind, TierSpec
from tierd.errors import InvalidArgument
from tierd.server.grpc.service import CacheService
from tierd.tiers.device.cuda import CudaTier

MIB = 1 << 20


async def _nothing(_namespace: object) -> None:
    pass


def gpu_tier(number: int, directory: Path) -> CudaTier:
    """A tier that is not opened, so no driver is needed."""
    spec = TierSpec(TierKind.DEVICE, number, 4 * MIB, 2 * MIB)
    return CudaTier(spec, position=number, instance="t", arena_dir=str(directory))


async def test_of_several_gpus_one_is_named(tmp_path: Path) -> None:
    """With several GPUs a request for any is refused with their names; a valid number selects one."""
    async with opened() as world:
        gpus = [gpu_tier(number, tmp_path) for number in range(2)]
        world.cache.tiers = [*gpus, *world.cache.tiers]
        service = CacheService(world.cache, keep_namespaces=_nothing, batch_limit=1)
        for nth, said in ((0, "any of several GPUs; name one of device.0, device.1"), (3, "device.2 does not exist")):
            with pytest.raises(InvalidArgument, match=said):
                service._wanted(TierKind.DEVICE, nth)
        assert [service._wanted(TierKind.DEVICE, nth) for nth in (1, 2)] == [gpu.spec for gpu in gpus]
        assert service._wanted(TierKind.HOST, 0) is TierKind.HOST
