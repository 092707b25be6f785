"""The kernel that says what memory gives reads all of it: else the limit that others are measured against would be too high."""

from __future__ import annotations

import pytest

from tests.unit.kernels.read_cases import READS, Read, check_read
from tierd.kernels.library import Emulated


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("shape", READS, ids=str)
def test_all_is_read_and_nothing_beside_it(library: Emulated, shape: Read) -> None:
    """Whatever its length, by however many blocks."""
    check_read(library, shape)
