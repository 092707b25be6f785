"""Measurement of a suite: works take turns within a run; wall and processor time of both processes."""

from __future__ import annotations

import itertools
import select
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
COLD_BYTES = 384 * MIB
"""More than caches hold: bytes read this long ago are evicted."""
_SCHED = 2  # CPUCLOCK_SCHED of the kernel's posix-timers.h

Work = Callable[[int], Callable[[], object]]
"""Prepares run number n and returns the timed call."""


@dataclass(frozen=True, slots=True)
class Effort:
    """A suite's size. runs: at least this many of each work. is_tiny: only to check that it works."""

    runs: int = 9
    is_tiny: bool = False

    def pick(self, full: T, tiny: T) -> T:
        """One of two sizes."""
        return tiny if self.is_tiny else full

    def at_least(self, runs: int) -> int:
        """Runs of a short work, which needs more of them."""
        return self.runs if self.is_tiny else max(self.runs, runs)


FULL, TINY = Effort(), Effort(runs=2, is_tiny=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one work by the clock, and by the processor for this process and the daemon."""

    wall_s: float
    cpu_s: float


Measure = Callable[[int], Cost]
"""Does run number n, here or in another process, and returns its cost."""


def family(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its children, all threads, to the nanosecond."""
    return sum(time.clock_gettime(~member << 3 | _SCHED) for member in family(pid))


def cost_of(work: Callable[[], object], *, pid: int | None = None) -> Cost:
    """Of one call. pid: the daemon's, whose share is counted too."""
    before = time.process_time() + (cpu_s(pid) if pid else 0.0)
    begun = time.perf_counter()
    work()
    wall_s = time.perf_counter() - begun
    return Cost(wall_s, time.process_time() + (cpu_s(pid) if pid else 0.0) - before)


def measured(work: Work, *, pid: int | None = None, then: Callable[[int], object] | None = None) -> Measure:
    """A work timed in this process. then: is called with the run's number afterwards, untimed."""

    def measure(number: int) -> Cost:
        cost = cost_of(work(number), pid=pid)
        if then is not None:
            then(number)
        return cost

    return measure


def interleaved(
    works: Mapping[str, Work], *, runs: int, warm: int = 2, pid: int | None = None
) -> dict[str, list[Cost]]:
    """Costs of each work, run by run, as `take_turns` returns them."""
    return take_turns({name: measured(work, pid=pid) for name, work in works.items()}, runs=runs, warm=warm)


def take_turns(measures: Mapping[str, Measure], *, runs: int, warm: int = 2, first: int = 0) -> dict[str, list[Cost]]:
    """Costs of each measure, run by run; runs are numbered from `first` on.

    Within a run the measures take turns. Each run begins with another one, so that none always
    follows the same one. The first `warm` runs do not count.
    """
    names = list(measures)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(first, first + warm + runs):
        begin = number % len(names)
        for name in names[begin:] + names[:begin]:
            cost = measures[name](number)
            if number >= first + warm:
                costs[name].append(cost)
    return costs


def rates(costs: Sequence[Cost], amount: float) -> list[float]:
    """Of an amount in each run: amount a second."""
    return [amount / cost.wall_s for cost in costs]


def cpus(costs: Sequence[Cost]) -> list[float]:
    """Processor seconds of each run."""
    return [cost.cpu_s for cost in costs]


def medians(values: Sequence[float], *, of: int) -> list[float]:
    """The median of each `of` consecutive values."""
    return [statistics.median(values[i : i + of]) for i in range(0, len(values), of)]


def line_of(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    """The next line that a process prints, without its end. Raises TimeoutError after timeout_s,
    EOFError if it has ended."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError(f"process {process.pid}: no line within {timeout_s:g} s; is the machine busy?")
    line = process.stdout.readline()
    if not line:
        raise EOFError(f"process {process.pid}: ended before it was asked to; run its module by hand to see why")
    return line.rstrip("\n")


class Cold:
    """Gives out cold bytes in pieces."""

    def __init__(
        self,
        length_bytes: int = COLD_BYTES,
        *,
        memory: NDArray[np.uint8] | None = None,
        content: NDArray[np.uint8] | None = None,
    ) -> None:
        """memory: used instead of length_bytes of new memory. content: instead of random bytes."""
        self._bytes = np.empty(length_bytes, dtype=np.uint8) if memory is None else memory
        if content is None:
            content = np.random.default_rng(0).integers(0, 256, len(self._bytes), dtype=np.uint8)
        self._bytes[:] = np.resize(content, len(self._bytes))
        self._at = itertools.count()

    def blocks(self, count: int, block_bytes: int) -> NDArray[np.uint8]:
        """uint8 [count, block_bytes], the next ones."""
        size = count * block_bytes
        at = next(self._at) % (len(self._bytes) // size) * size
        return self._bytes[at : at + size].reshape(count, block_bytes)


class Sums:
    """The sum of each 4 KiB of the put bytes, by the number of their batch.

    A CRC detects order within these too, but takes five times as long between timed works.
    """

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.uint64]] = {}

    def note(self, number: int, blocks: NDArray[np.uint8]) -> None:
        """Keeps the sums of a batch, a multiple of 4 KiB."""
        self._sums[number] = _sums_of(blocks)

    def check(self, number: int, blocks: NDArray[np.uint8]) -> None:
        """Raises RuntimeError if a get returned other bytes."""
        if not np.array_equal(_sums_of(blocks), self._sums[number]):
            raise RuntimeError(f"batch {number} came back with other bytes")


def _sums_of(blocks: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """uint64 [4 KiB pieces], modulo 2^64."""
    words = blocks.reshape(-1).view(np.uint64).reshape(-1, 4 * KIB // 8)
    return np.asarray(np.add.reduce(words, axis=1), dtype=np.uint64)
