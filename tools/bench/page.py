"""The cost of watching: gets a second while two browsers read the web page and one scrape runs.

Both sides take turns in short slices, in either order. The readers are a process of their own:
`python -m tools.bench.page PORT` reads each address once a second, while its input says so.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from tierd.client import Client, NamespaceSpec
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, Effort, line_of
from tools.bench.rows import Row, row_of

BLOCKS, BROWSERS, EVERY_S = 32, 2, 1.0
CONFIG = """\
[server]
metrics_listen = "127.0.0.1:{port}"
page = true
[[host]]
capacity = "64 MiB"
[[nvme]]
path = "{{root}}/nvme"
capacity = "64 MiB"
"""


class Readers:
    """The process of the readers; silent until `read`."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "tools.bench.page", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line_of(self._process, timeout_s=30.0)

    def read(self, *, wanted: bool) -> None:
        """Reads from now on, or no more; returns when the readers have begun or ended."""
        assert self._process.stdin
        print("read" if wanted else "rest", file=self._process.stdin, flush=True)
        line_of(self._process, timeout_s=30.0)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=30.0)


def rows(effort: Effort = FULL) -> list[Row]:
    """`page_gets`: gets a second while the page is open, against those while it is not."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    slice_s = effort.pick(2.0, 0.02)
    sides: tuple[list[float], list[float]] = ([], [])
    with Daemon(CONFIG.format(port=port)) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(NamespaceSpec(model="bench", tokens_per_block=16, block_bytes=4 * KIB))
        client.put(space, chain(0, BLOCKS), [bytes(4 * KIB)] * BLOCKS)

        def rate() -> float:
            begun, done = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begun) < slice_s:
                with client.acquire(space, chain(0, BLOCKS)) as lease:
                    assert len(lease.handles) == BLOCKS
                done += 1
            return done / elapsed

        rate()
        readers = Readers(port)
        for number in range(2 * effort.at_least(13)):
            is_open = number % 4 in (0, 3)
            readers.read(wanted=is_open)
            sides[is_open].append(rate())
        readers.close()
    meaning = (
        f"acquires of {BLOCKS} blocks beside {BROWSERS} open pages and a scrape each second, against those without"
    )
    return [row_of("page_gets", sides[True], unit="1/s", limits=sides[False], meaning=meaning)]


def _read(port: int) -> None:
    """Reads as two browsers and a Prometheus do, while the input's last line is `read`."""
    wanted, base = threading.Event(), f"http://127.0.0.1:{port}"

    def get(path: str) -> bytes:
        with urllib.request.urlopen(base + path, timeout=10) as reply:  # noqa: S310  # loopback
            return bytes(reply.read())

    def browse() -> None:
        have = {"run": "", "since": 0, "walk": 0}
        while True:
            wanted.wait()
            told = json.loads(get("/page.json?" + "&".join(f"{name}={value}" for name, value in have.items())))
            have |= {"run": told["run"], "since": told["last"]} | (
                {"walk": told["walk"]["number"]} if told["walk"] else {}
            )
            time.sleep(EVERY_S)

    def scrape() -> None:
        while True:
            wanted.wait()
            assert b"tierd_info" in get("/metrics")
            time.sleep(EVERY_S)

    for work in (*[browse] * BROWSERS, scrape):
        threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        (wanted.set if line.strip() == "read" else wanted.clear)()
        print("done", flush=True)


if __name__ == "__main__":
    _read(int(sys.argv[1]))
