"""The mutations match the code: the text that each removes is there, once."""

from __future__ import annotations

import pytest

from tests.repo.source import ROOT
from tools.mutate.mutation import Mutation
from tools.mutate.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_made(mutation: Mutation) -> None:
    """A mutation's text is in its file exactly once, it changes something, and its test files
    exist."""
    assert mutation.is_there(ROOT), (
        f"{mutation.file} has changed: write the mutation anew, or strike it with the check that went"
    )
    assert mutation.old != mutation.new
    assert all((ROOT / test).exists() for test in mutation.tests if test.endswith(".py"))


def test_mutations_are_told_apart() -> None:
    """No two mutations have one name."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
