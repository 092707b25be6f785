"""The kernels of cuda/, built for the CPU."""

from __future__ import annotations

import pytest

from tierd.kernels.library import Emulated
from tools.kernels import CannotBuild, build_emulator


@pytest.fixture(scope="session")
def library() -> Emulated:
    """Their own source, run by the emulator of cuda/emulator."""
    try:
        return Emulated(build_emulator())
    except CannotBuild as error:
        pytest.skip(f"kernels cannot be built for the CPU here: {error}")
