"""The kernels under AddressSanitizer and ThreadSanitizer, which only sees barriers as thread order."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.compilers import skip_without
from tests.depth import count
from tests.unit.kernels.small_cases import UNITS
from tools.kernels import MissingTool, build_emulator, sanitized_environment

ORDERS = ("2", "1")
"""Orders of threads. Every commit runs the first."""
SANITIZERS = ("address", "thread")
QUICK = [(sanitizer, "read", 64) for sanitizer in SANITIZERS]
"""nvcc and g++ compile `read` in seconds. They take half a minute or a minute for each other unit."""
SLOW = [
    *product(SANITIZERS, sorted({*UNITS} - {"read"}), [64]),
    *product(SANITIZERS, ("decode", "prefill"), [256]),
]
LIMIT_S = 1500
"""Wall time: ten times the two minutes that a case takes at most, since other tests run beside it."""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("sanitizer", "unit", "head_dim"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_sanitizers_find_nothing(sanitizer: str, unit: str, head_dim: int) -> None:
    """The small cases of a source file have no races and no accesses out of bounds, in any thread order."""
    try:
        built = build_emulator(sanitizer, dims=[head_dim], units=[unit])
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")
    done = sanitized(built, sanitizer, "--unit", unit, "--head-dim", str(head_dim))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all right" in done.stdout


def sanitized(built: Path, sanitizer: str, *chosen: str) -> subprocess.CompletedProcess[str]:
    """Runs the cases in a process that loads the sanitizer first."""
    orders = ",".join(ORDERS[: count(test=1, nightly=2, weekly=2)])
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.small_cases", str(built), *chosen, "--orders", orders],
        env=sanitized_environment(sanitizer),
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
