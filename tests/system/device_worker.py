"""A client of the device tier of kind "cuda" in its own process, driven by a test's requests.

    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [seed, blocks]]) == blocks

The worker also reads pages by address through the driver, so a test sees the bytes that a kernel
would see. A chain's seed determines its name and content.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import psutil

from tests.system.blocks import await_true
from tests.system.device_driver import read_at, write_at
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.client import BlockStatus, Client, NamespaceSpec, PutGroup
from tierd.client.session.device import Gpu
from tierd.errors import TierdError
from tierd.testing import chain, content_of, is_content

TOKENS = 16
SPEC = NamespaceSpec(model="cuda", tokens_per_block=TOKENS, block_bytes=256 << 10)
DEVICE = '[[device]]\nkind = "cuda"\ncapacity = "16 MiB"\nsegment = "4 MiB"\n'
CONFIG = DEVICE + '[[host]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\n'
KEPT = 2
"""Leases that a worker keeps during later rounds."""


def blocks_of(seed: int) -> int:
    """The length of a chain that `live` puts."""
    return 1 + seed % 4


class Worker:
    """A client that works on the device: one method for each request of a test."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.client = Client(target)
        self.namespace = self.client.open_namespace(SPEC)
        self.kept: list[Any] = []
        self.written: list[tuple[Gpu, int, int]] = []

    def resize(self, block_bytes: int) -> int:
        """Later blocks have this many bytes."""
        self.namespace = self.client.open_namespace(replace(SPEC, model=f"of {block_bytes}", block_bytes=block_bytes))
        return self.namespace.spec.block_bytes

    def put(self, seed: int, blocks: int, durability: str = "", tier: str = "device") -> int:
        """Writes a chain in place and commits it; the number of stored blocks."""
        names = chain(seed, blocks)
        pages = self.client.reserve(PutGroup(self.namespace, names), tier=tier)
        for name, page in zip(names, pages.buffers(), strict=True):
            if page is not None:
                page.copy_from(content_of(name, self.namespace.spec.block_bytes))
                self.written.append((page.device, page.address, page.nbytes))
        statuses = pages.statuses.copy()
        if pages:
            statuses[statuses == BlockStatus.RESERVED] = pages.commit(durable=durability == "durable").statuses
        return int(np.isin(statuses, (BlockStatus.READY, BlockStatus.EXISTS)).sum())

    def lease(self, seed: int, blocks: int, tier: str = "device") -> int:
        """Keeps a lease on a chain and its pages; the number of blocks."""
        lease = self.client.acquire(self.namespace, chain(seed, blocks), tier=tier)
        self.kept.append((lease, lease.views(), seed)) if lease else None
        return lease.tokens // TOKENS

    def right(self) -> list[int]:
        """The number of kept pages with the right bytes: copied out, and read in place."""
        return [sum(column) for column in zip((0, 0), *(self._right(*kept) for kept in self.kept), strict=True)]

    def marks(self) -> list[bool]:
        """For each kept page: whether it is marked read-only."""
        return [page.__cuda_array_interface__["data"][1] for _, views, _ in self.kept for page in views]

    def scribble(self) -> None:
        """Changes 64 bytes of each page that it wrote, as a late kernel would."""
        for gpu, address, nbytes in self.written:
            write_at(gpu, address + nbytes // 2, b"\x5a" * 64)

    def write_where_it_may_not(self) -> None:
        """Writes to a leased page. Raises the driver's error."""
        page = self.kept[0][1][0]
        write_at(page.device, page.address, bytes(1))

    def drop(self) -> None:
        """Releases all kept leases."""
        while self.kept:
            lease, views, _ = self.kept.pop()
            views.clear()
            lease.release()

    def reserve(self, blocks: int) -> int:
        """Writes private pages and keeps them; their number."""
        pages = self.client.reserve(PutGroup.private(self.namespace, blocks), tier="device")
        self.kept_pages = (pages, pages.buffers())
        for page in self.kept_pages[1]:
            if page is not None:
                page.copy_from(np.full(SPEC.block_bytes, 0xEE, np.uint8))
        return len([page for page in self.kept_pages[1] if page is not None])

    def pass_on(self, blocks: int) -> int:
        """Reserves and aborts private pages, with their slabs mapped; how many. Their next owner gets others."""
        pages = self.client.reserve(PutGroup.private(self.namespace, blocks), tier="device")
        given = len([page for page in pages.buffers() if page is not None])
        pages.abort()
        return given

    def work(self, seed: int, rounds: int, tier: str = "device") -> list[int]:
        """Puts, leases and checks despite errors; the number of good rounds and of wrong pages."""
        good = wrong = 0
        for turn in range(rounds):
            try:
                stored = self.put(seed + turn, 2, tier=tier)
                found = self.lease(seed + turn, 2, tier=tier)
                right = self.right()[1]
                wrong += found - right
                good += stored == found == right == 2
                self.drop()
            except TierdError:
                pass
        return [good, wrong]

    def live(self, first: int, rounds: int) -> dict[str, Any]:
        """Puts durable chains from this seed on and checks them in place until the daemon ends.

        durable: acknowledged seeds; wrong: number of wrong pages; end: the error of the last call.
        """
        durable, wrong = list[int](), 0
        for seed in range(first, first + rounds):
            try:
                durable += [seed] * (self.put(seed, blocks_of(seed), "durable") == blocks_of(seed))
                if seed % 3 == 0:
                    evict(self._target, "device.0")
                for known in durable[-1:] + durable[-6:-5]:
                    self.lease(known, blocks_of(known))
                wrong += self.wrong()
                self.drop_few()
            except (TierdError, OSError, grpc.RpcError) as error:
                return {"durable": durable, "wrong": wrong + self.wrong(), "end": repr(error)}
        return {"durable": durable, "wrong": wrong, "end": ""}

    def wrong(self) -> int:
        """The number of kept pages with wrong bytes, over both ways to read them."""
        return 2 * sum(len(views) for _, views, _ in self.kept) - sum(self.right())

    def slabs(self) -> list[int]:
        """Inodes of the device memory mapped here. Only the fake driver's memory has inodes."""
        with open("/proc/self/maps") as maps:
            return sorted({int(line.split()[4]) for line in maps if "tierd-fake-gpu" in line})

    def places(self) -> list[tuple[str, int]]:
        """The tier of each kept page, and its GPU by this process's numbering."""
        found = []
        for lease, views, _ in self.kept:
            tiers = [self.client.tiers[tier] for tier in lease.handles["tier"].tolist()]
            found += [(tier, page.device.id) for tier, page in zip(tiers, views, strict=True)]
        return found

    def drop_few(self) -> None:
        """Releases all but the newest leases."""
        while len(self.kept) > KEPT:
            lease, views, _ = self.kept.pop(0)
            views.clear()
            with contextlib.suppress(TierdError):  # the lease may belong to a dead daemon
                lease.release()

    @staticmethod
    def _right(_: Any, views: Any, seed: int) -> tuple[int, int]:
        copied = read = 0
        for page, name in zip(views, chain(seed, len(views)), strict=True):
            out = np.zeros(page.nbytes, np.uint8)
            page.copy_to(out)
            copied += is_content(out, name)
            read += is_content(read_at(page), name)
        return copied, read


def serve(talk: Talk, target: str) -> None:
    """Runs in the other process: answers requests until the test ends."""
    worker = Worker(target)
    while True:
        verb, given = talk.hear()
        try:
            talk.say(getattr(worker, verb)(*given))
        except TierdError as error:
            talk.say(f"{type(error).__name__}: {error}")


def evict(target: str, tier: str) -> None:
    """Evicts everything unpinned from the tier."""
    with RawClient(target) as admin:
        admin.call(admin.admin.Evict, apb.EvictRequest(tier=tier))


def gpu_process(daemon: Daemon, ordinal: int = 0) -> psutil.Process:
    """The daemon's child process for this GPU."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for child in psutil.Process(daemon.pid).children():
            with contextlib.suppress(psutil.Error):
                found.extend([child] * (child.cmdline()[-1:] == [str(ordinal)]))
        return bool(found)

    await_true(look, "a GPU process")
    return found[-1]


def await_put(worker: Elsewhere, seed: int, tier: str = "device") -> None:
    """Waits until the device accepts blocks again."""
    seeds = iter(range(seed, seed + 10_000))
    await_true(lambda: worker.ask(["put", [next(seeds), 1, "", tier]]) == 1, "a put on the device")
