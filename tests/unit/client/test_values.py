"""The values that a caller passes and receives."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.client import NamespaceSpec, OpenedNamespace
from tierd.client.values import Committed, Event, EventKind, PutResult

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096)


def test_blocks_are_named_after_those_before_them() -> None:
    """The first block has the given parent, each other the block before it; positions and tokens go on."""
    namespace = OpenedNamespace(SPEC, id=1, digest=bytes(32))
    hashes, parent = np.frombuffer(bytes(range(96)), dtype=np.uint8).reshape(3, 32), b"\xff" * 32
    named = namespace.naming(hashes, index=[7, 4, 5], parent=parent, position=10, tokens=40)
    assert [bytes(one) for one in named["parent"]] == [parent, bytes(hashes[0]), bytes(hashes[1])]
    assert [bytes(one) for one in named["hash"]] == [bytes(one) for one in hashes]
    assert named["index"].tolist() == [7, 4, 5]
    assert named["position"].tolist() == [10, 11, 12]
    assert named["tokens"].tolist() == [16, 16, 8]
    assert named["length"].tolist() == [4096, 4096, 2048]


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([1, 1, 1], "PutResult(3 READY)"),
        ([1, 1, 3, 4], "PutResult(2 READY, 1 EXISTS, 1 NO_ROOM)"),
        ([], "PutResult(no blocks)"),
        ([1, 3] * 5, f"PutResult({', '.join(['1 READY, 1 EXISTS'] * 4)}, 2 more runs)"),
        ([999], "PutResult(1 999)"),
    ],
)
def test_a_result_prints_names(statuses: list[int], text: str) -> None:
    """A printed put result shows its statuses by name, with counts of equal ones."""
    assert repr(PutResult(np.array(statuses, dtype=np.uint16))) == text


def test_other_answers_print_names() -> None:
    """A printed commit or event also shows names, and no array."""
    handles = np.zeros(2, dtype=np.uint16)
    assert repr(Committed(np.array([1, 9], dtype=np.uint16), handles)).startswith("Committed(1 READY, 1 ")
    event = Event(7, EventKind.REMOVED, 0, 3, np.zeros((2, 32), dtype=np.uint8), "evicted")
    assert repr(event) == "Event(sequence=7, kind=REMOVED, tier=0, namespace=3, hashes=2, reason='evicted')"
