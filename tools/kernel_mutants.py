"""Mutants of the kernels: `python -m tools.kernel_mutants [--only NAME] [--list]`.

Each row of `kernel_faults.MUTANTS` is one small change to a copy of cuda/. It removes a barrier, a
wait or a mask, or shifts an index by one. The copy is built for the CPU and one head dim, as many
at a time as there are cores. The changed source's small cases run in four orders of threads. If all
numbers are right, they run under ThreadSanitizer, which knows only barriers as order. Large batches
and pages far apart run without it only. A table names the check that caught each mutant. Exit
status: 1 if a mutant survived, 2 if one could not be tried. Purpose: proof that the tests detect
such a fault. Non-purpose: a search for places to change. Invariant: the working tree is only read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.kernel_faults import MUTANTS, Mutant
from tools.kernels import ROOT, SOURCES, CompilerError, build_emulator, sanitized_environment
from tools.mutate.command import NOT_TRIED, SURVIVED, choose

HEAD_DIM = 64
ORDERS = {"": "0,1,2,3", "thread": "1,2"}
"""Orders of threads, by sanitizer."""
CPU_LIMIT_S, TIMEOUT_S = {"": 60, "thread": 600}, 3600.0
"""CPU time of the small cases, many times their need without a mutant. So a hang is caught on a
busy machine too. Under ThreadSanitizer the kernel uses most of it, to give each fiber its memory."""


class Copy:
    """A copy of the sources, for one mutant or none. Its builds are deleted with it."""

    def __init__(self, place: Path, mutant: Mutant | None = None) -> None:
        self._sources, self._built = place / "cuda", place / "built"
        shutil.copytree(SOURCES, self._sources)
        if mutant:
            path = self._sources / "src" / mutant.file
            path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")

    def find_fault(self, unit: str, sanitizer: str) -> str | None:
        """The fault that the small cases of a source file report; None if there is none."""
        library = build_emulator(sanitizer, dims=[HEAD_DIM], units=[unit], sources=self._sources, into=self._built)
        command = [sys.executable, "-m", "tests.unit.kernels.small_cases", str(library), "--unit", unit]
        done = subprocess.run(
            [*command, "--orders", ORDERS[sanitizer], "--cpu-limit-s", str(CPU_LIMIT_S[sanitizer])]
            + ["--beyond"] * (not sanitizer),
            env=sanitized_environment(sanitizer),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return _said(done, CPU_LIMIT_S[sanitizer]) if done.returncode else None


def _said(done: subprocess.CompletedProcess[str], limit_s: int) -> str:
    """One line of a failed process's output."""
    if done.returncode == -signal.SIGKILL:
        return f"it hangs: no end after {limit_s} s"
    lines = [line for line in done.stderr.splitlines() if line.startswith(("simt:", "SUMMARY: "))]
    return (lines or done.stdout.splitlines() or [f"the process ends with {done.returncode}"])[0].removeprefix(
        "SUMMARY: "
    )[:110]


def verdict(mutant: Mutant) -> tuple[str, int]:
    """The table's text for a mutant, and the exit status that follows from it."""
    if not mutant.is_there(SOURCES):
        return f"NOT TRIED: its text is not in {mutant.file} once", NOT_TRIED
    with tempfile.TemporaryDirectory(prefix="tierd-kernels-") as place:
        copy = Copy(Path(place), mutant)
        try:
            caught = copy.find_fault(mutant.unit, "") or copy.find_fault(mutant.unit, "thread")
        except CompilerError as error:
            return f"NOT TRIED: {error}", NOT_TRIED
    return (caught, 0) if caught else ("SURVIVED", SURVIVED)


def unmutated(unit: str, sanitizer: str) -> tuple[str, int]:
    """Runs the same cases on the unchanged sources: a mutant counts only if they pass."""
    with tempfile.TemporaryDirectory(prefix="tierd-kernels-") as place:
        fault = Copy(Path(place)).find_fault(unit, sanitizer)
    return (f"NOT TRIED: the cases fail without a mutant: {fault}", NOT_TRIED) if fault else ("all right", 0)


def main() -> int:
    """The exit status."""
    chosen = choose(MUTANTS, "Breaks kernels and shows what notices.")
    begun = time.monotonic()
    bare = [(unit, sanitizer) for unit in sorted({mutant.unit for mutant in chosen}) for sanitizer in ORDERS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        names = [f"({' '.join(one).rstrip()})" for one in bare]
        worst = told(names, pool.map(lambda one: unmutated(*one), bare))
        if not worst:
            worst = told([mutant.name for mutant in chosen], pool.map(verdict, chosen))
    print(f"{len(chosen)} mutants in {time.monotonic() - begun:.0f} s")
    return worst


def told(names: Sequence[str], said: Iterable[tuple[str, int]]) -> int:
    """Prints each line as it comes. Returns the worst status."""
    worst = 0
    for name, (line, status) in zip(names, said, strict=True):
        print(f"{name:22} {line}", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
