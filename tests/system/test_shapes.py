"""Blocks of every shape are stored and come back unchanged; invalid values are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.system.warm import Daemon
from tierd.client import Client, Group, NamespaceSpec, PutGroup
from tierd.core.formats.model import BlockStatus
from tierd.errors import InvalidArgument
from tierd.testing import chain


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon shared by all tests."""
    with Daemon('nvme = []\n[[host]]\ncapacity = "32 MiB"\nsegment = "2 MiB"\n') as running:
        yield running


@pytest.mark.parametrize(
    ("size", "block_bytes"), [(1, 1), (3, 4096), (7, 4096), (24, 100), (48, 65536), (49, 48), (1 << 20, 4097)]
)
def test_blocks_of_any_number_of_tokens(daemon: Daemon, size: int, block_bytes: int) -> None:
    """Blocks of any number of tokens, with a proportional short last one, work in every kind of put."""
    with Client(daemon.target) as client:
        ns = client.open_namespace(NamespaceSpec(model=f"{size}", tokens_per_block=size, block_bytes=block_bytes))
        tail = size // 2
        tokens = np.arange(3 * size + tail)
        lengths = [block_bytes] * 3 + [-(-tail * block_bytes // size)] * bool(tail)
        blocks = [np.full(length, 7 + i, np.uint8) for i, length in enumerate(lengths)]
        assert client.put(ns, tokens, blocks)
        assert [bytes(view) for view in client.get(ns, tokens).views] == [bytes(block) for block in blocks]
        named = PutGroup(ns, ns.hash(tokens[::-1], with_tail=True), len(tokens))
        assert client.put(ns, named, blocks)
        with client.reserve(PutGroup(ns, chain(1, len(blocks)), len(tokens))) as pages:
            assert pages.handles["length"].tolist() == lengths
            for page, block in zip(pages.buffers(), blocks, strict=True):
                page[:] = block
            assert pages.commit().statuses.tolist() == [BlockStatus.READY] * len(blocks)
        with client.reserve(PutGroup.private(ns, len(blocks))) as pages:
            names = ns.naming(chain(2, len(blocks)), index=range(len(blocks)), tokens=len(tokens))
            for page, block in zip(pages.buffers(), blocks, strict=True):
                page[: len(block)] = block
            assert pages.commit(names).statuses.tolist() == [BlockStatus.READY] * len(blocks)
        got = client.get(ns, Group(ns, chain(2, len(blocks)), len(tokens)))
        assert (got.tokens, [bytes(view) for view in got.views]) == (len(tokens), [bytes(block) for block in blocks])


@pytest.mark.parametrize(
    "lengths",
    [[4096, 4096, 2047], [4096, 8, 2048], [4096, 4096, 4097], [1, 4096, 2048], [4096, 4097, 2048], [0, 4096, 2048]],
)
def test_buffers_are_as_long_as_their_blocks(daemon: Daemon, lengths: list[int]) -> None:
    """Without explicit lengths, a buffer of the wrong size is refused with both lengths."""
    with Client(daemon.target) as client, Client(daemon.target, best_effort=True) as careless:
        ns, other = (
            each.open_namespace(NamespaceSpec(model="lengths", tokens_per_block=16, block_bytes=4096))
            for each in (client, careless)
        )
        tokens, blocks = np.arange(40), [bytes([9]) * length for length in lengths]
        wrong = next(
            i for i, (length, right) in enumerate(zip(lengths, [4096, 4096, 2048], strict=True)) if length != right
        )
        with pytest.raises(
            InvalidArgument, match=rf"buffer {wrong}: {lengths[wrong]} bytes .* give the blocks' lengths"
        ):
            client.put(ns, tokens, blocks)
        with pytest.raises(InvalidArgument, match=r"buffer \d: \d+ bytes"):
            client.put(ns, chain(3, 3), [*blocks[:2], bytes(9)])
        assert set(careless.put(other, tokens, blocks).statuses) == {BlockStatus.FAILED}
        assert client.lookup(ns, ns.hash(tokens, with_tail=True), tokens=40).tokens == 0
        if min(lengths) > 0 and max(lengths) <= 4096:
            said = PutGroup(ns, chain(4 + sum(lengths), 3), lengths=lengths)
            assert client.put(ns, said, blocks)
            assert [len(view) for view in client.get(ns, said.hashes).views] == lengths


H = chain(5, 2)
WRONG: list[tuple[str, Callable[[Client, Any], Any]]] = [
    ("tokens: -1 to 3", lambda c, ns: c.get(ns, [-1, 2, 3])),
    ("tokens: 0 to 4294967296", lambda c, ns: c.get(ns, [0, 2**32])),
    ("tokens: 0 to 4294967296", lambda c, ns: c.get(ns, np.array([0, 2**32]))),
    ("tokens: -1 to 0", lambda c, ns: c.put(ns, np.array([0] * 15 + [-1]), [bytes(4096)])),
    ("tokens: .*18446744073709551616", lambda c, ns: c.get(ns, [2**64] * 16)),
    ("tokens: float64, such as np.float64.1.5|tokens: float64, such as 1.5", lambda c, ns: c.get(ns, [1.5] * 16)),
    ("tokens: float32", lambda c, ns: c.get(ns, np.zeros(16, np.float32))),
    ("tokens: bool", lambda c, ns: c.get(ns, [True] * 16)),
    ("tokens: 2 dimensions", lambda c, ns: c.get(ns, [[1], [2]])),
    ("position: -1", lambda c, ns: c.put(ns, PutGroup(ns, H, position=-1), [bytes(4096)] * 2)),
    ("position: 4294967296", lambda c, ns: c.put(ns, PutGroup(ns, H, position=2**32), [bytes(4096)] * 2)),
    ("position: -1", lambda c, ns: c.reserve(PutGroup(ns, H, position=-1))),
    ("rank: -1", lambda c, ns: c.put(ns, PutGroup(ns, H, rank=-1), [bytes(4096)] * 2)),
    ("rank: 0.5", lambda c, ns: c.reserve(PutGroup(ns, H, rank=0.5))),  # type: ignore[arg-type]
    ("ranks: -1", lambda c, ns: c.lookup(Group(ns, H, ranks=(-1,)))),
    ("ranks: 4294967296", lambda c, ns: c.acquire(Group(ns, H, ranks=(2**32,)))),
    ("need_tokens: -1", lambda c, ns: c.prefetch(Group(ns, H, need_tokens=-1))),
    ("need: 9", lambda c, ns: c.lookup(Group(ns, H, need=9))),  # type: ignore[arg-type]
    ("tokens: -5", lambda c, ns: c.lookup(ns, H, tokens=-5)),
    ("tokens: 31.5", lambda c, ns: c.acquire(ns, H, tokens=31.5)),
    ("lengths: -1", lambda c, ns: c.put(ns, PutGroup(ns, H, lengths=[-1, 5]), [bytes(4096)] * 2)),
    ("parent: 3 bytes", lambda c, ns: ns.hash([1] * 16, parent=b"abc")),
    ("position: -1", lambda c, ns: ns.naming(H, index=[0, 1], position=-1)),
    ("3 indices", lambda c, ns: ns.naming(H, index=[0, 1, 2])),
    ("tokens_per_block: 0 is no integer", lambda c, ns: c.lookup(c.open_namespace(NamespaceSpec("m", 0, 8)), H)),
    ("block_bytes: 1.5", lambda c, ns: c.lookup(c.open_namespace(NamespaceSpec("m", 1, 1.5)), H)),  # type: ignore[arg-type]
    ("model: '.udc00'", lambda c, ns: c.lookup(c.open_namespace(NamespaceSpec("\udc00", 1, 8)), H)),
    ("blocks: list", lambda c, ns: c.reserve(PutGroup.private(ns, 1)).commit([1])),
    ("after: -1", lambda c, ns: next(c.watch(after=-1))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), WRONG, ids=[f"{i}-{words[:16]}" for i, (words, _) in enumerate(WRONG)])
def test_values_that_are_none(daemon: Daemon, words: str, call: Callable[[Client, Any], Any]) -> None:
    """A verb refuses an invalid value with its name and the value."""
    with Client(daemon.target) as client, pytest.raises(InvalidArgument, match=words):
        call(client, client.open_namespace(NamespaceSpec(model="values", tokens_per_block=16, block_bytes=4096)))


def test_values_that_are_none_with_best_effort(daemon: Daemon) -> None:
    """With best effort the same calls of verbs are misses."""
    with Client(daemon.target, best_effort=True) as client:
        ns = client.open_namespace(NamespaceSpec(model="values", tokens_per_block=16, block_bytes=4096))
        for words, call in WRONG:
            if words not in ("parent: 3 bytes", "3 indices", "after: -1") and "naming" not in call.__code__.co_names:
                call(client, ns)
