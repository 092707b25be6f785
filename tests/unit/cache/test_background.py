"""Background work that needs no request, and its recovery from faults."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.unit.cache.world import CONFIG, SOON_S, World, directories, opened
from tierd.cache import background
from tierd.cache.operator import Flushed, Operator
from tierd.testing import chain
from tierd.tiers.store.nvme import NvmeStore

FULL = chain(1, 120)
"""Of the 4 MiB that hold 512 blocks; a low watermark of 10 % keeps 51 of them unwritten."""


def _with_marks(high: float, low: float) -> str:
    return CONFIG.replace("[[host]]", f"[[host]]\nhigh_watermark = {high}\nlow_watermark = {low}")


async def _until_demoted(world: World) -> None:
    async with asyncio.timeout(SOON_S):
        while world.cache.core.tier_stats()[1].pages_ready < 60 or world.cache.flights.count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_was_found_full_is_demoted() -> None:
    """A tier above its watermark at the daemon's start is demoted without any put."""
    with directories() as places:
        async with opened(places=places) as world:
            await world.put(FULL)
        async with opened(_with_marks(0.2, 0.1), places=places) as world:
            world.cache.background.start()
            await _until_demoted(world)
            await world.cache.background.stop()
            assert len(world.cache.core.blocks(tier=1)) >= 60


async def test_what_was_held_is_demoted_when_it_is_let_go() -> None:
    """Leased blocks above the watermark are demoted once they are released, without any put."""
    async with opened(_with_marks(0.2, 0.1)) as world:
        lease = (await world.put(FULL, lease=True)).lease
        world.cache.background.start()
        async with asyncio.timeout(SOON_S):
            while world.cache.background._wake.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await world.cache.background.quiesce(timeout_s=SOON_S) == 0
        world.cache.release(world.session, [lease])
        await _until_demoted(world)
        await world.cache.background.stop()


async def test_what_was_demoted_before_a_flush_is_durable_after_it(tmp_path: Path) -> None:
    """After a flush, unsynced NVMe blocks are durable: a store over a copy of the files has them."""
    with directories() as places:
        async with opened(places=places) as world:
            committed = await world.put(chain(1, 4))
            plan = world.cache.core.persist(committed.blocks, now=0.0)
            world.cache.flights.start(plan)
            assert await world.cache.flights.landed(plan, timeout_s=SOON_S)
            assert await Operator(world.cache).flush(timeout_s=SOON_S) == Flushed(0, 0, left=0)
            await asyncio.to_thread(shutil.copytree, f"{places['root']}/nvme", tmp_path / "copy")
            store = NvmeStore(world.daemon.tiers[1].spec, position=1, path=tmp_path / "copy")
            found = (await store.open()).gathered()
            await store.close(release=True)
    assert sorted(m["hash"].tobytes() for m in found.metas) == sorted(name.tobytes() for name in chain(1, 4))


async def test_demotion_survives_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon logs a demotion step that fails unexpectedly, and demotion goes on."""
    monkeypatch.setattr(background, "PAUSE_S", 0.01)
    async with opened(_with_marks(0.2, 0.1)) as world:
        demote, calls = world.cache.core.demote, []

        def fail_once(*args: object, **options: object) -> object:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("unforeseen")
            return demote(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(world.cache.core, "demote", fail_once)
        with capture_logs() as logs:
            world.cache.background.start()
            await world.put(FULL)
            await _until_demoted(world)
            await world.cache.background.stop()
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["demotion failed"]


async def test_a_failed_store_is_told_once() -> None:
    """After a failed sync a store only serves reads, with one log line. A successful probe restores it."""
    async with opened() as world:
        committed = await world.put(chain(1, 4))
        await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)
        world.cache.tiers[1]._ledger._fail(Path("store"), OSError("the disk is gone"))  # type: ignore[attr-defined]
        with capture_logs() as logs:
            for _ in range(3):
                world.cache.health.look()
                await world.cache.background.sync()
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["tier out of service"]
        assert not world.cache.core.is_writable(1)
        assert not (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).any()
        assert (await world.acquire(chain(1, 4))).served.tokens == 64
        assert not await world.cache.health.resume(1, timeout_s=SOON_S)
        assert world.cache.core.is_writable(1)
        assert (await world.cache.persistence.persist(committed.blocks, timeout_s=SOON_S)).all()


async def test_quiesce_leaves_nothing_to_do() -> None:
    """After a Quiesce no transfer is in flight and no tier has blocks to demote."""
    async with opened(_with_marks(0.2, 0.1)) as world:
        await world.put(FULL)
        assert await world.cache.background.quiesce(timeout_s=SOON_S) > 0
        assert world.cache.flights.count == 0
        assert world.cache.core.demote(world.cache.clock.now()).is_empty
        world.cache.core.check()


@pytest.mark.parametrize(("limit", "writes_ahead"), [("", True), ('wear_budget = "1 GB"', False)])
async def test_zeros_are_no_part_of_a_budget(limit: str, *, writes_ahead: bool) -> None:
    """Under a wear budget a store writes no zeros ahead: its footprint of zeros may be days of budget."""
    async with opened(CONFIG + limit) as world:
        store = world.daemon.tiers[1]
        assert isinstance(store, NvmeStore) and store.zero_ahead is writes_ahead
