"""A part's settings: the kernels' folder, its size, its deadline, and its own processes.

Invariants: a process that a part starts ends with the part.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.gpu.device import Gpu

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 10


@dataclass(frozen=True, slots=True)
class Bench:
    """until: the part's deadline, of time.monotonic. is_small: sizes for the emulator; no figure
    counts."""

    fatbins: Path
    until: float
    is_small: bool = False

    def gpu(self, *, with_kernels: bool = True) -> Gpu:
        """The GPU, in this process."""
        return Gpu(self.fatbins, with_kernels=with_kernels)

    def pick(self, full: T, small: T) -> T:
        """The value for the size of the run."""
        return small if self.is_small else full

    def has_time(self, seconds: float = 0) -> bool:
        """Whether this much time remains."""
        return time.monotonic() + seconds < self.until

    @contextmanager
    def process(self, module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
        """A module of this package as a process that reports by lines. It is killed at the end."""
        with started(module, *arguments, pass_fds=pass_fds) as child:
            try:
                yield child
            finally:
                end(child)


def started(module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Starts the process. The caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tools.gpu.{module}", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=pass_fds,
    )


def end(child: subprocess.Popen[str]) -> None:
    """Kills it. If the driver does not release it, the process remains."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe:
            with suppress(OSError):
                pipe.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(PATIENCE_S)
