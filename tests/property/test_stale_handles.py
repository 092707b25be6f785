"""What was given back is never good again: old handles, leases, reservations, commits, transfers and namespaces, presented to a core that goes on."""

from __future__ import annotations

import os
import time

import pytest
from stale import Churn

from tests.depth import count, report

REUSES = count(test=16_000, nightly=900_000, weekly=9_000_000)
"""Pages given again; test_handles.py in tests/system does the rest through a daemon."""


def churned(seed: int, reuses: int) -> Churn:
    """A core after so many pages were given again and four restarts; nothing old was accepted on the way."""
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
    """However often its page has been given again, no old handle, number or verdict is taken for good, after restarts of the core neither."""
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
    """Where more has come since the next table of names was made, it is made anew: it had no room for all, and this seed's puts no end."""
    churned(719688, 16_000)
