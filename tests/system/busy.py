"""One turn of everything that a daemon does, to be interrupted by a death at any fault point.

Purpose: `Busy.turn` passes every fault point of a serving daemon within about a second. This
process, outside the daemon, records the chains acknowledged as durable. The errors that the SDK
promises for a dead daemon end a turn. Any other error fails the test.
"""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import dataclass

import grpc
import numpy as np

from tests.system.blocks import BlockClient, await_true
from tests.system.raw import ask, connect, hello
from tierd._proto import admin_pb2 as apb
from tierd.client import Client, NamespaceSpec
from tierd.client.values import OpenedNamespace, PutGroup
from tierd.errors import RetryError, StaleHandle
from tierd.testing import chain, content_of, is_content

CONFIG = """\
[server]
shutdown_deadline = "5 s"
session_share = 1.0

[[device]]
capacity = "4 MiB"
segment = "1 MiB"

[[host]]
capacity = "16 MiB"
segment = "1 MiB"
high_watermark = 0.8
low_watermark = 0.6

[[nvme]]
capacity = "1 GiB"
segment = "8 MiB"
"""
TOKENS = 16
LENGTHS = (4 << 10, 128 << 10)
GONE = (RetryError, StaleHandle, grpc.RpcError, OSError)
"""Errors that may end a turn when its daemon dies. Raw clients see gRPC's and the socket's own errors."""
LEASE_BLOCKS = 1024
LEASES = 20
"""Together these need more rows than the session table has at first."""


@dataclass(frozen=True)
class Durable:
    """A chain that the daemon acknowledged. kind: index into LENGTHS."""

    seed: int
    kind: int
    count: int

    @property
    def hashes(self) -> np.ndarray:
        """uint8 [count, 32]."""
        return chain(self.seed, self.count)


class Busy:
    """The load. wrong, lost: false bytes, and durable blocks that missed; checked: blocks asked for."""

    def __init__(self, target: str) -> None:
        self.durable: list[Durable] = []
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self.checked = 0
        self._target = target
        self._seeds = itertools.count(1)
        self._client = Client(target, name="busy", timeout_s=20.0)
        self._spaces = [OpenedNamespace(_spec(f"busy-{length}", length)) for length in LENGTHS]

    def close(self) -> None:
        """Ends the session."""
        self._client.close()

    def turn(self, *, many_leases: bool) -> str:
        """Does everything once; the error that ended it, or "". many_leases: grows the session table."""
        try:
            with BlockClient(self._target) as raw:
                self._turn(raw)
                if many_leases:
                    self._lease_much()
        except GONE as error:
            return repr(error)
        return ""

    def check(self, chains: list[Durable]) -> None:
        """Compares every byte of the acknowledged chains and records each fault. Raises AssertionError."""
        for it in chains:
            got = self._client.get(self._spaces[it.kind], it.hashes)
            self._compare(it.hashes, got.views)
            self.checked += it.count
            self.lost += [f"{name.tobytes().hex()[:16]} of {it}" for name in it.hashes[got.blocks :]]
            assert not self.lost, f"lost: {self.lost}\n{self._why(it)}"
        assert not self.wrong, f"wrong: {self.wrong}"

    def await_room(self) -> None:
        """Waits until no dead or disconnected client holds pages any more."""
        with BlockClient(self._target) as raw:
            try:
                await_true(
                    lambda: not any(tier.pages_pinned or tier.pages_reserved for tier in raw.tiers().values()),
                    "room back",
                )
            except AssertionError as error:
                raise AssertionError(f"{error}; {self._holders(raw)}") from error

    def _holders(self, raw: BlockClient) -> str:
        sessions = raw.call(raw.admin.Sessions, apb.SessionsRequest()).sessions
        return f"holders of room, to process {os.getpid()}: {sessions}\n{list(raw.tiers().values())}"

    def _why(self, it: Durable) -> str:
        """The tiers of a chain that missed, and the holders of pages."""
        with BlockClient(self._target) as raw:
            where = self._client.lookup(self._spaces[it.kind], it.hashes).tier_of
            return f"tiers of its blocks: {where}\n{self._holders(raw)}"

    def _turn(self, raw: BlockClient) -> None:
        self._client.open_namespace(_spec(f"new-{next(self._seeds)}", LENGTHS[0]))
        for kind, count in ((0, 12), (1, 4), (1, 4), (0, 12)):
            self._put(kind, count)
        self._read(self.durable[-4:])
        self._give_up()
        # Above the watermark the daemon demotes the coldest blocks to NVMe. Reads promote them.
        self._client.put(self._spaces[1], *self._blocks(1, 120))
        self._read(self.durable[-4:])
        raw.call(raw.admin.Evict, apb.EvictRequest(tier="host.0"))
        self._read(self.durable[-2:])
        with self._client.acquire(self._spaces[1], self.durable[-2].hashes, tier="device"):
            pass
        self._end_epoch(raw)
        self._lose_client()

    def _put(self, kind: int, count: int) -> None:
        seed = next(self._seeds)
        hashes = chain(seed, count)
        blocks = [content_of(name, LENGTHS[kind]) for name in hashes]
        if self._client.put(self._spaces[kind], hashes, blocks, durable=True):
            self.durable.append(Durable(seed, kind, count))

    def _blocks(self, kind: int, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
        hashes = chain(next(self._seeds), count)
        return hashes, [content_of(name, LENGTHS[kind]) for name in hashes]

    def _read(self, chains: list[Durable]) -> None:
        for it in chains:
            got = self._client.get(self._spaces[it.kind], it.hashes)
            self._compare(it.hashes, got.views)

    def _compare(self, hashes: np.ndarray, views: list[np.ndarray]) -> None:
        self.wrong += [f"{hashes[i].tobytes().hex()[:16]}" for i, v in enumerate(views) if not is_content(v, hashes[i])]

    def _give_up(self) -> None:
        with self._client.reserve(PutGroup(self._spaces[0], chain(next(self._seeds), 3))) as pages:
            for page in pages.buffers()[:1]:
                if page is not None:
                    page[: len(page) // 2] = 0x5A

    def _end_epoch(self, raw: BlockClient) -> None:
        side = self._client.open_namespace(_spec("side", LENGTHS[0]))
        self._client.put(side, *self._blocks(0, 3))
        raw.call(raw.admin.BumpEpoch, apb.BumpEpochRequest(model="side"))

    def _lose_client(self) -> None:
        """Forks a process that opens a session, and kills it."""
        ready, told = os.pipe()
        child = os.fork()
        if not child:  # only system calls from here on: the parent's threads do not exist in the child
            try:
                ask(connect(self._target), hello())
                os.write(told, b"1")
                signal.pause()
            finally:
                os._exit(1)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _lease_much(self) -> None:
        hashes, blocks = self._blocks(0, LEASE_BLOCKS)
        self._client.put(self._spaces[0], hashes, blocks)
        leases = [self._client.acquire(self._spaces[0], hashes) for _ in range(LEASES)]
        for lease in leases:
            lease.close()


def _spec(model: str, length: int) -> NamespaceSpec:
    return NamespaceSpec(model=model, tokens_per_block=TOKENS, block_bytes=length)
