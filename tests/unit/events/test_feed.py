"""The feed between the log and the publisher, and how often it publishes everything again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.unit.cache.world import opened
from tierd.cache.events import EventKind
from tierd.config import EventsConfig
from tierd.events import feed as module
from tierd.events.feed import Feed
from tierd.events.payloads import Event
from tierd.events.publisher import Publisher
from tierd.events.router_view import RouterView

ENDINGS = 30
ENDLESS_S = 3600.0


class Counted(RouterView):
    """A router view that counts its `clear` calls."""

    clears = 0

    def clear(self) -> list[Event]:
        self.clears += 1
        return super().clear()


async def told_anew(tmp_path: Path) -> int:
    """The number of `clear` calls while epochs end in sequence and the publisher's thread runs after each."""
    settings = EventsConfig(enabled=True, bind=f"ipc://{tmp_path}/e", replay_bind="")
    async with opened() as world:
        told = Counted(("CPU", "STORAGE"), 10)
        publisher = Publisher(settings, told)
        feed = asyncio.create_task(Feed(world.cache, publisher).run())
        for _ in range(ENDINGS):
            await asyncio.wrap_future(publisher.do(lambda _told: []))
            world.cache.events.add(
                EventKind.ENDED, tier=0, namespace=world.namespace.id, hashes=b"", reason="epoch bumped"
            )
        clears = told.clears
        feed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feed
        await asyncio.to_thread(publisher.close, timeout_s=10.0)
    return clears


@pytest.mark.parametrize("is_patient", [True, False])
async def test_a_pause_lies_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_patient: bool) -> None:
    """After log gaps the feed publishes everything once per AGAIN_S; without that pause it would repeat."""
    monkeypatch.setattr(module, "AGAIN_S", ENDLESS_S if is_patient else 0.0)
    clears = await told_anew(tmp_path)
    assert clears == 1 if is_patient else clears > 2
