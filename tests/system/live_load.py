"""A worker that lives through restarts: `python -m tests.system.live_load TARGET WORKER LOG FORKS
RATE`.

The load is crash_load's. In addition the worker keeps views over several daemons and goes on later
with half-written reservations. If FORKS is 1, a forked child holds the socket and every mapping.
RATE: bytes a second that each thread puts.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from typing import Any

from tests.system import crash_load
from tests.system.crash_load import Load, chain_of, open_all
from tierd.client import Client, PutGroup
from tierd.errors import StaleHandle, TierdError

THREADS = 2
HELD_LEASES = 8
OPEN_RESERVATIONS = 2
REPORT_EVERY = 5
PAUSE_S = 0.2
"""Longer than a crash test's: a starting daemon needs the processor more than its clients do."""


class LiveLoad(Load):
    """One thread of a worker."""

    def __init__(self, client: Client, worker: int, thread: int, log: int) -> None:
        super().__init__(client, worker, thread, log)
        self._open: deque[Any] = deque()

    def give_up(self) -> None:
        """Reserves, writes half; finishes and aborts the oldest reservation, of whichever daemon it is."""
        it = chain_of(self._base + self._made + 500_000 + self._chance.randrange(1000))
        reservation = self._client.reserve(PutGroup(self._spaces[it.kind], it.hashes))
        pages = [page for page in reservation.buffers() if page is not None]
        for page in pages:
            page[: len(page) // 2] = 0x5A
        self._open.append((reservation, pages))
        if len(self._open) > OPEN_RESERVATIONS:
            self._go_on(*self._open.popleft())

    def _go_on(self, reservation: Any, pages: list[Any]) -> None:
        for page in pages:
            if (page[: len(page) // 2] != 0x5A).any():
                self._tell({"wrong": "a page that is reserved was written by somebody else"})
            page[len(page) // 2 :] = 0xA5
        del pages
        try:
            reservation.abort()
        except StaleHandle:
            self._counts["stale reservations"] += 1
        except TierdError:
            self._counts["retries"] += 1


def main() -> None:
    """Works until the test kills it or its parent ends."""
    target, worker, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    crash_load.HELD_LEASES, crash_load.PUT_BYTES_PER_S = HELD_LEASES, int(sys.argv[5])
    crash_load.REPORT_EVERY, crash_load.PAUSE_S = REPORT_EVERY, PAUSE_S
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    client = Client(target, name=f"live-{worker}", timeout_s=20.0)
    client.lookup(open_all(client)[0], chain_of(1).hashes)
    if sys.argv[4] == "1" and not ctypes.PyDLL(None).fork():
        sys.stdin.buffer.raw.read(1)  # until the test ends
        os._exit(0)
    for thread in range(THREADS):
        threading.Thread(target=LiveLoad(client, worker, thread, log).run, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
