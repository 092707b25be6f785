"""Shared by all tests: the files to begin first, depth of property tests, place of development
traces."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import DEPTH, count

# As in the programs; and tests run in as many processes as there are cores. numpy reads it on import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

LONGEST_FIRST = (
    "system/test_fuzz_rpc.py",
    "property/test_core_machine.py",
    "system/test_errno.py",
    "system/test_errno_buffered.py",
    "system/test_failpoints.py",
    "system/test_crash.py",
    "system/test_soak.py",
    "system/test_replay.py",
    "system/test_flips.py",
    "system/test_client_deaths.py",
    "system/test_races.py",
    "system/test_power_loss.py",
    "system/test_overload.py",
    "system/test_restart_live.py",
    "sim/test_simulation.py",
    "tiers/test_fuzz_decoders.py",
    "tiers/test_flips.py",
    "sim/test_crash_states.py",
    "server/test_damage.py",
    "system/test_fuzz_session.py",
    "property/test_stale_handles.py",
    "system/test_handles.py",
    "system/test_hung.py",
    "system/test_threats.py",
    "system/test_fsck.py",
    "system/test_restart_sizes.py",
    "sim/test_trace_lru.py",
    "sim/test_notices.py",
    "cache/test_scrub.py",
    "tiers/test_misplaced.py",
    "system/test_worker_pages.py",
    "system/test_scrub.py",
    "system/test_image.py",
    "system/test_install.py",
)
"""Files that take a minute or more of a night. If one begins late, a core idles at the run's end."""
SLOW_STEPS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "quick",
    max_examples=25,
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files run first; a file's tests stay together and in order."""
    turns = {name: turn for turn, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: turns.get(f"{item.path.parent.name}/{item.path.name}", len(turns)))


def pytest_collection_finish() -> None:
    """Freezes the objects that collection made. Else each search for garbage would visit a million
    of them, and some tests make forty searches."""
    gc.freeze()
