"""The part of `make gpu` under compute-sanitizer: how it reads the tool's output, and its own program."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.repo.source import ROOT
from tests.unit.kernels.fake_driver import fake_environment
from tools.fake_cuda import build_fatbins
from tools.gpu import sanitizing
from tools.gpu.bench import Bench
from tools.gpu.results import Check, Left, Result

STAND_IN = """#!/bin/sh
# {what}
echo "========= COMPUTE-SANITIZER"
{says}
"""
CLEAN = 'echo "3 cases"; echo "========= ERROR SUMMARY: 0 errors"'
RACES = (
    'echo "========= Error: Race reported between Write access at decode and Read access"\n'
    'echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 1'
)


def told(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str | None, *, seconds: float = 60) -> dict[str, Result]:
    """The part's results with this script as compute-sanitizer; None: the tool is missing."""
    monkeypatch.setattr(sanitizing, "HOMES", ())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    if says is not None:
        path = folder / sanitizing.TOOL
        path.write_text(STAND_IN.format(what="stands in for NVIDIA's", says=says))
        path.chmod(0o755)
    return {result.name: result for result in sanitizing.results(Bench(Path(), time.monotonic() + seconds))}


def test_without_the_tool_its_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is skipped with the reason and the tool's origin."""
    found = told(tmp_path, monkeypatch, None)
    assert list(found) == [f"sanitizer_{check}" for check in ("memcheck", "racecheck", "synccheck")]
    assert all(isinstance(each, Left) and "it comes with a CUDA toolkit" in each.said for each in found.values())


@pytest.mark.parametrize(
    ("says", "kind", "said"),
    [
        (CLEAN, Check(name="", passed=True, said=""), "3 cases"),
        (RACES, Check(name="", passed=False, said=""), "Race reported between Write access at decode"),
        (CLEAN + "; exit 1", Check(name="", passed=False, said=""), "0 errors"),
        ('echo "========= Error: Device not supported"; exit 1', Left("", ""), "Device not supported"),
    ],
    ids=["clean", "races", "wrong results", "unsupported"],
)
def test_what_the_tool_says_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, kind: Result, said: str
) -> None:
    """No error and right results pass. Errors, or wrong results without one, fail with the tool's
    words. A tool that does not work here is skipped."""
    for each in told(tmp_path, monkeypatch, says).values():
        assert type(each) is type(kind)
        assert said in each.said
        assert not isinstance(each, Check) or not isinstance(kind, Check) or each.passed == kind.passed


def test_a_tool_that_does_not_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is stopped at its share of the part's time."""
    monkeypatch.setattr(sanitizing, "LEAST_S", 0)
    for each in told(tmp_path, monkeypatch, "exec sleep 600", seconds=1).values():
        assert isinstance(each, Left)
        assert "not through after" in each.said or "no time" in each.said


@pytest.mark.slow
def test_its_cases_are_right_on_the_fake_driver() -> None:
    """The program under inspection gives right results by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.sanitized", str(build_fatbins())],
        cwd=ROOT,
        env=fake_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("cases\n")
