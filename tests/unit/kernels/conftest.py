"""The kernels of cuda/, built for the CPU."""

from __future__ import annotations

import pytest

from tests.compilers import skip_without
from tierd.kernels.library import Emulated
from tools.kernels import MissingTool, build_emulator

ORDERS = ("0", "1", "2", "3")
"""Orders of a block's threads: forward, reverse, two shuffled."""


@pytest.fixture(scope="session")
def library() -> Emulated:
    """The kernels' own source, run by the emulator of cuda/emulator."""
    try:
        return Emulated(build_emulator())
    except MissingTool as error:
        skip_without(error, "g++", "nvcc")


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which threads take turns."""
    monkeypatch.setenv("SIMT_ORDER", request.param)
