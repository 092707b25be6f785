"""The SDK refuses an argument of a wrong type at once, and names it with its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tierd.client import Client, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.errors import InvalidArgument

SPACE = OpenedNamespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=64), id=1, digest=bytes(32))
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "a target of a list": (lambda: Client([1]), r"^target: \[1\]"),  # type: ignore[arg-type]
    "a target of a number": (lambda: Client(5), "^target: 5"),  # type: ignore[arg-type]
    "a name": (lambda: Client("/nowhere", name=5), "^name: 5"),  # type: ignore[arg-type]
    "a credential's file": (lambda: Client("/nowhere", credential_file=5), "^credential_file: 5"),  # type: ignore[arg-type]
    "an engine": (lambda: Client("/nowhere").introduce({"a": 1}), "^engine: 'a': 1"),  # type: ignore[dict-item]
    "too many private pages": (lambda: PutGroup.private(SPACE, 1 << 32), f"^count: {1 << 32} is no integer"),
    "fewer than no private page": (lambda: PutGroup.private(SPACE, -1), "^count: -1 is no integer"),
    "an engine's hash": (lambda: SPACE.fold([1]), "^hashes: 1 is no bytes"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_at_once(case: str) -> None:
    """InvalidArgument names the argument and its value in one short line, before any message is sent."""
    call, says = CASES[case]
    with pytest.raises(InvalidArgument, match=says) as told:
        call()
    assert len(str(told.value)) < 200
