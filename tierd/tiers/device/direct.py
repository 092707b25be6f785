"""Direct reads from stores into a GPU's slabs, and the store files that its process has open.

`DirectWays` is part of a device tier. It asks each new GPU process, store by store, and reads
directly while possible. The mover checks whether the bytes are the block's. The core plans,
informed by `cache/watch.py`.

A path counts as direct only if that is known. An abandoned path returns with another GPU process at
the earliest. It never returns if a GPU process hung over it or several died. The descriptors that
are passed are read-only. Each store without a direct path has a notice with the reason.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierd.core.formats.model import PAGE_ALIGN_BYTES, StructArray
from tierd.errors import Overloaded, TierdError, TierFailed
from tierd.failpoint import failpoint
from tierd.gpu.probe_file import probe_file
from tierd.gpu.process import GpuProcess
from tierd.gpu.protocol import READ
from tierd.tiers.store.slots import DirectIO, SlotFile
from tierd.tiers.tier import Came, StoredTier

DEATHS_MAX = 3
"""GPU processes that may die over reads without a success between; then no more are asked."""
FILES_MAX = 256
"""The limit of store files that a GPU process has open, not counting those in use."""


@dataclass(eq=False, slots=True)
class Lent:
    """A file that the GPU process has open, or is opening, under a number. users: reads in flight."""

    store: StoredTier
    file: SlotFile
    number: int
    opening: asyncio.Task[None]
    users: int = 0


class DirectWays:
    """Direct reads of one device tier. name: the tier's. by: the setting `direct_reads`. on_change:
    called when a path is lost, or after new tests."""

    def __init__(self, name: str, *, by: str, on_change: Callable[[], None]) -> None:
        self.notices: dict[int, str] = {}
        """By store, why there is no direct path, for people."""
        self._name, self._by, self._on_change = name, by, on_change
        self._given_up = 'direct_reads = "off"' if by == "off" else ""
        self._stores: dict[int, StoredTier] = {}
        self._ways: dict[int, str] = {}
        self._gpu: GpuProcess | None = None
        self._lent: dict[int, Lent] = {}
        """By the identity of the file, which `Lent` keeps alive."""
        self._next_number = 1
        self._under_way = self._deaths = 0

    @property
    def stores(self) -> frozenset[int]:
        """Positions of the stores that can be read directly now."""
        return frozenset(self._ways)

    @property
    def words(self) -> str:
        """The path of blocks from each store, in words."""
        return ", ".join(
            f"{store.spec.name} {f'read directly by {self._ways[at]}' if at in self._ways else 'by way of host memory'}"
            for at, store in self._stores.items()
        )

    def is_own(self, notice: str) -> bool:
        """Whether a notice was made here, now or earlier."""
        return notice.startswith(f"{self._name}: blocks come from ")

    def know(self, stores: Sequence[StoredTier]) -> None:
        """Set the stores to consider."""
        self._stores = {store.position: store for store in stores}

    async def begin(self, gpu: GpuProcess) -> None:
        """Test every store with a new GPU process."""
        self._gpu, self._ways, self._lent = gpu, {}, {}
        for position, store in self._stores.items():
            way, fault = await self._ask(gpu, store)
            if gpu is self._gpu and way:
                self._ways[position] = way
                self.notices.pop(position, None)
            elif gpu is self._gpu:
                self._say(position, fault)
        self._on_change()

    def end(self, gpu: GpuProcess) -> None:
        """Handle the end of a GPU process. After a hang in a read, or several deaths, ask no more."""
        self._deaths += self._under_way > 0
        if gpu.hung in ("read", "probe") or self._deaths >= DEATHS_MAX:
            fault = "a GPU process hung" if gpu.hung else f"{self._deaths} GPU processes died"
            self._given_up = f"{fault} during a direct read; restart the daemon to try again"
            for position in self._stores:
                self._say(position, self._given_up)
        self._gpu, self._ways, self._lent = None, {}, {}
        self._on_change()

    def give_up(self, position: int, reason: str) -> None:
        """Abandon the direct path from a store until another GPU process begins."""
        if self._ways.pop(position, None):
            self._say(position, reason)
            self._on_change()

    async def read(self, reads: StructArray, files: Sequence[SlotFile], *, store: StoredTier) -> Came:
        """Carry out READ [n], setting its files. Raises TierFailed; a refusal ends the path."""
        gpu = self._gpu
        if gpu is None or store.position not in self._ways:
            raise TierFailed(f"{self._name}: direct reads from {store.spec.name} have ended")
        try:
            async with self._borrowed(gpu, store, files) as numbers:
                reads["file"] = numbers
                failpoint("cuda.direct.before_read")
                with self._counted():
                    came = Came(*await gpu.read(reads))
                self._deaths = 0
                return came
        except (TierdError, OSError) as error:
            if gpu.is_alive and gpu is self._gpu and not isinstance(error, Overloaded):
                self.give_up(store.position, str(error))
            raise TierFailed(f"{self._name}: {error}") from error

    # -- inner

    async def _ask(self, gpu: GpuProcess, store: StoredTier) -> tuple[str, str]:
        """The name of the direct path to the store's files, or the reason why there is none."""
        if self._given_up:
            return "", self._given_up
        if store.mode != DirectIO.mode:
            return "", f"{store.spec.name} is read through the page cache"
        try:
            opened = probe_file(Path(store.place))
            descriptor = await asyncio.to_thread(opened.__enter__)
            try:
                with self._counted():
                    return await gpu.probe(descriptor, self._by), ""
            finally:
                opened.__exit__(None, None, None)
        except (TierdError, OSError) as error:
            return "", str(error)

    def _say(self, position: int, reason: str) -> None:
        name = self._stores[position].spec.name
        self.notices[position] = (
            f"{self._name}: blocks come from {name} by way of host memory, GPUDirect Storage is not used ({reason})"
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a read in flight: a GPU process that dies meanwhile died over a read."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @asynccontextmanager
    async def _borrowed(
        self, gpu: GpuProcess, store: StoredTier, files: Sequence[SlotFile]
    ) -> AsyncIterator[list[int]]:
        """File numbers, open in the GPU process for the duration. Raises errors of opening."""
        lent = {id(file): self._lend(gpu, store, file) for file in files}
        for one in lent.values():
            one.users += 1
        try:
            for one in lent.values():
                await asyncio.shield(one.opening)
            yield [lent[id(file)].number for file in files]
        finally:
            for one in lent.values():
                one.users -= 1
            if gpu is self._gpu:
                await self._take_back(gpu)

    def _lend(self, gpu: GpuProcess, store: StoredTier, file: SlotFile) -> Lent:
        found = self._lent.pop(id(file), None)
        if found is None:
            number, self._next_number = self._next_number, self._next_number + 1
            opening = asyncio.ensure_future(_open(gpu, number, file))
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            found = Lent(store, file, number, opening)
        self._lent[id(file)] = found  # the last entry is the most recently used
        return found

    async def _take_back(self, gpu: GpuProcess) -> None:
        """Close files that failed to open, were replaced, or are the least recently used."""
        idle = [one for one in self._lent.values() if not one.users and one.opening.done()]
        gone = [one for one in idle if one.opening.exception() or not one.store.has_file(one.file)]
        gone += [one for one in idle if one not in gone][: max(0, len(self._lent) - len(gone) - FILES_MAX)]
        for one in gone:
            del self._lent[id(one.file)]
        for one in gone:
            if not one.opening.exception():
                with suppress(TierdError):
                    await gpu.close_file(one.number)


async def _open(gpu: GpuProcess, number: int, file: SlotFile) -> None:
    """Open with a separate read-only descriptor."""
    fd = await asyncio.to_thread(os.open, f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        await gpu.open_file(number, fd)
    finally:
        os.close(fd)


def reads_of(pieces: StructArray, offsets: Sequence[int]) -> StructArray:
    """READ [n] for PIECE [n] and payload offsets; pages and slots are whole 4 KiB."""
    reads = np.zeros(len(pieces), READ)
    for name in ("slab", "slab_offset", "length", "layers"):
        reads[name] = pieces[name]
    reads["file_offset"] = offsets
    reads["room"] = -(-pieces["length"].astype(np.int64) // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    return reads
