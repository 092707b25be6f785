"""Loss of gets while the daemon demotes, beyond the cost of any writer to the disk.

A burst of puts passes the high watermark. The daemon writes the coldest blocks to its store while
gets of others continue; those that end meanwhile count. The limit is the same gets beside a process
with as many raw O_DIRECT writes at the same pace. Both share bandwidth of memory and disk.

    python -m tools.bench.demotion DIRECTORY PIECE_BYTES      that process
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
"""The longest time to write one burst."""
LOOK_S, QUIET_S = 0.01, 0.15
"""LOOK_S: between two looks at the bytes written. QUIET_S: without any, the writing has ended."""
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
    """A client of a daemon with a few hot batches. burst: blocks of a burst; written: bytes so far
    in the store."""

    def __init__(self, client: Client, *, block_bytes: int, burst: int, written: Callable[[], int]) -> None:
        self._client, self._block_bytes, self._burst, self._written = client, block_bytes, burst, written
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

    def gets(self, is_over: Callable[[], bool]) -> Gets:
        """Gets until it is over: at least one, for at most 2 * LIMIT_S."""
        moments = [time.perf_counter()]
        while len(moments) == 1 or not (is_over() or moments[-1] - moments[0] > 2 * LIMIT_S):
            self.get(len(moments))
            moments.append(time.perf_counter())
        return Gets(moments, self._target.nbytes)

    def put_burst(self) -> None:
        """Puts a burst of new blocks; the daemon will write as many."""
        for _ in range(self._burst // COUNT):
            self._bursts += 1
            self._client.put(self._space, chain(1000 + self._bursts, COUNT), list(self._blocks))

    def demote(self) -> Demoted:
        """Gets while the daemon writes the blocks above the watermark."""
        earlier = self._written()
        self.put_burst()
        before, looks = self._written(), Looks(self._written)
        watcher = threading.Thread(target=looks.until_quiet, args=(earlier,))
        watcher.start()
        gets = self.gets(looks.are_over.is_set)
        watcher.join()
        if looks.seen == earlier:
            raise RuntimeError(f"demotion: nothing was written within {LIMIT_S:g} s of a burst above the watermark")
        return Demoted(gets.rate(until=looks.changed_s), looks.seen - before, looks.changed_s - gets.moments[0])


def disk_bytes_of(pid: int) -> int:
    """Bytes that a process has written to disks so far. The kernel counts, so a daemon has no work."""
    told = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(told["write_bytes"])


def store_bytes_of(operator: Connection) -> int:
    """Bytes that a daemon reports as written to its store."""
    return int(operator.ask(pb.TiersRequest()).tiers[1].bytes_written)


def is_disk(directory: Path) -> bool:
    """Whether the kernel counts writes to the directory; for a tmpfs it does not."""
    before = disk_bytes_of(os.getpid())
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(4 * KIB))
        os.fsync(file.fileno())
    return disk_bytes_of(os.getpid()) > before


@dataclass(frozen=True, slots=True)
class Gets:
    """moments: the begin, and the end of each, of time.perf_counter(). size: bytes of each."""

    moments: Sequence[float]
    size: int

    def rate(self, *, until: float = math.inf) -> float:
        """GB/s of those that ended by then; of one at least."""
        ended = max(1, bisect_right(self.moments, until) - 1)
        return ended * self.size / (self.moments[ended] - self.moments[0]) / 1e9


class Looks:
    """Watches a growing number. seen: its last value; changed_s: the time of its last seen change."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self.are_over = threading.Event()
        self.seen, self.changed_s = -1, time.perf_counter()

    def until_quiet(self, earlier: int) -> None:
        """Looks until it differs from `earlier` and stays the same for QUIET_S; at most LIMIT_S."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < LIMIT_S:
            if (now := self._look()) != self.seen:
                self.seen, self.changed_s = now, time.perf_counter()
            elif now != earlier and time.perf_counter() - self.changed_s > QUIET_S:
                break
            self.are_over.wait(LOOK_S)
        self.are_over.set()


@dataclass(frozen=True, slots=True)
class Demoted:
    """gets: GB/s while written_bytes were written in `seconds`."""

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
        """Writes as many bytes in as much time; sets the event when it is done."""
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
    """The writer's side: reads a line of bytes and seconds, and prints a line at the end of each."""
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
    config = CONFIG.format(capacity=capacity, segment=max(1, capacity // 32), nvme=2 * capacity)
    with Daemon(config) as daemon, Client(daemon.target, timeout_s=60) as client, connect(daemon.target) as operator:
        burst = capacity * MIB // 2 // block_bytes
        root, pid = Path(daemon.root), daemon.pid
        written = partial(disk_bytes_of, pid) if is_disk(root) else partial(store_bytes_of, operator)
        bench = Bench(client, block_bytes=block_bytes, burst=burst, written=written)
        for _ in range(4):  # fills the tier, and writes to the store
            bench.demote()
        values, limits, paces = list[float](), list[float](), list[float]()
        with Writer(root, piece_bytes=block_bytes) as writer:
            for _ in range(effort.runs):
                demoted = bench.demote()
                values.append(demoted.gets)
                paces.append(demoted.written_bytes / demoted.seconds / 1e9)
                limits.append(bench.gets(writer.write(demoted).is_set).rate())
    pace = statistics.median(paces)
    meaning = (
        f"2 MiB x 16 while the daemon demotes {pace:.2f} GB/s, against the same beside raw O_DIRECT writes at that pace"
    )
    return [row_of("get_while_demoting", values, unit="GB/s", limits=limits, meaning=meaning)]


if __name__ == "__main__":
    write_as_asked(Path(sys.argv[1]), int(sys.argv[2]))
