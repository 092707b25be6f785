"""What gets lose while the daemon demotes in the background, beyond what any writer to the disk would cost them.

A burst of puts passes the high watermark, and the daemon writes the coldest to its store while gets of others go on. The limit is the same gets beside a
process that writes as many bytes at the same pace with raw O_DIRECT: what the two cost alike is the shared bandwidth of memory and disk.

    python -m tools.bench.demotion DIRECTORY PIECE_BYTES      that process
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import Connection, connect
from tierd.client import Client, NamespaceSpec, OpenedNamespace
from tierd.testing import Daemon, chain
from tools.bench.measure import FULL, KIB, MIB, Effort, line_of
from tools.bench.raw_disk import RawFile
from tools.bench.rows import Row, row_of

HOT, COUNT = 8, 16
LIMIT_S = 20.0
"""The longest that one burst may take to be written."""
LOOK_S = 0.1
CONFIG = """\
[scrub]
period = "0 s"
[[host]]
capacity = "{capacity} MiB"
segment = "{segment} MiB"
high_watermark = 0.3
low_watermark = 0.25
eviction = "lru"
[[nvme]]
path = "{{root}}/store"
capacity = "{nvme} MiB"
segment = "{segment} MiB"
admission = "all"
eviction = "lru"
"""


class Bench:
    """A client of a daemon that holds a few hot batches. burst: blocks that are put at once."""

    def __init__(self, client: Client, operator: Connection, *, block_bytes: int, burst: int) -> None:
        self._client, self._operator, self._burst, self._block_bytes = client, operator, burst, block_bytes
        spec = NamespaceSpec(model="bench-demotion", tokens_per_block=16, block_bytes=block_bytes)
        self._space: OpenedNamespace = client.open_namespace(spec)
        self._blocks = np.random.default_rng(0).integers(0, 256, (COUNT, block_bytes), dtype=np.uint8)
        self._target = np.ones_like(self._blocks)
        self._bursts = 0
        for number in range(HOT):
            client.put(self._space, chain(number, COUNT), list(self._blocks))

    def get(self, number: int) -> None:
        """A hot batch, copied out."""
        hashes = chain(number % HOT, COUNT)
        assert self._client.get(self._space, hashes, out=list(self._target)).blocks == COUNT

    def rate(self, is_over: Callable[[], bool]) -> float:
        """GB/s of gets until it is so, one at least, at most for so long."""
        begun, done = time.perf_counter(), 0
        while done == 0 or not (is_over() or time.perf_counter() - begun > 2 * LIMIT_S):
            self.get(done)
            done += 1
        return done * self._target.nbytes / (time.perf_counter() - begun) / 1e9

    def put_burst(self) -> None:
        """So many new blocks, of which the daemon will write as many."""
        for _ in range(self._burst // COUNT):
            self._bursts += 1
            self._client.put(self._space, chain(1000 + self._bursts, COUNT), list(self._blocks))

    def written(self) -> int:
        """Bytes that the store was given so far."""
        return int(self._operator.ask(pb.TiersRequest()).tiers[1].bytes_written)

    def demote(self) -> Demoted:
        """Gets while the daemon writes what a burst has left above the watermark."""
        earlier = self.written()
        self.put_burst()
        before, begun, quiet = self.written(), time.perf_counter(), threading.Event()
        watcher = threading.Thread(target=self._await_quiet, args=(quiet, earlier))
        watcher.start()
        rate = self.rate(quiet.is_set)
        seconds = time.perf_counter() - begun
        watcher.join()
        written = self.written()
        if written == earlier:
            raise RuntimeError(f"demotion: nothing was written within {LIMIT_S:g} s of a burst above the watermark")
        return Demoted(rate, written - before, seconds)

    def _await_quiet(self, quiet: threading.Event, earlier: int) -> None:
        """Until something was written since, and two looks find that it is no more; at most so long."""
        seen, deadline = earlier, time.monotonic() + LIMIT_S
        while ((now := self.written()) == earlier or now != seen) and time.monotonic() < deadline:
            seen = now
            quiet.wait(LOOK_S)
        quiet.set()


@dataclass(frozen=True, slots=True)
class Demoted:
    """gets: GB/s while so many bytes were written in so many seconds."""

    gets: float
    written_bytes: int
    seconds: float


class Writer:
    """A process that writes to a raw file in a directory at a pace."""

    def __init__(self, directory: Path, *, piece_bytes: int) -> None:
        command = [sys.executable, "-m", "tools.bench.demotion", str(directory), str(piece_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line_of(self._process, timeout_s=2 * LIMIT_S)

    def write(self, demoted: Demoted) -> threading.Event:
        """As many bytes in as much time; the event is set when it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{demoted.written_bytes} {demoted.seconds}\n")
        self._process.stdin.flush()
        done = threading.Event()

        def wait() -> None:
            try:
                line_of(self._process, timeout_s=2 * LIMIT_S)
            finally:
                done.set()

        threading.Thread(target=wait).start()
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=LIMIT_S)


def write_as_asked(directory: Path, piece_bytes: int) -> None:
    """The writer's side: a line of bytes and seconds, and a line when they are over."""
    with RawFile(directory, length_bytes=16 * piece_bytes, piece_bytes=piece_bytes, count=4) as raw:
        raw.allocate()
        print("ready", flush=True)
        for line in sys.stdin:
            size, seconds = line.split()
            begun, batches = time.perf_counter(), int(size) // (4 * piece_bytes)
            for number in range(batches):
                time.sleep(max(0.0, begun + number / batches * float(seconds) - time.perf_counter()))
                raw.write()
            time.sleep(max(0.0, begun + float(seconds) - time.perf_counter()))
            print("done", flush=True)


def rows(effort: Effort = FULL) -> list[Row]:
    """`get_while_demoting`, GB/s."""
    block_bytes, capacity = effort.pick(2 * MIB, 16 * KIB), effort.pick(1024, 16)
    config = CONFIG.format(capacity=capacity, segment=capacity // 32, nvme=2 * capacity)
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=60) as client, connect(daemon.target) as operator:
        burst = capacity * MIB // 4 // block_bytes
        bench = Bench(client, operator, block_bytes=block_bytes, burst=burst)
        for _ in range(4):  # until the tier is full, and the store has been written to
            bench.demote()
        values, limits, paces = list[float](), list[float](), list[float]()
        with Writer(Path(daemon.root), piece_bytes=block_bytes) as writer:
            for _ in range(effort.runs):
                demoted = bench.demote()
                values.append(demoted.gets)
                paces.append(demoted.written_bytes / demoted.seconds / 1e9)
                limits.append(bench.rate(writer.write(demoted).is_set))
    pace = statistics.median(paces)
    meaning = (
        f"2 MiB x 16 while the daemon demotes {pace:.2f} GB/s, against the same beside raw O_DIRECT writes at that pace"
    )
    return [row_of("get_while_demoting", values, unit="GB/s", limits=limits, meaning=meaning)]


if __name__ == "__main__":
    write_as_asked(Path(sys.argv[1]), int(sys.argv[2]))
