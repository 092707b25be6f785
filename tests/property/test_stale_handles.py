"""A running core refuses handles, leases, reservations, commits, transfers and namespaces of
old."""

from __future__ import annotations

import os
import time

import pytest
from stale import Churn

from tests.depth import count, report

REUSES = count(test=16_000, nightly=900_000, weekly=9_000_000)
"""Number of page reuses; test_handles.py in tests/system tests the rest through a daemon."""


def churned(seed: int, reuses: int) -> Churn:
    """A core after so many page reuses and four restarts; it accepted no old handle."""
    churn, next_restart = Churn(seed), reuses // 4
    while churn.reuses < reuses:
        churn.turn()
        if churn.turns % 8 == 0:
            assert churn.accepted() == []
        if churn.reuses >= next_restart:
            churn.restart()
            assert churn.accepted() == []
            churn.core.check()
            next_restart += max(reuses // 4, 1)
    return churn


@pytest.mark.timeout(3600)
def test_nothing_old_is_accepted() -> None:
    """No old handle, number or verdict is accepted after any reuse of its page or any restart."""
    seed = int(os.environ.get("HANDLES_SEED", time.time_ns() % 1_000_000))
    print(f"HANDLES_SEED={seed}")
    begun = time.monotonic()
    churn = churned(seed, REUSES)
    assert all(churn.presented.values()), churn.presented
    report(
        "stale handles, core",
        seed=seed,
        reuses=churn.reuses,
        accepted=0,
        **churn.presented,
        seconds=round(time.monotonic() - begun, 1),
    )


def test_a_next_table_that_was_made_for_fewer() -> None:
    """An outgrown next table of names is rebuilt; without that, this seed's put never ends."""
    churned(719688, 16_000)
