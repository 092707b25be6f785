"""The checks of messages: valid values, or InvalidArgument that names the field and the remedy."""

from __future__ import annotations

import numpy as np
import pytest

from tierd._proto import cache_pb2 as pb
from tierd.core.formats.block import Namespace, NamespaceSpec
from tierd.core.formats.model import COMMIT_BLOCK, PUT_BLOCK, ROOT, Need, TierKind
from tierd.core.index.namespaces import NamespaceRegistry
from tierd.errors import InvalidArgument
from tierd.server.grpc import messages

SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=4096, rank_count=2)
HASHES = np.arange(3 * 32, dtype=np.uint8).tobytes()


@pytest.fixture
def namespace() -> Namespace:
    """A namespace of two ranks."""
    return NamespaceRegistry().open(SPEC, tenant="a")[0]


def _query(namespace: Namespace, **fields: object) -> object:
    group = pb.Group(**({"namespace": namespace.id, "hashes": HASHES} | fields))
    return messages.queries([group], namespace_of=lambda *_: namespace, batch_limit=8)


def _blocks(count: int, *, tokens: int = 16, length: int = 4096, named: bool = True) -> np.ndarray:
    blocks = np.zeros(count, dtype=PUT_BLOCK)
    blocks["tokens"], blocks["length"] = tokens, length
    blocks["hash"] = np.arange(1, count + 1)[:, None] if named else 0
    return blocks


def _put(namespace: Namespace, blocks: np.ndarray, **fields: object) -> object:
    group = pb.PutGroup(**({"namespace": namespace.id, "blocks": blocks.tobytes()} | fields))
    return messages.put_queries([group], namespace_of=lambda *_: namespace, batch_limit=8)


def test_group_becomes_query(namespace: Namespace) -> None:
    """Ranks become namespace ids, and omitted fields have their defaults."""
    (query,) = _query(namespace, ranks=[1, 0])
    assert query.namespaces == (namespace.id + 1, namespace.id)
    assert (query.tokens, query.tokens_per_block, query.need) == (48, 16, Need.PREFIX)
    assert query.hashes.tobytes() == HASHES


def test_a_long_request_id_is_cut(namespace: Namespace) -> None:
    """A client's id of megabytes takes no memory of leases, and no room in the log."""
    assert _query(namespace, request=b"r" * (1 << 20))[0].request == b"r" * 64


def test_short_tail_is_taken(namespace: Namespace) -> None:
    """Tokens that end within the last block are a short tail."""
    assert _query(namespace, tokens=33)[0].tokens == 33


@pytest.mark.parametrize(
    ("fields", "thing"),
    [
        ({"hashes": HASHES[:-1]}, "group.hashes"),
        ({"tokens": 49}, "group.tokens"),
        ({"ranks": [0, 1, 0]}, "group.ranks"),
        ({"tokens": 32}, "group.tokens"),
        ({"tokens_per_block": 8}, "group.tokens_per_block"),
        ({"ranks": [2]}, "rank"),
        ({"need": 9}, "group.need"),
        ({"ranks": [0, 1], "hashes": HASHES * 2}, "batch"),
    ],
)
def test_bad_group_is_named(namespace: Namespace, fields: dict[str, object], thing: str) -> None:
    """A malformed group is InvalidArgument that begins with the field at fault."""
    with pytest.raises(InvalidArgument, match=f"^{thing}"):
        _query(namespace, **fields)


def test_no_group_and_too_many_are_refused(namespace: Namespace) -> None:
    """A call has 1 to GROUP_LIMIT groups."""
    for groups in ([], [pb.Group(namespace=namespace.id)] * (messages.GROUP_LIMIT + 1)):
        with pytest.raises(InvalidArgument, match="^groups"):
            messages.queries(groups, namespace_of=lambda *_: namespace, batch_limit=8)


def test_put_group_becomes_query(namespace: Namespace) -> None:
    """An empty parent is the start of a sequence."""
    (query,) = _put(namespace, _blocks(2), rank=1, position=4)
    assert (query.namespace, query.parent, query.position) == (namespace.id + 1, ROOT, 4)


@pytest.mark.parametrize(
    ("blocks", "fields", "thing"),
    [
        (_blocks(1, tokens=17), {}, "block.tokens"),
        (_blocks(1, tokens=0), {}, "block.tokens"),
        (_blocks(1, length=4097), {}, "block.length"),
        (_blocks(1, length=0), {}, "block.length"),
        (np.concatenate([_blocks(1, tokens=3), _blocks(1)]), {}, "group.blocks"),
        (np.concatenate([_blocks(1), _blocks(1, named=False)]), {}, "group.blocks"),
        (_blocks(9), {}, "batch"),
        (_blocks(1), {"parent": b"short"}, "group.parent"),
        (_blocks(2), {"priorities": [101]}, r"group.priorities: 101 is outside 0 to 100"),
        (_blocks(2), {"priorities": [0, 2**32 - 1]}, r"group.priorities: 4294967295 is outside 0 to 100"),
        (_blocks(2), {"priorities": [1, 2, 3]}, r"group.priorities: 3 for 2 blocks"),
        (_blocks(2), {"retention_s": [5]}, r"group.retention_s: 5 s without a priority"),
        (_blocks(3), {"priorities": [1], "retention_s": [1, 2]}, r"group.retention_s: 2 for 3 blocks"),
        (_blocks(1), {"priorities": [1], "retention_s": [316224001]}, r"group.retention_s: 316224001 is outside"),
    ],
)
def test_bad_put_is_named(namespace: Namespace, blocks: np.ndarray, fields: dict[str, object], thing: str) -> None:
    """A malformed put is InvalidArgument that begins with the field at fault."""
    with pytest.raises(InvalidArgument, match=f"^{thing}"):
        _put(namespace, blocks, **fields)


def test_what_a_put_says_is_for_each_block(namespace: Namespace) -> None:
    """One value counts for all blocks, several count for one each, none means no value."""
    (query,) = _put(namespace, _blocks(3))
    assert (query.priorities, query.retention_s) == (None, None)
    (query,) = _put(namespace, _blocks(3), priorities=[100], retention_s=[0, 1, 316224000])
    assert (query.priorities.tolist(), query.retention_s.tolist()) == ([100] * 3, [0, 1, 316224000])
    assert (query.priorities.dtype, query.retention_s.dtype) == (np.uint8, np.uint32)
    (query,) = _put(namespace, _blocks(3), priorities=[0, 35, 1])
    assert (query.priorities.tolist(), query.retention_s) == ([0, 35, 1], None)


def test_commit_without_blocks_commits_all() -> None:
    """An absent field commits every reserved block; an empty one commits none."""
    assert messages.commit_blocks(pb.CommitRequest(reservation=1), batch_limit=8) is None
    empty = pb.CommitRequest(reservation=1, blocks=pb.CommitGroup())
    assert len(messages.commit_blocks(empty, batch_limit=8)) == 0


def test_unnamed_commit_is_refused() -> None:
    """A block without a hash is never published."""
    blocks = np.zeros(1, dtype=COMMIT_BLOCK)
    blocks["tokens"] = blocks["length"] = 1
    request = pb.CommitRequest(reservation=1, blocks=pb.CommitGroup(blocks=blocks.tobytes()))
    with pytest.raises(InvalidArgument, match=r"^blocks\.hash"):
        messages.commit_blocks(request, batch_limit=8)


def test_stored_tiers_cannot_be_mapped() -> None:
    """Handles point into memory only."""
    assert messages.tier_kind(0) is TierKind.DEVICE
    with pytest.raises(InvalidArgument, match="^tier"):
        messages.tier_kind(2)
