"""One daemon a module for tests of LMCache's adapter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierd.testing import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that runs when a test begins."""
    with Daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def alive(daemon: Daemon) -> None:
    """One that a test has ended runs again."""
    if daemon.has_ended:
        daemon.start()
