"""Gets into a client's own memory: the SDK's `one_sided_get` over simulated memory.

    directory and catalogue ──▶ other callbacks run ──▶ summed and copied ──▶ use reported
                       └─ on a miss ──▶ acquired ──▶ summed and copied under a lease

Purpose: `Copies`, which stands in for the SDK's session. Non-purpose: the rules for a copy
(oracle.py). Invariant: whatever memory, catalogues or the directory contain, an answer is the
committed bytes. The exception: bytes spoilt after the daemon verified them for this very get.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tests.sim.blocks import Blocks, Page
from tests.sim.oracle import Key
from tierd.cache.acquire_reply import AcquireReply
from tierd.client.blocks import one_sided_get
from tierd.client.session import mapping
from tierd.client.session.notices import NOTICE_S
from tierd.client.session.session import Session
from tierd.client.values import Group, OpenedNamespace
from tierd.core.formats.block import NamespaceSpec
from tierd.core.formats.directory import SEGMENT_BITS, Directory
from tierd.core.formats.model import StructArray, TierKind
from tierd.core.formats.words import words_of
from tierd.core.plan import GroupQuery
from tierd.errors import NotFound, NotPermitted, TierdError, TierFailed, Unavailable
from tierd.server.grpc import messages
from tierd.tiers.tier import Descriptor

if TYPE_CHECKING:
    from tests.sim.client import Client, Held

SPOILT_ENTRIES = 0.3
"""Share of a directory's entries that one fault changes."""


class Copies:
    """Copies of one session. Its public names stand in for the SDK's session, segments and
    mailbox."""

    def __init__(self, client: Client, held: Held, directory: Descriptor) -> None:
        """Maps the directory and closes its descriptor."""
        self._client, self._held = client, held
        memory = mmap.mmap(directory.fd, directory.bytes, prot=mmap.PROT_READ)
        os.close(directory.fd)
        self.directory = Directory(words_of(memory, count=directory.bytes // 8))
        self.tiers = [tier.spec.name for tier in held.daemon.assembly.tiers]
        self.notices = self.segments = self
        self._mapped: dict[tuple[int, int], tuple[object, mapping.MappedSegment]] = {}

    # -- the SDK's session

    def at(self, place: tuple[int, int]) -> mapping.MappedSegment | None:
        """A segment that this client has mapped, or None."""
        files = self._client.maps.get(place)
        if files is None or files.data is None:
            return None
        known = self._mapped.get(place)
        if known is None or known[0] is not files:
            catalogue = mapping.catalogue_of(place[1], np.frombuffer(files.table, np.uint8))
            data = np.frombuffer(files.data, np.uint8)
            known = self._mapped[place] = (
                files,
                mapping.MappedSegment(place[1], place[0], data, *catalogue, is_writable=False),
            )
        return known[1]

    def table(self) -> mapping.SegmentTable:
        """All mapped segments."""
        return mapping.SegmentTable(filter(None, map(self.at, self._client.maps)))

    def mapped(self, place: tuple[int, int], *, timeout_s: float) -> mapping.MappedSegment:
        """Always raises: `_map` has mapped all segments, since no simulated call can be awaited
        here."""
        raise Unavailable(f"segment {place}: not mapped")

    # -- the SDK's mailbox

    @property
    def takes_gets(self) -> bool:
        """Whether the daemon has answered within NOTICE_S."""
        held, world = self._held, self._client.world
        return held.daemon is world.daemon and held.daemon.is_serving and world.loop.time() - held.answered_s < NOTICE_S

    def report_hit(self, _group: bytes) -> bool:
        """Reports a use to the daemon if it lives. The notice may get lost."""
        held, client = self._held, self._client
        if not self.takes_gets:
            return False
        if client.unheard:
            client.unheard -= 1
            client.world.happenings.struck["words_are_lost"] += 1
        else:
            held.daemon.post(self._hear, [self._wanted.query()])
        return True

    def _hear(self, query: list[GroupQuery]) -> None:
        """Runs in the daemon."""
        with suppress(TierdError):
            self._held.daemon.assembly.cache.note_used(self._held.session, query, times=1)

    # -- a get

    async def get(self, wanted: Blocks, spec: NamespaceSpec, rng: random.Random) -> None:
        """Runs one get of blocks to its end."""
        client, self._wanted = self._client, wanted
        client.world.oracle.asks([wanted.key(number) for number in wanted.numbers])
        first, stop = wanted.first, wanted.stop
        namespace = OpenedNamespace(spec, wanted.namespace)
        group = Group(namespace, wanted.hashes[first:stop], sum(map(wanted.tokens, wanted.numbers)))
        began_s = client.loop.time()
        await self._map(wanted)
        found = one_sided_get.find(cast("Session", self), group, timeout_s=1.0) if self.takes_gets else None
        if found is not None:
            keys = [wanted.key(number) for number in wanted.numbers]
            client.seen = [*client.seen[-16:], *self._pages(found[0], keys)]
            await client.hold(rng)
            out = [bytearray(length) for length in found[0].lengths]
            if one_sided_get.served(cast("Session", self), group, out, *found) is not None:
                client.counts["copies that asked nobody"] += 1
                for key, block, generation in zip(keys, out, found[0].rows["generation"].tolist(), strict=True):
                    client.world.oracle.read_copy(key, bytes(block), generation=generation, began_s=began_s)
                return
        if not first:
            await self._ask(wanted, rng, began_s)

    async def _map(self, wanted: Blocks) -> None:
        """Maps the segments that the directory names, if they exist."""
        client = self._client
        hints = (self.directory.place(wanted.namespace, name.tobytes()) for name in wanted.hashes[wanted.first :])
        for place, _ in filter(None, hints):
            where = place >> SEGMENT_BITS, place & (1 << SEGMENT_BITS) - 1
            if where not in client.maps and where[0] < len(self.tiers):
                try:
                    work = lambda _assembly, where=where: self._held.daemon.map(*where, session=self._held.session)  # noqa: E731
                    client.maps[where] = await client.ask(self._held, work, timeout_s=1.0)
                except (NotFound, NotPermitted, TierFailed):
                    client.counts["hints to no segment"] += 1

    async def _ask(self, wanted: Blocks, rng: random.Random, began_s: float) -> None:
        """Gets under a lease, and once more if pages are bad, as the SDK's `Verbs._copied`."""
        doubted = np.zeros(0, np.uint64)
        for _ in range(2):
            looked_s, client = self._client.loop.time(), self._client
            timeout_s = rng.choice((0.2, 1.0, 4.0))
            lease = await client.acquire(self._held, wanted, kind=TierKind.HOST, timeout_s=timeout_s, doubted=doubted)
            if not lease.lease:
                return
            bad = await self._copied(lease, wanted, rng, (began_s, looked_s), doubted)
            if not len(bad) or len(doubted):
                return
            client.counts["copies that doubted a page"] += 1
            doubted = bad

    async def _copied(
        self, lease: AcquireReply, wanted: Blocks, rng: random.Random, times: tuple[float, float], doubted: StructArray
    ) -> StructArray:
        """Copies the leased pages and releases them. Returns the generations of the bad pages."""
        client, held, extents = self._client, self._held, lease.served.groups[0].extents[0]
        generations = extents["generation"].tolist()
        client.holds.update(generations)
        try:
            keys = [wanted.key(i) for i in range(len(extents))]
            client.seen = [*client.seen[-16:], *await client.pages(held, extents, keys)]
            await client.hold(rng)
            given = messages.handles(extents, status=1, tokens=np.zeros(len(extents), np.uint32), epoch=0)
            pages = one_sided_get.pages_of(cast("Session", self), given)
            assert pages is not None, "host memory that is mapped"
            out: list[Any] = [bytearray(length) for length in pages.lengths]
            good = np.array(pages.copy_to(out, is_leased=True), np.bool_)
            trusted = np.isin(extents["generation"], doubted)
            for row in range(int((good | trusted).argmin()) if not (good | trusted).all() else len(good)):
                client.world.oracle.read_copy(
                    keys[row],
                    bytes(out[row]),
                    generation=generations[row],
                    began_s=times[0],
                    looked_s=times[1] if trusted[row] else None,
                )
            return np.asarray(extents["generation"][~good], np.uint64)
        finally:
            client.holds.subtract(generations)
            client.let_go(held, lambda a: a.cache.release(held.session, [lease.lease]))

    def _pages(self, found: one_sided_get.Pages, keys: Sequence[Key]) -> list[Page]:
        """The pages of a find, for faults that change their bytes."""
        pages = []
        for key, row in zip(keys, found.rows, strict=True):
            segment, slot = found.table.segments[row["segment"]], int(row["slot"])
            files, offset = self._client.maps[segment.tier, segment.id], slot * segment.class_bytes
            pages.append(Page(key, files, slot, offset, int(row["length"]), int(row["generation"])))
        return pages
