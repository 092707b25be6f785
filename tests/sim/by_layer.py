"""Gets by layer: the SDK's `Lease` and `Arrival` over simulated memory.

    acquired early ──▶ layer 0 there, checked ──▶ layer 1 there, checked ──▶ ... ──▶ all checked

Purpose: `get`. Non-purpose: the rules for bytes (oracle.py). Invariants: a layer that was told as
there has the committed bytes at that time. `Lease.check` counts only blocks whose bytes are right.
If nothing was made to fail, all layers come.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from tests.sim.blocks import Blocks, Page
from tests.sim.oracle import bytes_of
from tierd.cache.acquire_reply import AcquireReply
from tierd.client.blocks.lease import Lease
from tierd.client.connect.link import Link
from tierd.client.session.pins import Hold
from tierd.client.transport import replies
from tierd.client.values import Group, OpenedNamespace
from tierd.core.formats.block import slice_cut
from tierd.core.formats.model import BlockStatus
from tierd.errors import NotFound, StaleHandle
from tierd.server.grpc import messages

if TYPE_CHECKING:
    from tests.sim.client import Client, Held
    from tests.sim.copies import Copies

LOOK_S = 0.001
"""Mean pause between two looks of a client."""
PATIENCE_S = 20.0
"""Longest time that a client waits for a layer."""


@dataclass(frozen=True)
class _Link:
    """Stands in for the SDK's link to one life of the daemon."""

    client: Client
    held: Held
    pid: int

    @property
    def session(self) -> Copies:
        """Has the mapped segments."""
        return self.held.copies

    @property
    def is_usable(self) -> bool:
        """Whether this life of the daemon serves."""
        return self.held.daemon is self.client.world.daemon and self.held.daemon.is_serving


async def get(client: Client, held: Held, wanted: Blocks, rng: random.Random) -> None:
    """Acquires blocks by layer, reads layers as they come, checks, and releases. Mostly blocks put
    last, often after memory was emptied."""
    world = client.world
    last = [put for put in world.puts if put.namespace == wanted.namespace]
    wanted = replace(rng.choice(last), first=0) if last and rng.random() < 0.7 else wanted
    if rng.random() < 0.3:
        await world.happenings.operate("empty", random.Random(0))
    began_s = client.loop.time()
    world.oracle.asks([wanted.key(i) for i in wanted.numbers])
    kind, timeout_s = client.kind(rng), rng.choice((0.2, 1.0, 4.0))
    reply = await client.acquire(held, wanted, kind=kind, timeout_s=timeout_s, verb="acquire_by_layer")
    if not reply.lease:
        return
    lease = _leased(client, held, reply, wanted)
    generations = lease.handles["generation"].tolist()
    client.holds.update(generations)
    is_pending = lease.handles["status"] == BlockStatus.PENDING
    places = {tuple(place) for place in lease.handles[["tier", "segment"]][is_pending].tolist()}
    client.pending.update(places)
    try:
        extents = reply.served.groups[0].extents[0]
        pages = await client.pages(held, extents, [wanted.key(i) for i in range(len(extents))])
        await _Reading(client, lease, pages, began_s).read(rng)
    except StaleHandle:
        client.counts["leases by layer that ended with the daemon"] += 1
    except NotFound:  # the reads had failed before the pages were mapped
        client.counts["leases by layer whose pages had gone"] += 1
    finally:
        client.pending.subtract(places)
        client.pending += Counter()
        client.holds.subtract(generations)
        assert lease.hold is not None
        lease.hold.settle()
        client.let_go(held, lambda a: a.cache.release(held.session, [reply.lease]))


def _leased(client: Client, held: Held, reply: AcquireReply, wanted: Blocks) -> Lease:
    """The SDK's lease, from the daemon's message."""
    message = messages.acquire_reply(
        reply.served, lease=reply.lease, tier_tokens=list(reply.tier_tokens), whole=reply.whole, epochs=[0]
    )
    space = OpenedNamespace(client.specs[wanted.namespace], wanted.namespace)
    leased = replies.leased(message, [Group(space, wanted.hashes)])
    return Lease(Hold(cast("Link", _Link(client, held, os.getpid())), lease=leased.lease), leased)


class _Reading:
    """One lease, and its pages in order."""

    def __init__(self, client: Client, lease: Lease, pages: Sequence[Page], began_s: float) -> None:
        self._client, self._lease, self._pages, self._began_s = client, lease, pages, began_s
        self._layers = client.world.machine.layers
        self._is_pending = (lease.handles["status"] == BlockStatus.PENDING).tolist()

    async def read(self, rng: random.Random) -> None:
        """Waits for layers and reads them, up to a random one or all. Raises StaleHandle."""
        client = self._client
        client.seen = [*client.seen[-16:], *self._pages]
        client.counts["blocks that came by layer"] += sum(self._is_pending)
        steps: list[int | None] = [*range(max(1, self._layers)), None]
        for layer in steps[: rng.choice((1, len(steps), len(steps)))]:
            if not await self._await(layer, rng):
                client.counts["layers that did not come"] += 1
                break
            client.counts["layers that came"] += 1
            await client.awake()
        self._check()
        await client.hold(rng)
        self._check()

    async def _await(self, layer: int | None, rng: random.Random) -> bool:
        """As `Lease.await_layer`, and reads the layers in the same turn."""
        pending, deadline, world = self._lease._pending, self._client.loop.time() + PATIENCE_S, self._client.world
        while pending is not None and not (found := pending.look(layer)):
            assert self._lease.hold is not None
            is_late = self._client.loop.time() > deadline
            if found is None or is_late or not self._lease.hold.link.is_usable:
                if world.script.is_calm and self._lease.hold.link.is_usable:
                    world.fail(f"layer {layer} is {'late' if is_late else 'lost'}, and nothing was made to fail")
                return False
            await asyncio.sleep(rng.expovariate(1 / LOOK_S))
        self._lease._held()
        for page, is_pending in zip(self._pages, self._is_pending, strict=True):
            self._compare(page, self._end(page, layer) if is_pending else page.length)
        return True

    def _end(self, page: Page, layer: int | None) -> int:
        """The end of a layer in a page, in bytes."""
        cut = slice_cut(page.length, self._layers)
        is_cut = layer is not None and cut.layers == self._layers
        return page.length * ((layer or 0) + 1) // cut.layers if is_cut else page.length

    def _check(self) -> None:
        """Blocks that the SDK counts as good are right. Raises StaleHandle."""
        good = self._lease.check()
        self._client.counts["blocks checked by layer"] += good
        for page in self._pages[:good]:
            self._compare(page, page.length)

    def _compare(self, page: Page, end: int) -> None:
        """Checks the first bytes of a block."""
        rest = bytes_of(page.key, page.length)[end:]
        found = page.bytes()[:end] + rest
        self._client.world.oracle.read(page.key, found, generation=page.generation, began_s=self._began_s)
