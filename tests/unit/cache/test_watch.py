"""A stored tier out of service: its callers get errors, and it takes no blocks until it is back."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.cache.world import CONFIG, SOON_S, opened
from tierd.cache import watch
from tierd.cache.breaker import Tolerance
from tierd.core.formats.model import TierKind
from tierd.errors import TierFailed
from tierd.mover import Link
from tierd.tiers.store.nvme import NvmeStore


async def test_a_store_that_hangs_is_left_alone() -> None:
    """While a read hangs, the core plans no reads or writes on the store, and waiters fail at once."""
    async with opened() as world:
        cache = world.cache
        store = next(tier for tier in cache.tiers if isinstance(tier, NvmeStore))
        link = cache.parts.mover._links[store.position, 0] = Link(1)
        cache.health.tolerate({store.position: Tolerance(hang_s=0.001, pause_s=0.01, pause_limit_s=0.01)})
        async with link.slot(0):
            with store._calls.one("read"):
                waits = asyncio.create_task(_take(link))
                await asyncio.sleep(0.01)
                cache.health.look()
                assert not cache.core.is_writable(store.position)
                assert cache.core._index.serving(TierKind.NVME) == []
                async with asyncio.timeout(SOON_S):
                    with pytest.raises(TierFailed, match="out of service"):
                        await waits
        assert await cache.health.resume(store.position, timeout_s=SOON_S) == ""
        assert cache.core.is_writable(store.position)
        assert cache.core._index.serving(TierKind.NVME) == [store.position]


async def test_a_store_whose_writes_hang_is_read_on() -> None:
    """While a write hangs, the store takes no new pages and serves its blocks. Then it recovers."""
    async with opened() as world:
        cache = world.cache
        store = next(tier for tier in cache.tiers if isinstance(tier, NvmeStore))
        cache.health.tolerate({store.position: Tolerance(hang_s=0.001, pause_s=0.01, pause_limit_s=0.01)})
        with store._calls.one("write"):
            await asyncio.sleep(0.01)
            cache.health.look()
            assert not cache.core.is_writable(store.position)
            assert cache.core._index.serving(TierKind.NVME) == [store.position]
        assert await cache.health.resume(store.position, timeout_s=SOON_S) == ""
        assert cache.core.is_writable(store.position)


async def test_nobody_looks_at_tiers_that_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch skips idle stores, and still takes a store out of service when its next call hangs."""
    monkeypatch.setattr(watch, "LOOK_S", 0)
    async with opened(CONFIG + "zero_ahead = false\n") as world:
        cache, looks, look = world.cache, list[None](), world.cache.health.look
        monkeypatch.setattr(cache.health, "look", lambda: (looks.append(None), look()))
        store = next(tier for tier in cache.tiers if isinstance(tier, NvmeStore))
        cache.health.tolerate({store.position: Tolerance(hang_s=0.001)})
        cache.health.start()
        await _turns()
        seen = len(looks)
        await _turns()
        assert len(looks) == seen
        with store._calls.one("read"):
            async with asyncio.timeout(SOON_S):
                while cache.core.is_writable(store.position):
                    await _turns()
        await cache.health.stop()


async def test_a_look_that_failed_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that raises is followed by the next one, even without new calls."""
    monkeypatch.setattr(watch, "LOOK_S", 0)
    async with opened(CONFIG + "zero_ahead = false\n") as world:
        health, look, faults = world.cache.health, world.cache.health.look, [RuntimeError("no reason")]

        def failing() -> None:
            if faults:
                raise faults.pop()
            look()
            seen.append(None)

        seen = list[None]()
        monkeypatch.setattr(health, "look", failing)
        health.start()
        await _turns()
        assert seen
        await health.stop()


async def test_wrong_bytes_wake_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrupt blocks take a tier out of service without a call under way, as for GPU memory."""
    monkeypatch.setattr(watch, "LOOK_S", 0)
    async with opened(CONFIG + "zero_ahead = false\n") as world:
        cache = world.cache
        store = next(tier for tier in cache.tiers if isinstance(tier, NvmeStore))
        cache.health.tolerate({store.position: Tolerance(faults=3)})
        cache.health.start()
        await _turns()
        cache.flights._count_corrupt(store.position, 3)
        await _turns()
        assert not cache.core.is_writable(store.position)
        await cache.health.stop()


async def _turns() -> None:
    """More turns of the loop than a watch takes to become idle."""
    for _ in range(100):
        await asyncio.sleep(0)


async def _take(link: Link) -> None:
    async with link.slot(0):
        pass
