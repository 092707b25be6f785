"""Gets into a list of pieces for each block: wrong lists, wrong catalogues, and a daemon that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.damaged import flip, pages
from tests.system.warm import Daemon
from tierd.client import Client, Group, NamespaceSpec
from tierd.client.blocks.lease import Lease
from tierd.core.formats.block import KVGeometry
from tierd.core.formats.meta import META_BYTES
from tierd.errors import InvalidArgument
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore
from tierd.testing import chain, content_of

LAYERS, PIECE, BLOCKS, BAD = 3, 4096, 6, 3
SPEC = NamespaceSpec(
    model="pieces", tokens_per_block=16, block_bytes=LAYERS * PIECE, geometry=KVGeometry(layers=LAYERS)
)
NAMES = chain(1, BLOCKS)
TRUSTING = '[[host]]\ncapacity = "4 MiB"\nsegment = "512 KiB"\nverify = "first_hit"\n'
ROUNDS = 20


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(TRUSTING) as running:
        yield running


def sources() -> list[np.ndarray]:
    return [content_of(name, SPEC.block_bytes) for name in NAMES]


def memory(blocks: int = BLOCKS) -> list[list[np.ndarray]]:
    return [[np.zeros(PIECE, np.uint8) for _ in range(LAYERS)] for _ in range(blocks)]


def good(out: Any, blocks: int) -> bool:
    """Whether the first blocks came with the right bytes."""
    return all((np.concatenate(its) == block).all() for its, block in zip(out, sources()[:blocks], strict=False))


def _frozen() -> np.ndarray:
    array = np.zeros(PIECE, np.uint8)
    array.flags.writeable = False
    return array


WHOLE = np.zeros(SPEC.block_bytes, np.uint8)
WRONG: dict[str, Any] = {
    "buffer 1: ndarray, but buffer 0 is in pieces": [*memory(1), *[WHOLE] * (BLOCKS - 1)],
    "buffer 1: NoneType, but buffer 0 is in pieces": [*memory(1), *[None] * (BLOCKS - 1)],
    "list gives no contiguous bytes": [WHOLE, *memory(BLOCKS - 1)],
    "it is read-only": [[_frozen()] * LAYERS] * BLOCKS,
    "buffers: 5 for 6 blocks": memory(BLOCKS - 1),
    r"pieces of \[4096, 4096\] bytes for a block of 12288": [memory(1)[0][:2]] * BLOCKS,
    r"pieces of \[\] bytes for a block of 12288": [[]] * BLOCKS,
    r"pieces of \[8192, 4096\] bytes": [[np.zeros(2 * PIECE, np.uint8), np.zeros(PIECE, np.uint8)]] * BLOCKS,
    "is not contiguous": [[np.zeros(2 * PIECE, np.uint8)[::2]] * LAYERS] * BLOCKS,
    "str gives no contiguous bytes": [["a"] * LAYERS] * BLOCKS,
}


def test_wrong_pieces_are_refused_by_name(daemon: Daemon) -> None:
    """Lists that do not fit raise InvalidArgument from a get and from a lease; the next get is right."""
    with Client(daemon.target, best_effort=False) as client:
        space = client.open_namespace(SPEC)
        client.put(space, NAMES, sources())
        with client.acquire([Group(space, NAMES)]) as lease:
            for words, out in WRONG.items():
                with pytest.raises(InvalidArgument, match=words):
                    client.get(space, NAMES, out=out)
                with pytest.raises(InvalidArgument, match=words):
                    lease.copy_into(out)
                right = memory()
                assert client.get(space, NAMES, out=right).blocks == BLOCKS and good(right, BLOCKS)
            right = memory()
            assert lease.copy_into(right) == BLOCKS and good(right, BLOCKS)


def test_pieces_whatever_the_catalogue_says(daemon: Daemon) -> None:
    """With corrupt catalogue entries all blocks come into their pieces: the daemon verifies them."""
    chance = np.random.default_rng(6)
    with Client(daemon.target, best_effort=False) as client:
        space = client.open_namespace(SPEC)
        client.put(space, NAMES, sources())
        assert client.get(space, NAMES, out=memory()).blocks == BLOCKS
        session = client._connector.link.session
        for _ in range(ROUNDS):
            for place, segment in list(session.segments._mapped.items()):
                rows = np.frombuffer(segment.metas, np.uint8).copy().reshape(-1, META_BYTES)
                at = chance.integers(META_BYTES, size=4)
                rows[:, at] = chance.integers(256, size=(len(rows), 4), dtype=np.uint8)
                session.segments.add(place, replace(segment, metas=memoryview(rows.reshape(-1))))
            out = memory()
            assert client.get(space, NAMES, out=out).blocks == BLOCKS and good(out, BLOCKS)
            session.unmap()


@pytest.mark.parametrize("hangs", [False, True])
def test_blocks_before_a_damaged_one_are_loaded(daemon: Daemon, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load serves the blocks before a damaged one, also if the daemon hangs when it is asked again."""
    copied = Lease.copied

    def copied_and_hung(*given: Any, **named: Any) -> Any:
        try:
            return copied(*given, **named)
        finally:
            stand_still(daemon.pid)

    with EngineStore(Options(target=daemon.target), EngineFacts("test", "1", "pieces")) as store:
        space = store.open(SPEC)
        store.client.put(space, NAMES, sources())
        group = Group(space, NAMES)
        assert store.load([group], [memory()]).good == (BLOCKS,)
        place = pages(daemon, NAMES, length=SPEC.block_bytes)[NAMES[BAD].tobytes()]
        flip(place, PIECE + 1)
        if hangs:
            monkeypatch.setattr(Lease, "copied", copied_and_hung)
        out = memory()
        try:
            loaded = store.load([group], [out], timeout_s=0.5 if hangs else 30.0)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert (loaded.good, loaded.tokens) == ((BAD,), BAD * SPEC.tokens_per_block) and good(out, BAD)
