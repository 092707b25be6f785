"""The device tier of kind "cuda": GPU memory that workers map and compute on in place.

`CudaTier` keeps its segments as every mapped tier does, with catalogues beside the arenas'. The
memory is slabs of a GPU process. `tierd.gpu` calls CUDA; `cache/watch.py` decides when a failed GPU
is retried.

No CUDA call is made here. The descriptors kept here outlive a GPU process, so a new one takes over
the slabs with their contents. Device memory does not outlive the daemon, so no block of the
previous run is used. A call that fails because its GPU process died raises TierFailed once that
process is gone. Its copies have then stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from tierd.core.formats.meta import META
from tierd.core.formats.model import EXTENT, StructArray, TierSpec
from tierd.errors import ConfigError, InvalidArgument, Overloaded, TierdError, TierFailed
from tierd.failpoint import failpoint
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import PIECE, GpuFacts
from tierd.tiers.arena import arena_files
from tierd.tiers.arena.arena_recovery import SUFFIX, drop_everything
from tierd.tiers.arena.segments import SegmentBooks
from tierd.tiers.device.direct import DirectWays, reads_of
from tierd.tiers.device.slabs import Slab, Slabs
from tierd.tiers.tier import Came, Descriptor, Health, MappedTier, Recovered, SliceTable, StoredTier

if TYPE_CHECKING:
    from tierd.core.plan import Plan

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """ordinal: number of the GPU, in the driver's order.
    patience_s: limit of one call; after it the call and the GPU process end.
    direct_reads: whether and by which library it reads from stores directly, if possible."""

    ordinal: int = 0
    patience_s: float = 10.0
    direct_reads: str = "auto"


class CudaTier(SegmentBooks[Slab]):
    """One GPU's tier. arena_dir: base directory of the catalogues. facts: from its GPU process."""

    _data: Slabs

    def __init__(
        self, spec: TierSpec, *, position: int, instance: str, arena_dir: str = "", options: GpuOptions | None = None
    ) -> None:
        super().__init__(spec, position=position, instance=instance, arena_dir=arena_dir)
        self.facts = GpuFacts()
        self._options = options or GpuOptions()
        self._gpu: GpuProcess | None = None
        self._direct = DirectWays(spec.name, by=self._options.direct_reads, on_change=self._update_place)
        self._is_begun = False
        """Whether the notices of the start have been logged."""
        self._fault = ""
        self._stir: Callable[[], None] = lambda: None
        self._hosts: dict[int, asyncio.Task[None]] = {}
        """Host segments that the GPU process maps or is about to map."""
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def ordinal(self) -> int:
        """Number of the GPU."""
        return self._options.ordinal

    @property
    def uuid(self) -> str:
        """UUID of the GPU."""
        return self.facts.uuid

    # -- open and close

    def choose(self) -> arena_files.ArenaPlace:
        """The directory of its tables: small files, so never on huge pages. Raises ConfigError."""
        place = arena_files.choose_place(
            self.spec, instance=self._instance, arena_dir=self._arena_dir or str(arena_files.SHM)
        )
        return replace(place, data=place.tables)

    async def open(self) -> Recovered:
        """Take the directory, start the GPU process, make the slabs.

        Raises AlreadyOwned, ConfigError, Unsupported, VersionMismatch, TierFailed.
        """
        try:
            await asyncio.to_thread(self._own, self.choose())
            recovered = await asyncio.to_thread(self._drop_former)
            await self._begin_gpu()
        except BaseException as error:
            await self._end_gpu()
            self._disown()
            if isinstance(error, OSError | Overloaded):
                raise TierFailed(f"{self.spec.name}: cannot be opened: {error}") from error
            raise
        return recovered

    def _drop_former(self) -> Recovered:
        """Drop the previous run's segments, whose memory is gone; keep the highest numbers used."""
        former = len(list(self.tables.glob(f"*{SUFFIX}")))
        drop_everything(self.tables, self.tables)
        if former:
            log.info("device memory does not outlive the daemon", tier=self.spec.name, segments_dropped=former)
        return Recovered(
            segments=[],
            extents=np.zeros(0, dtype=EXTENT),
            metas=np.zeros(0, dtype=META),
            next_segment=self._marks.next_segment,
            next_generation=self._marks.next_generation,
            namespaces=self._restore_names(),
        )

    async def _begin_gpu(self) -> None:
        spec = self.spec
        self._data = Slabs(
            name=spec.name, segment_bytes=spec.segment_bytes, places=spec.capacity_bytes // spec.segment_bytes
        )
        failpoint("cuda.open.before_gpu")
        await self._start()
        facts = self.facts
        self._check(facts)
        self.mode = facts.exports
        await self._data.fill()
        self.notices += [f"{spec.name}: {notice}" for notice in facts.notices]
        if self._data.shortage:
            self.notices.append(f"{spec.name}: {self._data.shortage}; they are made when space is free")

    def _check(self, facts: GpuFacts) -> None:
        spec = self.spec
        if facts.granularity and spec.segment_bytes % facts.granularity:
            raise ConfigError(
                f"{spec.name}.segment: {spec.segment_bytes} bytes is not a multiple of the GPU's granularity of {facts.granularity}; round it"
            )
        if spec.capacity_bytes > facts.total_bytes:
            raise ConfigError(
                f"{spec.name}.capacity: {spec.capacity_bytes} bytes is above the {facts.total_bytes} that {facts.name} has; lower it"
            )

    async def close(self, *, release: bool) -> None:
        """End the GPU process and slabs; client mappings stay. With release, remove the tables."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        await self._end_gpu()
        await asyncio.to_thread(self._end, lock, release=release, places=(self.tables,))

    # -- the GPU process

    async def _start(self) -> None:
        """Start a GPU process over the existing slabs. Raises Unsupported, Overloaded, TierFailed."""
        options = self._options
        gpu = GpuProcess(
            options.ordinal, patience_s=options.patience_s, on_death=lambda reason: self._died(gpu, reason)
        )
        self.facts = await self._data.hand_over(gpu)
        self._gpu = gpu
        self._fault = ""
        await self._direct.begin(gpu)

    def _died(self, gpu: GpuProcess, reason: str) -> None:
        if gpu is self._gpu:
            self._gpu = self._data.gpu = None
            self._direct.end(gpu)
            self._hosts.clear()
            self._fault = f"{reason}; a new one starts"

    async def _end_gpu(self) -> None:
        gpu, self._gpu = self._gpu, None
        for errand in list(self._errands):
            errand.cancel()
        if gpu is not None:
            self._data.gpu = None
            await self._data.close()
            await gpu.stop()

    def health(self) -> Health:
        """A fault while no GPU process runs. A hanging call ends the process, so no age is given."""
        return Health(fault=self._fault)

    def heed(self, stir: Callable[[], None]) -> None:
        """As `WatchedTier.heed`. stir also runs at each start and end of a GPU process."""
        self._stir = stir

    async def probe(self) -> None:
        """Start a GPU process if none runs; it takes over the slabs. Raises TierFailed."""
        if self._gpu is not None:
            return
        failpoint("cuda.probe.before_gpu")
        try:
            await self._start()
        except (TierdError, OSError) as error:
            raise TierFailed(f"{self.spec.name}: no GPU process can be started: {error}") from error
        await self._data.fill()

    # -- decisions

    def apply(self, plan: Plan) -> None:
        """As for all mapped memory; also detaches ending host segments, which no copy uses."""
        super().apply(plan)
        for assignment in plan.segments:
            ended = assignment.replaces
            if ended in self._hosts:
                task = asyncio.get_running_loop().create_task(self._detach(ended, self._hosts.pop(ended)))
                self._errands.add(task)
                task.add_done_callback(self._errands.discard)

    async def _detach(self, segment: int, attached: asyncio.Task[None]) -> None:
        try:
            await attached
            await self._living().detach(segment)
        except TierdError:
            pass  # the process that mapped it is gone, or it was never mapped

    # -- pages

    def descriptor(self, segment: int, *, writable: bool) -> Descriptor:
        """A new descriptor of the slab. The driver has no read-only ones, so only the client can
        refrain from mapping it writable. Raises KeyError, TierFailed before `prepare`."""
        slab = self._ready(segment)
        return Descriptor(os.dup(slab.fd), self.spec.segment_bytes)

    async def load(
        self, extents: StructArray, metas: StructArray, *, source: MappedTier, sources: StructArray
    ) -> list[SliceTable]:
        """Fill pages from a mapped tier; sums are of the bytes on the device. Raises TierFailed."""
        with self._failing():
            await self._attach(source, sources)
            slices = await self._living().load(self._pieces(extents, metas, hosts=sources))
        failpoint("cuda.load.before_return")
        return slices

    async def store(
        self, extents: StructArray, metas: StructArray, *, target: MappedTier, targets: StructArray
    ) -> None:
        """Fill pages of a mapped tier; returns when the last byte is there. Raises TierFailed."""
        with self._failing():
            await self._attach(target, targets)
            await self._living().store(self._pieces(extents, metas, hosts=targets))
        failpoint("cuda.store.before_return")

    async def sums(self, extents: StructArray, metas: StructArray) -> list[SliceTable]:
        """The slice tables of pages, of their bytes after the call began. Raises TierFailed."""
        with self._failing():
            return await self._living().sums(self._pieces(extents, metas))

    # -- direct reads

    @property
    def direct_from(self) -> frozenset[int]:
        """Positions of the stores that can be read directly now."""
        return self._direct.stores

    async def find_direct(self, stores: Sequence[StoredTier]) -> None:
        """Test direct reads with the GPU process, and with each later one."""
        self._direct.know(stores)
        if self._gpu is not None:
            await self._direct.begin(self._gpu)
        self._is_begun = True

    async def read(self, extents: StructArray, metas: StructArray, *, source: StoredTier, sources: StructArray) -> Came:
        """Fill pages from slots of a store, bypassing host memory. The sums are of the bytes on the
        device. Raises TierFailed."""
        where = source.payloads(sources)
        files = [file for file in where.files if file is not None]
        rows = np.array([row for row, file in enumerate(where.files) if file is not None], np.intp)
        with self._failing():
            pieces = self._pieces(extents[rows], metas[rows])
        reads = reads_of(pieces, [where.offsets[row] for row in rows.tolist()])
        came = await self._direct.read(reads, files, store=source)
        failpoint("cuda.direct.before_return")
        return _spread(came, rows.tolist(), len(extents))

    def distrust(self, store: int, reason: str) -> None:
        """Stop direct reads from the store until another GPU process begins."""
        self._direct.give_up(store, reason)

    def _update_place(self) -> None:
        """Put the paths of blocks into `place` and the notices; log notices that come later."""
        self._stir()
        facts, now = self.facts, list(self._direct.notices.values())
        self.place = ", ".join(
            filter(None, (f"{facts.name} {facts.uuid}".strip() or "GPU", facts.copying, self._direct.words))
        )
        for notice in now if self._is_begun else ():
            if notice not in self.notices:
                log.warning(notice, tier=self.spec.name)
        self.notices = [notice for notice in self.notices if not self._direct.is_own(notice)] + now

    # -- inner

    def _living(self) -> GpuProcess:
        if self._gpu is None:
            raise TierFailed(f"{self.spec.name}: {self._fault or 'closed'}")
        return self._gpu

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn errors of the GPU process into TierFailed."""
        try:
            yield
        except (Overloaded, InvalidArgument, KeyError) as error:
            raise TierFailed(f"{self.spec.name}: {error}") from error

    def _pieces(self, extents: StructArray, metas: StructArray, hosts: StructArray | None = None) -> StructArray:
        """PIECE [n]. Raises KeyError, TierFailed."""
        pieces = np.zeros(len(extents), dtype=PIECE)
        pieces["slab"] = [self._ready(segment).number for segment in extents["segment"].tolist()]
        pieces["slab_offset"], pieces["length"] = extents["offset"], metas["stored_length"]
        pieces["layers"] = metas["layers"]
        if hosts is not None:
            pieces["host"], pieces["host_offset"] = hosts["segment"], hosts["offset"]
        return pieces

    async def _attach(self, tier: MappedTier, extents: StructArray) -> None:
        """Have the GPU process map these segments, each once. Raises TierFailed, Overloaded."""
        for segment in np.unique(extents["segment"]).tolist():
            task = self._hosts.get(segment)
            if task is None:
                task = self._hosts[segment] = asyncio.ensure_future(self._attach_one(tier, segment))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(task)

    async def _attach_one(self, tier: MappedTier, segment: int) -> None:
        this: Any = asyncio.current_task()
        try:
            gpu = self._living()
            tier.note_writer(gpu.pid)
            failpoint("cuda.host.before_attach")
            fd, length = tier.descriptor(segment, writable=True)
            try:
                await gpu.attach(segment, fd, length)
            finally:
                os.close(fd)
        except BaseException:
            if self._hosts.get(segment) is this:
                del self._hosts[segment]
            raise


def _spread(came: Came, rows: Sequence[int], count: int) -> Came:
    """Results of some rows, expanded to all rows. The other rows have the fault "slot not there"."""
    slices, faults = [np.zeros(0, np.uint64)] * count, dict.fromkeys(range(count), "its slot is missing")
    for at, row in enumerate(rows):
        slices[row] = came.slices[at]
        del faults[row]
        if at in came.faults:
            faults[row] = came.faults[at]
    return Came(slices, faults)
