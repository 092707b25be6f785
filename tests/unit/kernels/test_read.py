"""The benchmarks' read kernel reads all memory; otherwise their bandwidth limit would be too high."""

from __future__ import annotations

import pytest

from tests.unit.kernels.read_cases import READS, Read, check_read
from tierd.kernels.library import Emulated


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shape", READS, ids=str)
def test_all_is_read_and_nothing_beside_it(library: Emulated, shape: Read) -> None:
    """It reads exactly its words, at any length and with any number of blocks."""
    check_read(library, shape)
