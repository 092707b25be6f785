"""What all tests share: how long property tests search, and where the development traces lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import DEPTH, count

SLOW_STEPS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "quick",
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same examples on every run: a red `make test` is red for everybody
    suppress_health_check=SLOW_STEPS,
)
settings.register_profile(
    "nightly",
    max_examples=count(nightly=400, weekly=4000),  # of the core's machine about one a second
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW_STEPS,
)
settings.load_profile("quick" if DEPTH == "test" else "nightly")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of development material beside the checkout; without it the test is skipped."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("../shared (development traces) is not beside this checkout")
    return path
