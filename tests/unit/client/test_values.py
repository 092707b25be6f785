"""What a caller gives and gets."""

from __future__ import annotations

import numpy as np

from tierd.client import NamespaceSpec, OpenedNamespace

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096)


def test_blocks_are_named_after_those_before_them() -> None:
    """The first block's parent is the one given, each other's is the block before it; positions and tokens go on from the first's."""
    namespace = OpenedNamespace(SPEC, id=1, digest=bytes(32))
    hashes, parent = np.frombuffer(bytes(range(96)), dtype=np.uint8).reshape(3, 32), b"\xff" * 32
    named = namespace.naming(hashes, index=[7, 4, 5], parent=parent, position=10, tokens=40)
    assert [bytes(one) for one in named["parent"]] == [parent, bytes(hashes[0]), bytes(hashes[1])]
    assert [bytes(one) for one in named["hash"]] == [bytes(one) for one in hashes]
    assert named["index"].tolist() == [7, 4, 5]
    assert named["position"].tolist() == [10, 11, 12]
    assert named["tokens"].tolist() == [16, 16, 8]
    assert named["length"].tolist() == [4096, 4096, 2048]
