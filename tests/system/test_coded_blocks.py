"""The option `codec` of engines, against a real daemon: blocks are stored encoded and load decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.codecs import USABLE
from tests.system.warm import Daemon
from tierd.cli.ctl import cli
from tierd.client import Found, Group, NamespaceSpec, PutGroup
from tierd.client.blocks.lease import Lease
from tierd.codecs.block import HEADER
from tierd.codecs.coding import coding_of
from tierd.codecs.values import Raw, floats_of, rounded
from tierd.core.formats.block import KVGeometry
from tierd.errors import ConfigError
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import SAVE_BLOCKS, EngineStore

GEOMETRY, TOKENS = KVGeometry(2, 2, 64, "bfloat16"), 16
SPEC = NamespaceSpec(model="coded", tokens_per_block=TOKENS, block_bytes=2 * TOKENS * 2 * 2 * 64 * 2)
FACTS = EngineFacts("test", "1", "store", role="worker")


@dataclass
class Memory:
    """An engine's memory: uint16 [layers, 2, blocks, tokens, kv_heads, head_dim]."""

    raw: Raw

    @classmethod
    def filled(cls, blocks: int) -> Memory:
        shape = (GEOMETRY.layers, 2, blocks, TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        values = np.random.default_rng(blocks).standard_normal(shape).astype(np.float32)
        return cls(rounded(values, GEOMETRY.dtype))

    @classmethod
    def empty(cls, blocks: int) -> Memory:
        return cls(np.zeros_like(cls.filled(blocks).raw))

    def pieces(self) -> list[list[Any]]:
        return [
            [self.raw[layer, pair, block] for layer in range(GEOMETRY.layers) for pair in range(2)]
            for block in range(self.raw.shape[2])
        ]

    def block(self, number: int) -> np.ndarray:
        return floats_of(np.ascontiguousarray(self.raw[:, :, number]), GEOMETRY.dtype)


def names(blocks: int) -> list[bytes]:
    return [i.to_bytes(4, "big") for i in range(blocks)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def store_with(daemon: Daemon, codec: str = "", **options: Any) -> EngineStore:
    return EngineStore(Options(target=daemon.target, codec=codec, **options), FACTS)


def opened(store: EngineStore, blocks: int, *, salt: str) -> Group:
    space = store.open(store.codings.spec(replace(SPEC, salt=salt), GEOMETRY))
    return Group(space, space.fold(names(blocks)))


@pytest.mark.parametrize("codec", USABLE, ids=lambda codec: codec.name)
def test_each_codec_through_a_daemon(daemon: Daemon, codec: Any) -> None:
    """Another engine loads the saved blocks within the codec's bound, and the first one exactly. The
    daemon stores the encoded bytes. A second save copies nothing."""
    count, salt = SAVE_BLOCKS + 3, f"each {codec.name}"
    memory = Memory.filled(count)
    with store_with(daemon, codec.name) as store, store_with(daemon, codec.name) as other:
        group = opened(store, count, salt=salt)
        assert store.save(PutGroup(group.namespace, group.hashes), memory.pieces()) == count
        stored = store.take_counts()["saved_bytes"]
        assert store.save(PutGroup(group.namespace, group.hashes), memory.pieces()) == count
        assert store.take_counts()["saved_bytes"] == 0
        back, mine = Memory.empty(count), opened(other, count, salt=salt)
        assert other.load([mine], [back.pieces()]).good == (count,)
        coding = coding_of(codec.name, "", geometry=GEOMETRY, tokens_per_block=TOKENS)
        most = sum(coding.stored_bytes(TOKENS, number=i) for i in range(count))
        assert stored == most or codec.lengths(coding.full).least < codec.lengths(coding.full).most
        # The bound of a codec with many lengths is the plain block; kivi shortens from 32 tokens on.
        shortens = codec.lengths(coding.full).most < coding.full.block_bytes
        assert stored <= most and (most < count * SPEC.block_bytes or not shortens)
    assert (back.raw[:, :, 0] == memory.raw[:, :, 0]).all()
    for number in range(count):
        off = np.abs(back.block(number) - memory.block(number)).max()
        bound = coding.encode(_bytes(memory, number), tokens=TOKENS, number=number)[: HEADER.itemsize].view(HEADER)
        assert off <= bound["error"][0]


def _bytes(memory: Memory, number: int) -> np.ndarray:
    return np.ascontiguousarray(memory.raw[:, :, number]).reshape(-1).view(np.uint8)


def test_engines_with_different_codecs_share_nothing(daemon: Daemon) -> None:
    """Engines find only the blocks of engines with the same codec."""
    stores = {codec: store_with(daemon, codec) for codec in ("", *(one.name for one in USABLE))}
    groups = {codec: opened(store, 3, salt="apart") for codec, store in stores.items()}
    for codec, store in stores.items():
        group = groups[codec]
        assert store.lookup([group]).tokens == 0
        assert store.save(PutGroup(group.namespace, group.hashes), Memory.filled(3).pieces()) == 3
    assert len({group.namespace.digest for group in groups.values()}) == len(groups)
    for store in stores.values():
        store.close()


def changed(block: np.ndarray, at: int) -> np.ndarray:
    block = block.copy()
    block[at] ^= 1
    return block


DAMAGE = {
    "a bit of the payload": lambda block: changed(block, HEADER.itemsize + 5),
    "a bit of the header": lambda block: changed(block, 20),
    "the magic": lambda block: changed(block, 0),
    "no header": lambda block: block[:40],
    "a cut payload": lambda block: block[:-1],
    "another codec": lambda _: coded("int8"),
    "another shape": lambda _: coded("rot-8-8", tokens=8),
    "another order": lambda _: coded("rot-8-8", layout="HND"),
}


def coded(codec: str, *, tokens: int = TOKENS, layout: str = "NHD") -> np.ndarray:
    geometry = KVGeometry(GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim, GEOMETRY.dtype, layout)
    coding = coding_of(codec, "", geometry=geometry, tokens_per_block=tokens)
    return coding.encode(np.ones(coding.full.block_bytes, np.uint8), tokens=tokens, number=1)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_block_that_cannot_be_decoded_is_missing(daemon: Daemon, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A load ends before such a block, leaves its memory unchanged, counts it and logs why."""
    with store_with(daemon, "rot-8-8") as store:
        group, memory = opened(store, 4, salt=what), Memory.filled(4)
        coding = coding_of("rot-8-8", "", geometry=GEOMETRY, tokens_per_block=TOKENS)
        blocks = [coding.encode(_bytes(memory, i), tokens=TOKENS, number=i) for i in range(4)]
        blocks[2] = DAMAGE[what](blocks[2])
        with store.client.reserve(PutGroup(group.namespace, group.hashes, lengths=list(map(len, blocks)))) as pages:
            for page, block in zip(pages.buffers(), blocks, strict=True):
                page[:] = block
            pages.commit()
        back = Memory.empty(4)
        loaded = store.load([group], [back.pieces()])
        assert (loaded.good, loaded.tokens) == ((2,), 2 * TOKENS)
        assert not back.raw[:, :, 2].any() and back.raw[:, :, 1].any()
        assert store.take_counts()["undecoded_blocks"] == 1
        other = opened(store, 4, salt=what)
        both = store.load([group, other], [back.pieces(), back.pieces()])
        assert both.good == (0, 0), "several groups load as one"
    assert any("counts as missing" in line for line in caplog.messages)


def test_a_page_taken_away_during_the_copy_is_not_decoded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is checked before anything is decoded into the engine's memory."""
    with store_with(daemon, "rot-8-8") as store:
        group, back = opened(store, 3, salt="taken"), Memory.empty(3)
        assert store.save(PutGroup(group.namespace, group.hashes), Memory.filled(3).pieces()) == 3
        monkeypatch.setattr(Lease, "check", lambda _: 1)
        assert store.load([group], [back.pieces()]).good == (1,)
    assert back.raw[:, :, 0].any() and not back.raw[:, :, 1:].any()


def test_a_block_that_is_evicted_while_others_are_encoded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a save stores nothing, counts as failed, and succeeds the next time."""
    with store_with(daemon, "int8") as store:
        group = opened(store, 2, salt="evicted")
        put = PutGroup(group.namespace, group.hashes)
        with monkeypatch.context() as once:
            once.setattr(store.client, "lookup", lambda *_, **__: Found(16, (np.array([[0, -1]], np.int8),)))
            assert store.save(put, Memory.filled(2).pieces()) == 0
        assert store.take_counts()["failed_saves"] == 1 and store.lookup([group]).tokens == 0
        assert store.save(put, Memory.filled(2).pieces()) == 2


def test_a_short_block_is_exact(daemon: Daemon) -> None:
    """A block that may still grow keeps its bytes, and is shorter than a full one."""
    memory = Memory.filled(2)
    with store_with(daemon, "rot-4-4") as store:
        group = opened(store, 2, salt="short")
        sources = [memory.pieces()[0], [piece[:5] for piece in memory.pieces()[1]]]
        put = PutGroup(group.namespace, group.hashes, tokens=TOKENS + 5)
        assert store.save(put, sources) == 2
        back = Memory.empty(2)
        targets = [back.pieces()[0], [piece[:5] for piece in back.pieces()[1]]]
        found = Group(group.namespace, group.hashes, tokens=TOKENS + 5)
        assert store.load([found], [targets]).tokens == TOKENS + 5
    assert (back.raw[:, :, 0] == memory.raw[:, :, 0]).all()
    assert (back.raw[:, :, 1, :5] == memory.raw[:, :, 1, :5]).all() and not back.raw[:, :, 1, 5:].any()


def test_memory_in_another_order(daemon: Daemon) -> None:
    """Blocks of an engine whose memory has its values in another order load in the block's order."""
    memory, flat = Memory.filled(3), GEOMETRY.kv_heads * GEOMETRY.head_dim * TOKENS * 2
    order = np.random.default_rng(1).permutation(flat)
    layers = memory.raw.transpose(2, 0, 1, 3, 4, 5).reshape(3, GEOMETRY.layers, flat)
    shuffled = np.empty_like(layers)
    shuffled[:, :, order] = layers
    with store_with(daemon, "rot-8-8") as store, store_with(daemon, "rot-8-8") as other:
        group, plain = opened(store, 3, salt="order"), opened(other, 3, salt="order")
        store.codings.arrange(group.namespace.spec, order)
        assert store.save(PutGroup(group.namespace, group.hashes), [list(block) for block in shuffled]) == 3
        back, again = Memory.empty(3), np.zeros_like(shuffled)
        assert other.load([plain], [back.pieces()]).good == (3,)
        assert store.load([group], [[list(block) for block in again]]).good == (3,)
    assert np.abs(back.block(2) - memory.block(2)).max() < 0.1
    assert (again[:, :, order] == back.raw.transpose(2, 0, 1, 3, 4, 5).reshape(layers.shape)).all()


def test_what_a_codec_is_refused_for(daemon: Daemon, tmp_path: Path) -> None:
    """An unknown codec, an opaque or unfit shape and a wrong calibration are errors with their names."""
    (tmp_path / "odd").write_bytes(b"no calibration")
    cases = (
        ({"codec": "zip"}, GEOMETRY, "'zip' is unknown"),
        ({"codec": "int8"}, KVGeometry(), "no layers of one shape"),
        ({"codec": "int8"}, KVGeometry(2, 2, 64, "float32"), "float32"),
        ({"codec": "rot-4-4"}, KVGeometry(2, 2, 80, "bfloat16"), "head_dim 80"),
        ({"codec": "int8", "calibration": str(tmp_path / "odd")}, GEOMETRY, "calibration"),
        ({"codec": "int8", "calibration": str(tmp_path / "none")}, GEOMETRY, "none"),
        ({"calibration": str(tmp_path / "odd")}, GEOMETRY, "without `codec`"),
    )
    for options, geometry, said in cases:
        with store_with(daemon, **options) as store, pytest.raises(ConfigError, match=said):
            store.codings.spec(SPEC, geometry)


def test_the_codec_is_logged_once(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which codec an engine uses, its bits, and whether it loses anything."""
    with store_with(daemon, "rot-4-4") as store:
        for salt in "ab":
            store.codings.spec(replace(SPEC, salt=salt), KVGeometry(2, 2, 256, "bfloat16"))
    said = [line for line in caplog.messages if "encodes KV" in line]
    assert said == [
        (
            "tierd: codec rot-4-4 encodes KV in 4.06 bits a value instead of 16, with loss; first and short "
            "blocks are exact"
        )
    ]


def test_operators_see_the_codec(daemon: Daemon) -> None:
    """A namespace keeps its codec over a restart of its daemon, and the listing shows it."""
    with store_with(daemon, "int8") as store:
        digest = opened(store, 1, salt="seen").namespace.digest
    daemon.restart()
    with store_with(daemon, "int8") as store:
        assert opened(store, 1, salt="seen").namespace.digest == digest
    said = CliRunner().invoke(cli, ["--target", daemon.target, "namespaces"])
    assert said.exit_code == 0 and any("coded" in line and "int8" in line for line in said.stdout.splitlines())
