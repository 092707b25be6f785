"""A client at work on the device tier of kind "cuda", in a process of its own: one method for each thing that a test asks of it.

    with Elsewhere(serve, daemon.target) as worker:
        assert worker.ask(["put", [seed, blocks]]) == blocks

It reads pages by their addresses too, through the driver, so a test sees what a kernel would. A chain is named by its seed, and everything about it follows from that.
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
"""Leases that a worker keeps while it works on."""


def blocks_of(seed: int) -> int:
    """The length of a chain that is put by `live`."""
    return 1 + seed % 4


class Worker:
    """A client that works on the device: one method for each thing that a test asks of it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.client = Client(target)
        self.namespace = self.client.open_namespace(SPEC)
        self.kept: list[Any] = []
        self.written: list[tuple[Gpu, int, int]] = []

    def resize(self, block_bytes: int) -> int:
        """From now on blocks have so many bytes."""
        self.namespace = self.client.open_namespace(replace(SPEC, model=f"of {block_bytes}", block_bytes=block_bytes))
        return self.namespace.spec.block_bytes

    def put(self, seed: int, blocks: int, durability: str = "", tier: str = "device") -> int:
        """Writes a chain in place and commits it; how many blocks are stored."""
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
        """Keeps a lease on a chain and its pages; how many blocks."""
        lease = self.client.acquire(self.namespace, chain(seed, blocks), tier=tier)
        self.kept.append((lease, lease.views(), seed)) if lease else None
        return lease.tokens // TOKENS

    def right(self) -> list[int]:
        """How many of the pages that are kept hold what they must: copied out, and read where they lie."""
        return [sum(column) for column in zip((0, 0), *(self._right(*kept) for kept in self.kept), strict=True)]

    def marks(self) -> list[bool]:
        """Which kept pages tell that they are read-only."""
        return [page.__cuda_array_interface__["data"][1] for _, views, _ in self.kept for page in views]

    def scribble(self) -> None:
        """Changes a byte of each page that it wrote, as a kernel that is late does."""
        for gpu, address, nbytes in self.written:
            write_at(gpu, address + nbytes // 2, b"\x5a" * 64)

    def write_where_it_may_not(self) -> None:
        """Raises what the driver says."""
        page = self.kept[0][1][0]
        write_at(page.device, page.address, bytes(1))

    def drop(self) -> None:
        """Releases what it keeps."""
        while self.kept:
            lease, views, _ = self.kept.pop()
            views.clear()
            lease.release()

    def reserve(self, blocks: int) -> int:
        """Writes private pages and keeps them; how many."""
        pages = self.client.reserve(PutGroup.private(self.namespace, blocks), tier="device")
        self.kept_pages = (pages, pages.buffers())
        for page in self.kept_pages[1]:
            if page is not None:
                page.copy_from(np.full(SPEC.block_bytes, 0xEE, np.uint8))
        return len([page for page in self.kept_pages[1] if page is not None])

    def pass_on(self, blocks: int) -> int:
        """Takes private pages and gives them back, with their slabs mapped: who has those next needs others. How many."""
        pages = self.client.reserve(PutGroup.private(self.namespace, blocks), tier="device")
        given = len([page for page in pages.buffers() if page is not None])
        pages.abort()
        return given

    def work(self, seed: int, rounds: int, tier: str = "device") -> list[int]:
        """Puts, leases and looks, whatever fails; how many rounds went well, and how many pages were wrong."""
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
        """Puts durable chains from this seed on and looks at them in place, with the device emptied now and then, until the daemon goes.

        durable: seeds that were acknowledged; wrong: how many pages were; end: what the daemon's end looked like. Some pages are kept.
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
        """How many of the pages that are kept hold what they must not, looked at in both ways."""
        return 2 * sum(len(views) for _, views, _ in self.kept) - sum(self.right())

    def slabs(self) -> list[int]:
        """Inodes of the device memory that is mapped here: the fake driver's has some."""
        with open("/proc/self/maps") as maps:
            return sorted({int(line.split()[4]) for line in maps if "tierd-fake-gpu" in line})

    def places(self) -> list[tuple[str, int]]:
        """Of which tier each kept page is, and on which GPU as this process counts."""
        found = []
        for lease, views, _ in self.kept:
            tiers = [self.client.tiers[tier] for tier in lease.handles["tier"].tolist()]
            found += [(tier, page.device.id) for tier, page in zip(tiers, views, strict=True)]
        return found

    def drop_few(self) -> None:
        """Releases all but the newest."""
        while len(self.kept) > KEPT:
            lease, views, _ = self.kept.pop(0)
            views.clear()
            with contextlib.suppress(TierdError):  # it may be a dead daemon's
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
    """Runs there: does what it is asked until the test has gone."""
    worker = Worker(target)
    while True:
        verb, given = talk.hear()
        try:
            talk.say(getattr(worker, verb)(*given))
        except TierdError as error:
            talk.say(f"{type(error).__name__}: {error}")


def evict(target: str, tier: str) -> None:
    """Everything that nobody holds leaves the tier."""
    with RawClient(target) as admin:
        admin.call(admin.admin.Evict, apb.EvictRequest(tier=tier))


def gpu_process(daemon: Daemon, ordinal: int = 0) -> psutil.Process:
    """The daemon's child that has this GPU."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for child in psutil.Process(daemon.pid).children():
            with contextlib.suppress(psutil.Error):
                found.extend([child] * (child.cmdline()[-1:] == [str(ordinal)]))
        return bool(found)

    await_true(look, "a GPU process")
    return found[-1]


def await_put(worker: Elsewhere, seed: int, tier: str = "device") -> None:
    """The device takes blocks again."""
    seeds = iter(range(seed, seed + 10_000))
    await_true(lambda: worker.ask(["put", [next(seeds), 1, "", tier]]) == 1, "a put on the device")
