"""Hundreds of clients, forked from a loaded process: `python -m tests.system.nursery TARGET`.

It reads one JSON command a line from standard input and writes one JSON answer a line. Each client
leases a chain, reserves another, writes half of each page and waits for SIGKILL. Every client ends
with the nursery at the latest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from tests.still import stand_still
from tests.system.blocks import BlockClient, Leased
from tierd._proto import cache_pb2 as pb
from tierd.testing import chain

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0


@dataclass(frozen=True)
class Ward:
    """A client with pages. child: pid of a fork with its socket and mappings, or 0; pages: their number."""

    pid: int
    session: int
    child: int
    pages: int

    def stop(self) -> None:
        """Sends SIGSTOP and waits until the client has stopped."""
        stand_still(self.pid)

    def kill(self) -> None:
        """Sends SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def end_child(self) -> None:
        """Kills the client's fork too."""
        if self.child:
            os.kill(self.child, signal.SIGKILL)


class Nursery:
    """The process. Leaving the context ends it and every client."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.nursery", target],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def bear(self, *, leased: int, reserved: int, count: int, forks: bool = False) -> Ward:
        """Starts a client with a lease on `leased` and a reservation of `reserved`, `count` blocks each."""
        assert self._process.stdin and self._process.stdout
        command = {"leased": leased, "reserved": reserved, "count": count, "forks": forks}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the nursery ended with status {self._process.wait()}"
        answer = json.loads(line)
        assert "fault" not in answer, answer
        return Ward(**answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(GRACE_S)
        self._process.stdout.close()


def _lease(client: BlockClient, namespace: int, hashes: np.ndarray) -> Leased:
    """A lease on all blocks. Retries: under load, host memory may lack room to promote them."""
    until = time.monotonic() + GRACE_S
    while len((leased := client.acquire(namespace, hashes)).pages) < len(hashes):
        if leased.lease:
            client.call(client.cache.Release, pb.ReleaseRequest(leases=[leased.lease]))
        assert time.monotonic() < until, f"{len(leased.pages)} of {len(hashes)} blocks are leased after {GRACE_S:g} s"
    return leased


def _reserve(client: BlockClient, namespace: int, hashes: np.ndarray) -> np.ndarray:
    """Reserves pages for all blocks, with the same retries; their handles."""
    until = time.monotonic() + GRACE_S
    while True:
        reservation, handles = client.reserve(namespace, hashes)
        mine = handles[handles["status"] == pb.BLOCK_STATUS_RESERVED]
        if len(mine) == len(hashes):
            return mine
        client.abort(reservation)
        assert time.monotonic() < until, f"{len(mine)} of {len(hashes)} pages are reserved after {GRACE_S:g} s"


def _live(target: str, command: dict[str, Any], *, answer: int, alive: int) -> NoReturn:
    """A client's whole life, in a fork."""
    try:
        client = BlockClient(target)
        namespace, count = client.open_namespace(), int(command["count"])
        leased = _lease(client, namespace, chain(command["leased"], count))
        mine = _reserve(client, namespace, chain(command["reserved"], count))
        for handle in mine:
            page = client.page(handle, writable=True)
            page[: len(page) // 2] = np.full(len(page) // 2, 0x5A, dtype=np.uint8).tobytes()
        told: dict[str, Any] = {
            "pid": os.getpid(),
            "session": int(client.hello["session"]),
            "pages": len(leased.pages) + len(mine),
        }
        child = os.fork() if command["forks"] else -1
        if child:
            os.write(answer, json.dumps(told | {"child": max(child, 0)}).encode() + b"\n")
    except BaseException as error:
        os.write(answer, json.dumps({"fault": repr(error)}).encode() + b"\n")
    os.read(alive, 1)
    os._exit(0)


def main() -> None:
    """Forks until its input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps dead clients
    alive, keep = os.pipe()
    for line in sys.stdin:
        if not os.fork():
            os.close(keep)
            _live(sys.argv[1], json.loads(line), answer=1, alive=alive)


if __name__ == "__main__":
    main()
