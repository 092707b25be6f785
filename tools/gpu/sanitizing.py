"""A few cases of each kernel under NVIDIA's compute-sanitizer.

It detects bad addresses, races in shared memory, and barriers that not all threads reach.
Non-purpose: memory order between blocks, which no tool of it checks; cuda/README.md states it. If
the tool is missing or does not work, its rows are omitted with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.fatbins import HOMES
from tools.gpu.bench import ROOT, Bench
from tools.gpu.results import Check, Left, Result

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck", "synccheck")
LEAST_S = 5
"""The least time to start one of them."""
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*")
SAID = 3
"""Lines of its findings that a failed check prints."""


def results(bench: Bench) -> Iterator[Result]:
    """A check for each of its tools."""
    tool = find_tool()
    for i, check in enumerate(CHECKS):
        name, left_s = f"sanitizer_{check}", (bench.until - time.monotonic()) / (len(CHECKS) - i)
        if tool is None:
            yield Left(name, f"no {TOOL} on this machine; it comes with a CUDA toolkit, whose place CUDA_HOME tells")
        elif left_s < LEAST_S:
            yield Left(name, "no time was left")
        else:
            yield _checked(bench, tool, check, left_s)


def find_tool() -> Path | None:
    """Beside nvcc, or on the path of programs."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    on_path = shutil.which(TOOL)
    places = [*(home / "bin" / TOOL for home in (*homes, *HOMES)), *([Path(on_path)] if on_path else [])]
    return next((place for place in places if place.exists()), None)


def _checked(bench: Bench, tool: Path, check: str, bound_s: float) -> Result:
    name = f"sanitizer_{check}"
    program = [sys.executable, "-m", "tools.gpu.sanitized", str(bench.fatbins)]
    try:
        done = subprocess.run(
            [str(tool), "--tool", check, *program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=bound_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Left(name, f"not through after {bound_s:.0f} s")
    said = [line.removeprefix("=========").strip() for line in (done.stdout + done.stderr).splitlines()]
    summary = next((found for line in reversed(said) if (found := SUMMARY.search(line))), None)
    if summary is None:
        return Left(name, f"{TOOL} gave no summary: {next((line for line in reversed(said) if line), 'nothing')}")
    if int(summary[1]) == 0 and done.returncode == 0:
        return Check(name, passed=True, said=next(line for line in reversed(said) if line.endswith("cases")))
    found = [line for line in said if line and line.upper() != TOOL.upper()]
    return Check(name, passed=False, said="; ".join([summary[0], *found[:SAID]]))
