"""The compiled loops: clean under sanitizers, and optional at install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import NO_COMPILER
from tests.repo.source import ROOT
from tools.native import OPTIONS, compile_native, find_compiler

SANITIZED = (*OPTIONS, "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUN = """
import sys
from pathlib import Path
import tierd.native
tierd.native.LIBRARIES = Path(sys.argv[1])
assert tierd.native.find_library("plane") is not None and tierd.native.find_library("codecs") is not None
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_loops_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """The library touches only its own bytes and has no undefined behaviour, for any input."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip(NO_COMPILER)
    probe = subprocess.run(
        [compiler, *SANITIZED, "-x", "c++", "-", "-o", str(tmp_path / "probe.so")],
        input="int probe() { return 0; }",
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"{compiler} has no address and undefined-behaviour sanitizers: {probe.stderr}")
    assert compile_native(tmp_path, options=SANITIZED) == ""
    asan = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    tests = ["tests/unit/client/blocks/test_copying.py", "tests/unit/client/blocks/test_one_sided_get.py"]
    tests += ["tests/unit/codecs/test_loops.py", "tests/unit/codecs/test_rans.py", "tests/unit/codecs/test_crafted.py"]
    tests += ["tests/unit/codecs/test_product.py", "tests/unit/codecs/test_transform.py"]
    tests += ["tests/unit/tiers/io/test_pieces.py"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *tests],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("compiler", ["", "/nowhere/c++", "false"], ids=["none", "not there", "fails"])
def test_without_a_compiler_it_says_so(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without a working compiler continues, and reports the cost and the remedy."""
    monkeypatch.setattr("tools.native.COMPILERS", ())
    monkeypatch.setenv("CXX", compiler)
    said = compile_native(tmp_path)
    assert (
        said.startswith("tierd: ") and "copies are made by Python's own means" in said and "codecs run in numpy" in said
    )
    assert list(tmp_path.iterdir()) == []
