"""One daemon for each module of tests of LMCache's adapter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierd.testing import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """The module's daemon, which `alive` keeps running."""
    with Daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def alive(daemon: Daemon) -> None:
    """Restarts a daemon that an earlier test has ended."""
    if daemon.has_ended:
        daemon.start()
