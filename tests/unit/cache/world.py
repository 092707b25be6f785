"""A `Cache` over a real core, arena and store without sockets, as `assemble` builds it.
Its clients write through the daemon's own mapping."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import numpy as np

from tierd.cache.acquire_reply import AcquireReply
from tierd.cache.cache import Cache
from tierd.cache.commit import CommitQuery
from tierd.cache.operator import Operator
from tierd.config import read_config, resolve
from tierd.core.formats.block import Namespace, NamespaceSpec
from tierd.core.formats.model import PUT_BLOCK, ROOT, BlockStatus, StructArray, TierKind
from tierd.core.plan import Committed, GroupQuery, PutQuery, Reserved
from tierd.server.assembly import Assembly, assemble
from tierd.testing import content_of

BLOCK_BYTES = 8192
TOKENS = 16
SOON_S = 10.0
"""The bound of every wait, never of a measurement."""

CONFIG = """
[server]
runtime_dir = "{root}/run"
state_dir = "{root}/state"
[[host]]
capacity = "4 MiB"
segment = "1 MiB"
arena_dir = "{arena}"
[[nvme]]
path = "{root}/nvme"
capacity = "8 MiB"
segment = "1 MiB"
"""


@dataclass
class World:
    """The daemon's parts and one of its sessions."""

    daemon: Assembly
    namespace: Namespace
    session: int = 11

    @property
    def cache(self) -> Cache:
        return self.daemon.cache

    def query(self, hashes: np.ndarray) -> GroupQuery:
        return GroupQuery(
            namespaces=(self.namespace.id,), hashes=hashes, tokens_per_block=TOKENS, tokens=TOKENS * len(hashes)
        )

    def put_query(self, hashes: np.ndarray) -> PutQuery:
        blocks = np.zeros(len(hashes), dtype=PUT_BLOCK)
        blocks["hash"], blocks["tokens"], blocks["length"] = hashes, TOKENS, BLOCK_BYTES
        return PutQuery(namespace=self.namespace.id, parent=ROOT, position=0, blocks=blocks)

    async def reserve(self, hashes: np.ndarray, *, kind: TierKind = TierKind.HOST) -> Reserved:
        """Reserved pages, filled with their right content."""
        reserved = await self.cache.reserve(self.session, [self.put_query(hashes)], kind=kind)
        for extent, status, name in zip(reserved.extents[0], reserved.statuses[0], hashes, strict=True):
            if status == BlockStatus.RESERVED:
                self.page(extent)[:] = content_of(name, BLOCK_BYTES).tobytes()
        return reserved

    async def commit(self, reservation: int, blocks: StructArray | None = None, **options: object) -> Committed:
        query = CommitQuery(reservation, blocks, **options)  # type: ignore[arg-type]
        return await self.cache.commit(self.session, query, deadline=asyncio.get_running_loop().time() + SOON_S)

    async def put(self, hashes: np.ndarray, **options: object) -> Committed:
        reserved = await self.reserve(hashes)
        return await self.commit(reserved.reservation, **options)

    async def acquire(self, hashes: np.ndarray, *, kind: TierKind = TierKind.HOST) -> AcquireReply:
        return await self.cache.acquire(self.session, [self.query(hashes)], kind=kind, timeout_s=SOON_S)

    async def end_epoch(self) -> int:
        """The number of blocks that become unreachable."""
        bump = Operator(self.cache).bump_epoch
        return (await bump(model="m", namespace_id=0, keep=self.daemon.keep_namespaces))[1]

    def page(self, extent: np.void) -> memoryview:
        """The writable bytes of a block."""
        return self.daemon.tiers[int(extent["tier"])].view(extent)[: int(extent["length"])]  # type: ignore[attr-defined]

    @property
    def pins(self) -> int:
        """Leases and reservations in the core's books, plus rows of the holds file."""
        stats = self.cache.core.stats()
        return stats.leases + stats.reservations + self.daemon.holds.count


@contextlib.contextmanager
def directories() -> Iterator[dict[str, str]]:
    """The directories of a daemon: root and arena."""
    root, arena = tempfile.mkdtemp(prefix="tierd-"), tempfile.mkdtemp(prefix="tierd-test-", dir="/dev/shm")
    try:
        yield {"root": root, "arena": arena}
    finally:
        shutil.rmtree(root)
        shutil.rmtree(arena)


@contextlib.asynccontextmanager
async def opened(
    config: str = CONFIG, *, places: dict[str, str] | None = None, loads: bool = True
) -> AsyncIterator[World]:
    """A world. places: directories of an earlier world to reuse. loads: whether the stores are loaded."""
    with contextlib.ExitStack() as stack:
        found = places or stack.enter_context(directories())
        for name, path in found.items():
            config = config.replace("{" + name + "}", path)
        async with assemble(resolve(read_config(config), environ={})) as daemon:
            if loads:
                await daemon.load()
            spec = NamespaceSpec(model="m", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
            daemon.cache.open_session(World.session, tenant="t")
            namespace = daemon.cache.open_namespace(World.session, spec)
            await daemon.keep_namespaces(namespace)
            yield World(daemon, namespace)
            await daemon.cache.flights.idle(timeout_s=SOON_S)
