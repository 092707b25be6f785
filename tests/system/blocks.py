"""Puts and gets over raw messages, with every byte checked: how the system tests drive a daemon.

The client does not depend on the SDK. `BlockClient.read` raises WrongBytes for bytes that were
never committed. Any other failure only gives a smaller number.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.system.raw import BLOCK_BYTES, RawClient, ask
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.core.formats.model import HANDLE, StructArray
from tierd.testing import content_of, is_content

TOKENS = 16
"""Tokens of a block."""
SOON_S = 10.0
"""Ten times the time that any step here should take. It bounds every wait and never a measurement."""


Memory = tuple[int, int]
"""A page: the inode of its file and its offset in that file."""


class WrongBytes(AssertionError):
    """A get returned bytes that were never committed under that name."""


@dataclass(frozen=True)
class Leased:
    """The reply of an Acquire. handles: HANDLE [n]; pages: their bytes, mapped."""

    lease: int
    handles: StructArray
    pages: list[memoryview]


class BlockClient(RawClient):
    """A raw session that maps each segment once and keeps it mapped."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._mapped: dict[tuple[int, int, bool], memoryview] = {}
        self._files: dict[tuple[int, int], int] = {}

    def page(self, handle: Any, *, writable: bool) -> memoryview:
        """The mapped page of a handle."""
        place = (int(handle["tier"]), int(handle["segment"]), writable)
        if place not in self._mapped:
            self._mapped[place] = self._map(*place)
        start = int(handle["offset"])
        return self._mapped[place][start : start + int(handle["length"])]

    def memory_of(self, handle: Any, *, writable: bool) -> Memory:
        """The memory that holds the page, whatever the segment is called."""
        self.page(handle, writable=writable)
        return self._files[int(handle["tier"]), int(handle["segment"])], int(handle["offset"])

    def put(
        self, namespace: int, hashes: np.ndarray, *, length: int | np.ndarray = BLOCK_BYTES, durable: bool = False
    ) -> int:
        """Stores the missing blocks and returns how many leading ones are stored. length: of all, or of each."""
        reservation, handles = self.reserve(namespace, hashes, length=length)
        self.write(handles, hashes)
        statuses = handles["status"].copy()
        if reservation:
            durability = pb.DURABILITY_DURABLE if durable else pb.DURABILITY_MEMORY
            reply = self.call(self.cache.Commit, pb.CommitRequest(reservation=reservation, durability=durability))
            committed = np.frombuffer(reply.handles, dtype=HANDLE)["status"]
            statuses[statuses == pb.BLOCK_STATUS_RESERVED] = committed
        return _leading(np.isin(statuses, (pb.BLOCK_STATUS_READY, pb.BLOCK_STATUS_EXISTS)))

    def write(self, handles: StructArray, hashes: np.ndarray) -> None:
        """Fills the reserved pages among these."""
        for handle, name in zip(handles, hashes, strict=True):
            if handle["status"] == pb.BLOCK_STATUS_RESERVED:
                self.page(handle, writable=True)[:] = content_of(name, int(handle["length"])).tobytes()

    def acquire(self, namespace: int, hashes: np.ndarray) -> Leased:
        """A lease on the leading blocks that the daemon can serve in host memory."""
        group = pb.Group(namespace=namespace, hashes=hashes.tobytes())
        reply = self.call(self.cache.Acquire, pb.AcquireRequest(groups=[group], tier=pb.TIER_KIND_HOST))
        given = b"".join(group.handles for group in reply.groups)
        handles = np.frombuffer(given, dtype=HANDLE)
        return Leased(reply.lease, handles, [self.page(handle, writable=False) for handle in handles])

    def read(self, namespace: int, hashes: np.ndarray) -> int:
        """Gets the leading blocks, compares every byte and returns their count. Raises WrongBytes."""
        leased = self.acquire(namespace, hashes)
        check_bytes(leased, hashes)
        if leased.lease:
            self.call(self.cache.Release, pb.ReleaseRequest(leases=[leased.lease]))
        return len(leased.pages)

    def lookup(self, namespace: int, hashes: np.ndarray) -> int:
        """The number of leading blocks that any tier holds."""
        group = pb.Group(namespace=namespace, hashes=hashes.tobytes())
        return int(self.call(self.cache.Lookup, pb.LookupRequest(groups=[group])).tokens) // TOKENS

    def abort(self, reservation: int) -> None:
        """Gives reserved pages back to the daemon."""
        self.call(self.cache.Abort, pb.AbortRequest(reservation=reservation))

    def status(self) -> apb.StatusReply:
        """The daemon's counts."""
        return self.call(self.admin.Status, apb.StatusRequest())

    def tiers(self) -> dict[str, apb.TierInfo]:
        """Tier infos by name."""
        return {tier.name: tier for tier in self.call(self.admin.Tiers, apb.TiersRequest()).tiers}

    def counter(self, name: str) -> int:
        """A counter of `Status.counters`; 0 if the daemon has not counted it."""
        return int(self.status().counters.get(name, 0))

    def _map(self, tier: int, segment: int, writable: bool) -> memoryview:
        reply, fds = ask(self.socket, {"op": "map", "tier": tier, "segment": segment})
        if not reply:
            raise ConnectionError("the daemon has closed the session socket")
        assert reply["ok"], reply
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = memoryview(mmap.mmap(fds[0], reply["bytes"], prot=protection))
        self._files[tier, segment] = os.fstat(fds[0]).st_ino
        for fd in fds:
            os.close(fd)
        return memory


def check_bytes(leased: Leased, hashes: np.ndarray) -> None:
    """Compares every page with its block's content. Raises WrongBytes."""
    for i, (page, name) in enumerate(zip(leased.pages, hashes, strict=False)):
        if not is_content(page, name):
            raise WrongBytes(f"block {i} of {len(leased.pages)} ({name.tobytes().hex()[:16]}): {leased.handles[i]}")


def _leading(good: np.ndarray) -> int:
    return len(good) if good.all() else int(np.argmin(good))


@contextmanager
def connected(daemon: Daemon) -> Iterator[BlockClient]:
    """A session that lasts as long as the `with` block."""
    with BlockClient(daemon.target) as client:
        yield client


def await_true(ready: Callable[[], bool], what: str, *, within_s: float = SOON_S) -> float:
    """Polls until `ready` holds and returns the seconds that it took. Fails after `within_s`."""
    begun = time.monotonic()
    while not ready():
        assert time.monotonic() - begun < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.002)
    return time.monotonic() - begun


def await_emptied(client: BlockClient) -> None:
    """Evicts until host memory holds no byte. A killed client's commits may end after its session."""

    def is_empty() -> bool:
        client.call(client.admin.Evict, apb.EvictRequest())
        return client.tiers()["host.0"].used_bytes == 0

    await_true(is_empty, "no bytes leaked")
