"""Learned weights survive a restart, and a useless file is harmless."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.unit.core.kit import HOST, PAGE, chain, tier
from tierd.core.core import Core
from tierd.core.instant_driver import InstantDriver, Sequence
from tierd.policies.named import NamedPolicies
from tierd.policies.reuse.learner import Learner
from tierd.server.operators.learned import FILE, Learned, read_learner
from tierd.testing import Daemon


def taught(eviction: str = "reuse-index") -> NamedPolicies:
    """Policies of a core that has served some sessions with returns."""
    policies = NamedPolicies()
    driver = InstantDriver(
        Core([tier(HOST, 64, eviction=eviction)], policies=policies, session_share=1.0), tier_count=1
    )
    for now in range(300):
        hashes = chain(f"{now // 3}", 3 + now % 3)
        driver.request(Sequence(1, hashes, 16 * len(hashes), 16, PAGE), now=20.0 * now)
    return policies


def kept(policies: NamedPolicies, directory: Path) -> None:
    async def keep() -> None:
        learned = Learned(policies, directory)
        learned.start()
        await learned.stop()

    asyncio.run(keep())


def test_the_next_life_knows_what_this_one_learnt(tmp_path: Path) -> None:
    """A learner read from the file has exactly the saved worths, not those that ship."""
    policies = taught()
    assert policies.traffic is not None
    learner = policies.traffic.learner
    kept(policies, tmp_path)
    again = read_learner(tmp_path)
    assert again is not None
    learner.refit(7000.0)
    again.refit(7000.0)
    assert (again.worth == learner.worth).all()
    assert (again.worth != Learner().worth).any()


def test_a_policy_that_comes_later_is_kept_too(tmp_path: Path) -> None:
    """An operator chooses a policy that learns after the start: its learner is saved."""

    async def keep() -> None:
        policies = NamedPolicies()
        learned = Learned(policies, tmp_path)
        learned.start()
        policies.traffic = taught().traffic
        await learned.stop()

    asyncio.run(keep())
    assert read_learner(tmp_path) is not None


def test_nobody_learns_nothing_is_kept(tmp_path: Path) -> None:
    """Without a policy that learns there is no file."""
    kept(taught("lru"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert read_learner(tmp_path) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "pickle", "other"])
def test_a_file_of_no_use_is_said_and_left_out(tmp_path: Path, damage: str) -> None:
    """With a torn, damaged, foreign or old file the daemon logs a message and starts to learn again."""
    kept(taught(), tmp_path)
    path = tmp_path / FILE
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "flipped":
        raw[len(raw) // 3] ^= 255
        path.write_bytes(raw)
    elif damage == "text":
        path.write_text("not an archive")
    elif damage == "pickle":
        saved = io.BytesIO()
        np.save(saved, np.array([{}], object), allow_pickle=True)
        path.write_bytes(saved.getvalue())
    else:
        np.savez(path, used=np.zeros(3))
    with capture_logs() as logs:
        assert read_learner(tmp_path) is None
    assert [entry["event"] for entry in logs] == ["learned reuse state not loaded"]


def test_a_daemon_keeps_what_it_learnt() -> None:
    """A daemon with reuse-index saves the file at its end and loads it, unless its clock is a replay."""
    config = '[[host]]\ncapacity = "8 MiB"\nsegment = "1 MiB"\neviction = "reuse-index"\n'
    with Daemon(config) as daemon:
        daemon.stop()
        kept = next(daemon.root.rglob(FILE))
        assert read_learner(kept.parent) is not None
        daemon.start()
        assert "learned reuse state" not in daemon.log
    with Daemon('[server]\nclock = "replay"\n\n' + config) as daemon:
        daemon.stop()
        assert list(daemon.root.rglob(FILE)) == []
