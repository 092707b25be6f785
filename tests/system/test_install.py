"""A wheel and an sdist, each installed by pip into a clean environment with its dependencies alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.documented import ROOT
from tierd.cli.man import pages
from tools.native import LIBRARIES, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Run = Callable[..., str]


@pytest.fixture(params=["wheel", "sdist"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a program of a new environment that has only tierd and its dependencies, outside this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def ran(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=1800
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    build = [sys.executable, "-m", "hatchling", "build", "--target", request.param, "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    (made,) = tmp_path.glob("tierd-*")
    ran(sys.executable, "-m", "venv", "env")
    # Asked for a package that every index has: a requirement of ours that nobody offers must fail.
    asked = ["env/bin/pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", "asked", "packaging"]
    reached = subprocess.run(
        asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    if reached.returncode:
        pytest.skip(f"no package index here: {reached.stderr[-300:]}")
    ran("env/bin/pip", "install", "--quiet", str(made))
    return lambda program, *words: ran(f"env/bin/{program}", *words)


def test_a_clean_environment_has_all_that_runs(run: Run, tmp_path: Path) -> None:
    """Both programs, `tierctl doctor`, manual pages and the demo work with the base dependencies alone. If
    a compiler is here, so do the native loops."""
    assert [run(name, "--version").split()[0] for name in ("tierd", "tierctl")] == ["tierd", "tierctl"]
    (package,) = tmp_path.glob("env/lib/python3*/site-packages/tierd")
    built = {path.stem for path in (package / "native").glob("*.so")}
    assert built == set(LIBRARIES) or not find_compiler()
    assert not {"torch", "pytest"} & {path.name for path in package.parent.iterdir()}
    checks = json.loads(run("tierctl", "doctor", "--json"))["checks"]
    assert [row for row in checks if row["name"] == "versions" and row["status"] == "failure"] == []
    run("tierd", "man", "pages")
    assert {path.name for path in (tmp_path / "pages").iterdir()} == pages().keys()
    said = run("tierd", "demo")
    assert len([line for line in said.splitlines() if line.endswith("  yes")]) == 5
