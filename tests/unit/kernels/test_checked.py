"""The kernels of a checked build: wrong arguments end the launch with row and page, right ones pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compilers import skip_without
from tests.repo.source import ROOT
from tests.unit.kernels.checked_cases import MISTAKES
from tools.kernels import MissingTool, build_emulator

ENDED = 97
"""The emulator's exit code when it ends a process."""
LIMIT_S = 600
UNITS = ["pages", *(pytest.param(unit, marks=pytest.mark.slow) for unit in ("sparse", "decode", "prefill"))]
"""A compiler takes up to half a minute for each of the last three."""


def checked(unit: str) -> Path:
    """The library of one source file. Skips if there is no compiler."""
    try:
        return build_emulator("checked", dims=[64], units=[unit])
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


def run(module: str, *given: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of the tests to its end."""
    command = [sys.executable, "-m", f"tests.unit.kernels.{module}", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("unit", UNITS)
def test_mistakes_are_named(unit: str) -> None:
    """Wrong page ids, slots, lengths and chosen pages end the launch with row, page, value and limit."""
    library = checked(unit)
    mistakes = {name: mistake for name, mistake in MISTAKES.items() if mistake.unit == unit}
    assert mistakes
    for name, mistake in mistakes.items():
        done = run("checked_cases", str(library), name)
        assert done.returncode == ENDED, f"{name}: {done.stdout}{done.stderr}"
        assert mistake.said in done.stderr, name


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_right_passes(unit: str) -> None:
    """The small cases of a source file have the same results in a checked build as in any."""
    done = run("small_cases", str(checked(unit)), "--unit", unit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
