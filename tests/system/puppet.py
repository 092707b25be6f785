"""A client to be stopped, forked and killed: `python -m tests.system.puppet TARGET`.

It reads one JSON command a line from standard input and writes one JSON answer a line. A test
drives it through `Puppet`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tests.still import stand_still
from tests.system.blocks import BlockClient, Leased, Memory
from tierd._proto import cache_pb2 as pb
from tierd.testing import chain, is_content

ROOT = Path(__file__).resolve().parents[2]


class Puppet:
    """The process, and one method a command. Leaving the context kills it."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.puppet", target],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.session = int(self._answer()["session"])

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self._process.pid

    def put(self, seed: int, count: int) -> int:
        """Stores a chain; the number of stored blocks."""
        return int(self._ask("put", seed=seed, count=count)["stored"])

    def lease(self, seed: int, count: int) -> list[Memory]:
        """Acquires a chain and keeps the lease; the memory of each page."""
        return [(row[0], row[1]) for row in self._ask("lease", seed=seed, count=count)["pages"]]

    def reserve(self, seed: int, count: int) -> list[Memory]:
        """Reserves pages, fills them with one byte and keeps them; the memory of each page."""
        return [(row[0], row[1]) for row in self._ask("reserve", seed=seed, count=count)["pages"]]

    def wrong(self) -> int:
        """The number of held pages with changed content."""
        return int(self._ask("wrong")["pages"])

    def hang_up(self) -> None:
        """Closes its sockets and lives on."""
        self._ask("hang_up")

    def fork(self) -> int:
        """Starts a child that keeps a copy of the session's socket; the child's pid."""
        return int(self._ask("fork")["pid"])

    def stop(self) -> None:
        """Sends SIGSTOP and waits until the process has stopped."""
        stand_still(self.pid)

    def go_on(self) -> None:
        """Sends SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"verb": verb} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the client ended with status {self._process.wait()}"
        return dict(json.loads(line))


class Strings:
    """The commands in the client's process."""

    def __init__(self, target: str) -> None:
        self._client = BlockClient(target)
        self._namespace = self._client.open_namespace()
        self._leased: list[tuple[Leased, np.ndarray]] = []
        self._reserved: list[memoryview] = []

    def put(self, seed: int, count: int) -> dict[str, Any]:
        return {"stored": self._client.put(self._namespace, chain(seed, count))}

    def lease(self, seed: int, count: int) -> dict[str, Any]:
        leased = self._client.acquire(self._namespace, chain(seed, count))
        self._leased.append((leased, chain(seed, count)))
        return {"pages": [self._client.memory_of(handle, writable=False) for handle in leased.handles]}

    def reserve(self, seed: int, count: int) -> dict[str, Any]:
        _, handles = self._client.reserve(self._namespace, chain(seed, count))
        mine = handles[handles["status"] == pb.BLOCK_STATUS_RESERVED]
        for handle in mine:
            page = self._client.page(handle, writable=True)
            page[:] = b"\xa5" * len(page)
            self._reserved.append(page)
        return {"pages": [self._client.memory_of(handle, writable=True) for handle in mine]}

    def wrong(self) -> dict[str, Any]:
        held = [
            is_content(page, name)
            for leased, names in self._leased
            for page, name in zip(leased.pages, names, strict=False)
        ]
        return {"pages": held.count(False) + sum(page != b"\xa5" * len(page) for page in self._reserved)}

    def hang_up(self) -> dict[str, Any]:
        self._client.__exit__(None, None, None)
        return {}

    def fork(self) -> dict[str, Any]:
        ours, theirs = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=ours,
            stdout=subprocess.DEVNULL,
            pass_fds=[self._client.socket.fileno()],
        )
        os.close(ours)
        os.set_inheritable(theirs, False)  # the pipe closes with this process, and the child ends
        threading.Thread(target=child.wait, daemon=True).start()
        return {"pid": child.pid}

    @property
    def session(self) -> int:
        return int(self._client.hello["session"])


def main() -> None:
    """Runs commands until its input ends."""
    strings = Strings(sys.argv[1])
    print(json.dumps({"session": strings.session}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(strings, command.pop("verb"))(**command)), flush=True)


if __name__ == "__main__":
    main()
