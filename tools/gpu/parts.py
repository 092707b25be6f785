"""The parts of `make gpu`, each a separate process: one that hangs is killed at its bound.

A part that loses the GPU's context does not stop the others. Purpose: `PARTS`; `results_of`, in the
process that runs them; `main`, in each part's process: `python -m tools.gpu.parts NAME MODULE
DESCRIPTOR ...`. Non-purpose: a part's work. Invariants: the caller gets a result as soon as the
part has it. A part and its children outlive its bound only by the time that the kernel needs to end
them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import TierdError
from tierd.kernels.loaded import FATBINS
from tools.gpu.bench import ROOT, Bench
from tools.gpu.results import Check, Result, line_of, result_of

TOTAL_S = 475
"""Of all parts, so that all end within eight minutes."""
GRACE_S = 5
"""Between a part's deadline and its kill."""
LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """module: has `results(bench)`. bound_s: seconds until the part is killed."""

    name: str
    module: str
    bound_s: int


PARTS = (
    Part("register", "tools.gpu.registering", 20),
    Part("deaths", "tools.gpu.deaths", 45),
    Part("bounds", "tools.gpu.bounds", 15),
    Part("decodes", "tools.gpu.decodes", 25),
    Part("prefills", "tools.gpu.prefills", 20),
    Part("pages", "tools.gpu.pages", 20),
    Part("decode", "tools.gpu.decode", 50),
    Part("kernels", "tools.gpu.kernels", 25),
    Part("graphs", "tools.gpu.graphs", 20),
    Part("link", "tools.gpu.link", 25),
    Part("process", "tools.gpu.process", 20),
    Part("sharing", "tools.gpu.sharing", 25),
    Part("direct", "tools.gpu.direct", 15),
    Part("rotated", "tools.gpu.rotated", 25),
    Part("sparse", "tools.gpu.sparse", 15),
    Part("endtoend", "tools.gpu.endtoend", 45),
    Part("rivals", "tools.gpu.rivals", 30),
    Part("sanitizers", "tools.gpu.sanitizing", 35),
)


def results_of(part: Part, *, fatbins: Path, is_small: bool, bound_s: float) -> Iterator[Result]:
    """The part's results, as they come; if it does not end well, a failed check under its own name."""
    ours, theirs = os.pipe()
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tools.gpu.parts",
            part.name,
            part.module,
            str(theirs),
            f"--fatbins={fatbins}",
            f"--bound={bound_s}",
        ]
        + ["--small"] * is_small,
        cwd=ROOT,
        pass_fds=[theirs],
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield from _lines(ours, until=time.monotonic() + bound_s)
        status = child.wait(GRACE_S)
        if status:
            yield Check(f"part_{part.name}", passed=False, said=f"its process ended with {status}")
    except TimeoutError:
        yield Check(f"part_{part.name}", passed=False, said=f"not through after {bound_s:.0f} s, and killed")
    except subprocess.TimeoutExpired:
        yield Check(f"part_{part.name}", passed=False, said="did not end")
    finally:
        os.close(ours)
        _end(child)


def _lines(descriptor: int, *, until: float) -> Iterator[Result]:
    """Results until the pipe closes. Raises TimeoutError."""
    held = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        told = os.read(descriptor, LINE_BYTES)
        if not told:
            return
        *whole, held = (held + told).split(b"\n")
        yield from map(result_of, whole)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills it and all its children."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)


def main() -> int:
    """Runs one part; reports an error like a result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("module")
    parser.add_argument("descriptor", type=int)
    parser.add_argument("--fatbins", type=Path, default=FATBINS)
    parser.add_argument("--bound", type=float, default=TOTAL_S)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.fatbins, time.monotonic() + given.bound - GRACE_S, is_small=given.small)
    try:
        for result in importlib.import_module(given.module).results(bench):
            os.write(given.descriptor, line_of(result))
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is told, and the other parts run
        if not isinstance(error, TierdError):
            traceback.print_exc()
        os.write(
            given.descriptor,
            line_of(Check(f"part_{given.name}", passed=False, said=f"{type(error).__name__}: {error}"[:2000])),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
