"""The processes of test_races.py: readers during eviction, rival writers, and writers that die.

Each function runs in its own process and puts its results into a queue as plain values.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from tierd.client import Client, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.core.formats.model import BlockStatus
from tierd.errors import Overloaded
from tierd.testing import chain, content_of

SPEC = NamespaceSpec(model="race", tokens_per_block=16, block_bytes=4096)
CHAIN_BLOCKS = 16
KEYS = 4
"""Keys that the writers of a round compete for."""
PATIENCE_S = 120
"""Of a call. The promises hold on a machine that stalls for a while, too."""
HELD_TURNS = (3, 20)
"""Turns until a reader checks kept views again: few mostly, at times until the blocks are coldest."""


class Reader:
    """Gets whole chains, as views or as copies, and puts evicted blocks again."""

    def __init__(self, client: Client, *, chains: int, seed: int) -> None:
        self._client, self._namespace = client, client.open_namespace(SPEC)
        self._chance = random.Random(seed)
        self._hashes = [chain(number, CHAIN_BLOCKS) for number in range(chains)]
        self._blocks = [np.stack([content_of(name, 4096) for name in names]) for names in self._hashes]
        self._held: list[tuple[int, int, Any]] = []
        self._turn = 0
        self.seen: Counter[str] = Counter()

    def run(self, gets: int) -> None:
        """Runs until it has got this many blocks."""
        while self.seen["views"] + self.seen["copies"] < gets:
            self._turn += 1
            self._let_go(until=self._turn)
            number = min(self._chance.randrange(len(self._hashes)), self._chance.randrange(len(self._hashes)))
            got = self._view(number) if self._chance.random() < 0.5 else self._copy(number)
            if got < CHAIN_BLOCKS:
                self.seen["misses"] += CHAIN_BLOCKS - got
                self.seen["stored"] += self._client.put(
                    self._namespace, self._hashes[number], list(self._blocks[number])
                ).stored
        self._let_go(until=self._turn + max(HELD_TURNS))

    def _view(self, number: int) -> int:
        got = self._client.get(self._namespace, self._hashes[number])
        self._compare(number, got.views, "views")
        self._held.append((self._turn + HELD_TURNS[self._chance.random() < 0.1], number, got.views))
        return got.blocks

    def _copy(self, number: int) -> int:
        out = np.zeros((CHAIN_BLOCKS, 4096), np.uint8)
        got = self._client.get(self._namespace, self._hashes[number], out=list(out))
        self._compare(number, list(out[: got.blocks]), "copies")
        return got.blocks

    def _let_go(self, *, until: int) -> None:
        for due, number, views in self._held:
            if due <= until:
                self._compare(number, views, "again")
        self._held = [kept for kept in self._held if kept[0] > until]

    def _compare(self, number: int, pages: Any, way: str) -> None:
        self.seen[way] += len(pages)
        self.seen["wrong"] += sum(
            not np.array_equal(page, right) for page, right in zip(pages, self._blocks[number], strict=False)
        )


def read(target: str, told: Queue[Any], *, chains: int, gets: int, seed: int) -> None:
    """A reader's process. Puts its counts, or the traceback of an unexpected error, into the queue."""
    try:
        with Client(target, timeout_s=PATIENCE_S) as client:
            reader = Reader(client, chains=chains, seed=seed)
            reader.run(gets)
        told.put(dict(reader.seen))
    except BaseException:
        told.put(traceback.format_exc())


# -- writers of the same keys


def keys_of(turn: int) -> np.ndarray:
    """The keys of a round: uint8 [KEYS, 32]."""
    return chain(1_000_000 + turn, KEYS)


def bytes_of(name: np.ndarray, writer: int) -> np.ndarray:
    """This writer's content of a block: every byte depends on the key and the writer."""
    page = content_of(name, 4096).copy()
    page ^= np.uint8(writer)
    page[:8] = np.frombuffer(writer.to_bytes(8, "little"), np.uint8)
    return page


def writer_of(name: np.ndarray, page: np.ndarray) -> int:
    """The writer of all these bytes; -1 if they are mixed or no writer's."""
    writer = int.from_bytes(page[:8].tobytes(), "little")
    return writer if writer < 256 and np.array_equal(page, bytes_of(name, writer)) else -1


def write(target: str, told: Queue[Any], *, barrier: Barrier, rounds: int, first: int, threads: int) -> None:
    """A process of writers: each put's statuses and the writer of the bytes read, per round and writer."""
    try:
        with Client(target, timeout_s=PATIENCE_S) as client:
            namespace = client.open_namespace(SPEC)
            rows: list[tuple[int, int, list[int], list[int]]] = []
            work = [
                threading.Thread(
                    target=_write_all,
                    args=(client, namespace, barrier),
                    kwargs={"rounds": rounds, "writer": first + i, "rows": rows},
                )
                for i in range(threads)
            ]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
        told.put(rows)
    except BaseException:
        barrier.abort()
        told.put(traceback.format_exc())


def _write_all(
    client: Client, namespace: OpenedNamespace, barrier: Barrier, *, rounds: int, writer: int, rows: list[Any]
) -> None:
    try:
        for turn in range(rounds):
            names = keys_of(turn)
            blocks = [bytes_of(name, writer) for name in names]
            barrier.wait(2 * PATIENCE_S)
            statuses = _insisting(lambda: client.put(namespace, names, blocks)).statuses.tolist()  # noqa: B023
            views = _insisting(lambda: client.get(namespace, names)).views  # noqa: B023
            seen = [writer_of(name, view) for name, view in zip(names, views, strict=False)]
            rows.append((turn, writer, statuses, seen))
    except BaseException:
        barrier.abort()
        rows.append((-1, writer, [], [traceback.format_exc()]))  # type: ignore[list-item]


def _insisting(call: Any) -> Any:
    """Retries while the daemon is overloaded."""
    while True:
        try:
            return call()
        except Overloaded:
            continue


def die(target: str, told: Connection, *, rounds: int, writer: int) -> None:
    """Reserves every key before the other writers start, commits some, and dies in a commit."""
    client = Client(target, timeout_s=PATIENCE_S)
    namespace = client.open_namespace(SPEC)
    held = []
    for turn in range(rounds):
        pages = client.reserve(PutGroup(namespace, keys_of(turn)))
        for name, page in zip(keys_of(turn), pages.buffers(), strict=True):
            if page is not None:
                page[:] = bytes_of(name, writer)
        held.append(pages)
    told.send("ready")
    chance = random.Random(writer)
    reserved = [pages for pages in held if pages]  # for the other keys, another writer has committed already
    for pages in chance.sample(reserved[1:], len(reserved) // 3):
        _insisting(pages.commit)
    last = reserved[0]
    threading.Thread(target=last.commit, daemon=True).start()
    threading.Event().wait(chance.random() * 0.003)
    os.kill(os.getpid(), signal.SIGKILL)


def is_stored(statuses: list[int]) -> bool:
    """Whether a put's statuses say that the daemon holds all its blocks."""
    return all(status in (BlockStatus.READY, BlockStatus.EXISTS) for status in statuses)
