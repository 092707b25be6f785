"""The fake driver for GPU processes that a test starts."""

from __future__ import annotations

import pytest

from tests.unit.kernels.fake_driver import fake_environment


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Child processes load the fake driver and inherit every other variable that the test sets."""
    for name, value in fake_environment().items():
        monkeypatch.setenv(name, value)
    return monkeypatch
