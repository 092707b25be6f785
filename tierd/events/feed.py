"""Follows the cache's event log on the daemon's event loop, and has the publisher report it.

The log's entries and clients' names of blocks go, in order, to the publisher's thread. Sockets are
in publisher.py. The loop never waits for a subscriber; a call never waits for the loop. After
events were lost or an epoch has ended, routers are told to clear, and then get the blocks held now.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from tierd.cache.cache import Cache
from tierd.cache.events import Event as LogEvent
from tierd.cache.events import EventKind
from tierd.config import EventsConfig
from tierd.core.arrays.sets import kinds
from tierd.core.plan import Ids
from tierd.events.naming import space_of
from tierd.events.payloads import MEDIUM, Event
from tierd.events.publisher import Publisher
from tierd.events.router_view import Names, RouterView, Space

log = structlog.get_logger(__name__)

NAMES_BYTES = 32 << 20
"""Bytes of names from clients that are not processed yet. Above it the oldest are dropped, and
their blocks get tierd's own hashes."""
AGAIN_S = 1.0
"""Minimum time between two full reports; more frequent ones could lose more events."""


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks of one namespace and rank that were stored in a tier or removed from it."""

    space: Space
    rank: int
    tier: int
    hashes: bytes
    is_stored: bool


class Feed:
    """One per daemon. The service calls `note`, the lifecycle calls `run`."""

    def __init__(self, cache: Cache, publisher: Publisher) -> None:
        self._cache, self._publisher = cache, publisher
        self._turn = threading.Lock()
        self._names: deque[Names] = deque()
        self._names_bytes = 0

    def note(self, names: Names) -> None:
        """Notes a client's names of blocks that it will store or has found stored."""
        with self._turn:
            is_first = not self._names
            self._names.append(names)
            self._names_bytes += _size(names)
            while self._names_bytes > NAMES_BYTES and len(self._names) > 1:
                self._names_bytes -= _size(self._names.popleft())
        if is_first:
            self._publisher.do(self._take_names)

    async def run(self) -> None:
        """Runs until the log is closed."""
        clock, is_open = asyncio.get_running_loop().time, True
        while is_open:
            began = clock()
            try:
                is_open = await self._report()
            except Exception:
                log.exception("KV events: all blocks are reported again")
            if is_open:
                await asyncio.sleep(max(0.0, began + AGAIN_S - clock()))

    async def _report(self) -> bool:
        """Reports all held blocks, then events until some were lost. False: the log is closed."""
        await self._cache.persistence.loaded.wait()
        after = self._cache.events.last
        await self._hand([], is_anew=True)
        # Later events are reported after these blocks, so the view is right at the end.
        for ids in self._cache.core.pieces():
            await self._hand(list(self._held(ids)))
        async with contextlib.aclosing(self._cache.events.follow(after)) as batches:
            async for batch in batches:
                if any(event.kind in (EventKind.LOST, EventKind.ENDED) for event in batch):
                    return True
                await self._hand([step for event in batch if (step := self._step(event))])
        return False

    async def _hand(self, steps: Sequence[Step], *, is_anew: bool = False) -> None:
        def work(view: RouterView) -> list[Event]:
            events = view.clear() if is_anew else []
            for step in steps:
                act = view.stored if step.is_stored else view.removed
                events += act(step.space, step.hashes, tier=step.tier, rank=step.rank)
            return events

        await asyncio.wrap_future(self._publisher.do(work))

    def _take_names(self, view: RouterView) -> list[Event]:
        """Runs in the publisher's thread."""
        with self._turn:
            names, self._names, self._names_bytes = self._names, deque(), 0
        return [event for one in names for event in view.name(one)]

    def _step(self, event: LogEvent) -> Step | None:
        namespace = self._cache.registry.get(event.namespace)
        if not self._cache.registry.is_current(namespace):
            return None
        is_stored = event.kind is EventKind.STORED
        return Step(space_of(namespace), event.namespace - namespace.id, event.tier, event.hashes, is_stored)

    def _held(self, ids: Ids) -> Iterator[Step]:
        """The ids' blocks that are held and served now, by tier and namespace."""
        core, registry = self._cache.core, self._cache.registry
        ids = core.blocks(of=ids)
        names, tiers = core.names(ids), core.tier_bits(ids)
        for number in kinds(names["namespace"]):
            namespace, is_its = registry.get(number), names["namespace"] == number
            for tier in range(len(self._cache.tiers)) if registry.is_current(namespace) else ():
                here = names["hash"][is_its & (tiers >> np.uint64(tier) & np.uint64(1)).astype(bool)]
                if len(here):
                    yield Step(space_of(namespace), number - namespace.id, tier, here.tobytes(), True)


@contextlib.asynccontextmanager
async def publishing(cache: Cache, settings: EventsConfig, *, end_s: float) -> AsyncIterator[Feed | None]:
    """The feed; None if events are off. end_s: time limit for its end. Raises ConfigError."""
    if not settings.enabled:
        yield None
        return
    media = [MEDIUM[tier.spec.kind] for tier in cache.tiers]
    publisher = Publisher(settings, RouterView(media, settings.blocks, has_whole_hashes=settings.hashes == "bytes"))
    log.info("KV events", bind=settings.bind, replay_bind=settings.replay_bind, format=settings.format)
    feed = Feed(cache, publisher)
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        cache.events.close()
        await asyncio.wait([task], timeout=end_s)
        task.cancel()
        await asyncio.to_thread(publisher.close, timeout_s=end_s)


def _size(names: Names) -> int:
    return len(names.hashes) + len(names.names) + len(names.tokens)
