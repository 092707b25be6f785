"""A worker that puts and gets while its daemon is killed again and again.

Run it as `python -m tests.system.crash_load TARGET WORKER LOG [PUT_BYTES]`. A chain's number
determines its content, so a worker can check any other worker's blocks. A worker appends one JSON
record a line to LOG, before its next call:

    {"stored": number, "durable": bool}        the daemon acknowledged a put
    {"wrong": text}                            a get or a kept view showed false bytes
    {"fault": text}                            the SDK raised an error that it does not promise
    {"gets", "blocks", "misses", "retries"}    counts since the last such record
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd.client import Client, NamespaceSpec
from tierd.client.values import OpenedNamespace, PutGroup
from tierd.errors import RetryError, StaleHandle
from tierd.testing import chain, content_of, is_content

TOKENS = 16
LENGTHS = (4 << 10, 128 << 10, 2 << 20)
MOST_BLOCKS = (12, 6, 2)
KIND_WEIGHTS = (10, 5, 2)
THREADS = 2
PUT_BYTES_PER_S = 2 << 20
"""Of each thread."""
UNBOUNDED = 1 << 60
HELD_LEASES = 2
PAUSE_S = 0.01
"""Pause before a call is retried."""
BREATH_S = 0.003
"""Pause after every call. Six threads without a pause load the machine more than the daemon."""
REPORT_EVERY = 20


@dataclass(frozen=True)
class Chain:
    """The chain that a number names. kind: index of its namespace."""

    number: int
    kind: int
    hashes: np.ndarray

    @property
    def length(self) -> int:
        """Bytes of each block."""
        return LENGTHS[self.kind]


def chain_of(number: int) -> Chain:
    """The chain of this number."""
    chance = random.Random(number)
    kind = chance.choices(range(len(LENGTHS)), KIND_WEIGHTS)[0]
    return Chain(number, kind, chain(number, chance.randint(1, MOST_BLOCKS[kind])))


def open_all(client: Client) -> list[OpenedNamespace]:
    """The namespace of each kind. The first call that succeeds opens it."""
    specs = [NamespaceSpec(model=f"crash-{length}", tokens_per_block=TOKENS, block_bytes=length) for length in LENGTHS]
    return [OpenedNamespace(spec) for spec in specs]


class Load:
    """One thread of a worker. put_bytes: about the bytes of its chains; then it puts old ones again."""

    def __init__(self, client: Client, worker: int, thread: int, log: int, *, put_bytes: int = UNBOUNDED) -> None:
        self._client, self._log, self._put_bytes = client, log, put_bytes
        self._spaces = open_all(client)
        self._base = (worker * THREADS + thread + 1) * 1_000_000
        self._made, self._made_bytes = 0, 0
        self._chance = random.Random(self._base + os.getpid())
        self._allowed_bytes, self._last = 0.0, time.monotonic()
        self._held: deque[tuple[Chain, Any]] = deque()
        self._counts: Counter[str] = Counter()

    def run(self) -> None:
        """Runs random calls without end."""
        verbs = (self.put, self.get, self.copy, self.look, self.give_up, self.recheck)
        while True:
            try:
                self._chance.choices(verbs, (9, 4, 4, 1, 1, 1))[0]()
                time.sleep(BREATH_S)
            except (RetryError, StaleHandle):
                self._counts["retries"] += 1
                time.sleep(PAUSE_S)
            except Exception:
                self._tell({"fault": traceback.format_exc()})
            if sum(self._counts.values()) >= REPORT_EVERY:
                self._tell(dict(self._counts))
                self._counts.clear()

    def put(self) -> None:
        """Puts one of its chains: usually a new one, sometimes one that the daemon may hold already."""
        now = time.monotonic()
        self._allowed_bytes = min(self._allowed_bytes + (now - self._last) * PUT_BYTES_PER_S, 2.0 * PUT_BYTES_PER_S)
        self._last = now
        is_new = self._made == 0 or (self._made_bytes < self._put_bytes and self._chance.random() < 0.7)
        it = chain_of(self._base + (self._made if is_new else self._chance.randrange(self._made)))
        if self._allowed_bytes < 0:
            return self.get()
        self._made, self._made_bytes = self._made + is_new, self._made_bytes + is_new * len(it.hashes) * it.length
        self._allowed_bytes -= len(it.hashes) * it.length
        durable = self._chance.random() < 0.5
        blocks = [content_of(name, it.length) for name in it.hashes]
        if self._client.put(self._spaces[it.kind], it.hashes, blocks, durable=durable):
            self._tell({"stored": it.number, "durable": durable})
        return None

    def get(self) -> None:
        """Reads any worker's chain in place and keeps the views for a while."""
        it = self._some()
        got = self._client.get(self._spaces[it.kind], it.hashes)
        self._check(it, got.views, "view")
        if got.views:
            self._held.append((it, got.views))
            del got
            while len(self._held) > HELD_LEASES:
                self.recheck()

    def copy(self) -> None:
        """Copies any worker's chain out."""
        it = self._some()
        out = [np.zeros(it.length, dtype=np.uint8) for _ in it.hashes]
        got = self._client.get(self._spaces[it.kind], it.hashes, out=out)
        self._check(it, out[: got.blocks], "copy")

    def look(self) -> None:
        """Looks a chain up and prefetches it."""
        it = self._some()
        self._client.lookup(self._spaces[it.kind], it.hashes)
        self._client.prefetch(self._spaces[it.kind], it.hashes)

    def give_up(self) -> None:
        """Reserves pages, writes half of the first one, and never commits them."""
        it = chain_of(self._base + self._made + 500_000 + self._chance.randrange(1000))
        with self._client.reserve(PutGroup(self._spaces[it.kind], it.hashes)) as pages:
            for page in pages.buffers()[:1]:
                if page is not None:
                    page[: len(page) // 2] = 0x5A

    def recheck(self) -> None:
        """Checks kept views, perhaps of a daemon that is dead by now."""
        if self._held:
            it, views = self._held.popleft()
            self._check(it, views, "old view")

    def _some(self) -> Chain:
        if self._made and self._chance.random() < 0.7:
            return chain_of(self._base + self._chance.randrange(max(0, self._made - 20), self._made))
        base = self._chance.randrange(1, 8) * 1_000_000
        return chain_of(base + self._chance.randrange(self._made + 1))

    def _check(self, it: Chain, views: Any, what: str) -> None:
        self._counts["gets"] += 1
        self._counts["blocks"] += len(views)
        self._counts["misses"] += len(it.hashes) - len(views)
        for i, view in enumerate(views):
            if len(view) != it.length or not is_content(view, it.hashes[i]):
                same = np.asarray(view) == content_of(it.hashes[i], len(view))
                self._tell(
                    {
                        "wrong": f"{what} of chain {it.number}, block {i}: {int(same.sum())} of {len(view)} bytes are right"
                    }
                )

    def _tell(self, record: dict[str, Any]) -> None:
        os.write(self._log, (json.dumps(record) + "\n").encode())


def main() -> None:
    """Works until the test kills it or its parent ends."""
    target, worker, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    put_bytes = int(sys.argv[4]) if len(sys.argv) > 4 else UNBOUNDED
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    client = Client(target, name=f"crash-{worker}", timeout_s=20.0)
    for thread in range(THREADS):
        load = Load(client, worker, thread, log, put_bytes=put_bytes)
        threading.Thread(target=load.run, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
