"""The kernels' mutants still fit their source. `python -m tools.kernel_mutants` tries them."""

from __future__ import annotations

import pytest

from tests.unit.kernels.small_cases import UNITS
from tools.kernel_faults import MUTANTS, Mutant
from tools.kernels import SOURCES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    """A mutant's text occurs exactly once in its file, changes it, and has cases that should detect it."""
    assert mutant.is_there(SOURCES), f"{mutant.file} has changed: write the mutant anew, or strike it with what went"
    assert mutant.old != mutant.new
    assert UNITS[mutant.unit]


def test_mutants_are_told_apart() -> None:
    """No two mutants have the same name."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
