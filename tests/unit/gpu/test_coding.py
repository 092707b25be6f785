"""Blocks leave the GPU process as payloads of codecs and come back, with sums of the stored bytes."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.gpu.processes import HOST, SLAB, lists, memory, pieces_of, running, sums_of
from tests.unit.gpu.test_engine import closed
from tests.unit.kernels.fake_driver import counts, on_fake_driver
from tests.unit.kernels.rot_cases import Blocks
from tierd.codecs.block import NO_CONTEXT
from tierd.codecs.named import codec_named
from tierd.codecs.rotated import length_of
from tierd.codecs.values import bytes_of, raw_of
from tierd.errors import InvalidArgument, Unsupported
from tierd.gpu import coding
from tierd.gpu.child import Engine
from tierd.gpu.protocol import Coding
from tools.fake_cuda import build_fatbins

ROOM = 1 << 20


def coding_of(blocks: Blocks) -> Coding:
    """As a caller names it."""
    sizes = (blocks.layers, blocks.kv_heads, blocks.tokens, blocks.head_dim)
    return Coding(blocks.codec, codec_named(blocks.codec).version, *sizes, blocks.dtype, blocks.layout)


def pieces_for(blocks: Blocks) -> np.ndarray:
    """A piece for each block, aligned on the slab, and at odd places on the host."""
    pieces = pieces_of([blocks.kv.block_bytes] * blocks.count, layers=blocks.layers)
    pieces["host_offset"] += 5
    return pieces


def payloads_of(blocks: Blocks, pieces: np.ndarray) -> np.ndarray:
    """The same pieces with the payloads' length."""
    stored = pieces.copy()
    stored["length"] = codec_named(blocks.codec).lengths(blocks.kv).most
    return stored


def opened(blocks: Blocks, pieces: np.ndarray) -> tuple[Engine, int, int]:
    """An engine with the kernels, a slab with the blocks, and host memory of random bytes."""
    os.environ["TIERD_FATBINS_FOLDER"] = str(build_fatbins())
    engine = Engine(0)
    slab, host = engine.slabs.make(1, SLAB), memory(ROOM, seed=4)
    for piece, block in zip(pieces, blocks.values(), strict=True):
        os.pwrite(slab, block.tobytes(), int(piece["slab_offset"]))
    assert engine.hosts.attach(HOST, host, ROOM) == []
    return engine, slab, host


@on_fake_driver()
def test_blocks_go_out_and_come_back_by_codes() -> None:
    """Payloads on the host are the codec's, blocks on the slab what it decodes; sums are of payloads.
    No byte beside them changes, and calls of more payloads than scratch memory holds are right."""
    coding.SCRATCH_BYTES = 30_000  # two payloads of the first blocks, one of the others
    for blocks in (Blocks(count=3), Blocks("rot-8-4", 128, 17, layout="HND", count=2)):
        pieces, codec, kv = pieces_for(blocks), codec_named(blocks.codec), blocks.kv
        engine, slab, host = opened(blocks, pieces)
        image, on_slab, stored = bytearray(os.pread(host, ROOM, 0)), bytearray(SLAB), payloads_of(blocks, pieces)
        done = engine.coder.store(pieces, coding_of(blocks))
        for piece, block, found in zip(pieces, blocks.values(), done.errors, strict=True):
            payload, error = codec.encode(raw_of(block, kv), kv, NO_CONTEXT)[:2]
            at = int(piece["host_offset"])
            image[at : at + len(payload)] = payload.tobytes()
            decoded = bytes_of(codec.decode(payload, kv, NO_CONTEXT), kv).tobytes()
            at = int(piece["slab_offset"])
            on_slab[at : at + len(decoded)] = decoded
            assert length_of(float(found[0])) == error
        assert os.pread(host, ROOM, 0) == image
        assert lists(done.tables) == sums_of(host, stored, "host")
        os.pwrite(slab, bytes(SLAB), 0)
        assert lists(engine.coder.load(pieces, coding_of(blocks))) == lists(done.tables)
        assert os.pread(slab, SLAB, 0) == on_slab
        assert engine.coder.store(pieces[:0], coding_of(blocks)).tables == []
        closed(engine, slab, host)


@on_fake_driver()
def test_a_damaged_payload_has_another_sum() -> None:
    """A byte that changed on the host changes the sum of its slice, and no other."""
    blocks = Blocks(count=2)
    pieces = pieces_for(blocks)
    engine, slab, host = opened(blocks, pieces)
    before = engine.coder.store(pieces, coding_of(blocks)).tables
    at = int(pieces["host_offset"][1]) + 100
    os.pwrite(host, bytes([os.pread(host, 1, at)[0] ^ 1]), at)
    after = engine.coder.load(pieces, coding_of(blocks))
    assert lists(after[:1]) == lists(before[:1])
    assert np.flatnonzero(after[1] != before[1]).tolist() == [0]
    closed(engine, slab, host)


@on_fake_driver()
def test_what_cannot_be_coded_is_refused_and_moves_nothing() -> None:
    """Codec, version, shape, length and places are checked by name before anything is allocated."""
    blocks = Blocks(count=2)
    pieces, how = pieces_for(blocks), coding_of(blocks)
    engine, slab, host = opened(blocks, pieces)
    before, image = counts(), os.pread(host, ROOM, 0)
    for wrong, error, text in (
        (replace(how, version=2), Unsupported, "codec rot-4-4: version 2 of bfloat16; kernels have version 1"),
        (replace(how, dtype="float32"), Unsupported, "of float32; kernels have version 1 of bfloat16, float16"),
        (replace(how, codec="int8"), InvalidArgument, "codec: no kernel has 'int8'"),
        (replace(how, head_dim=96), InvalidArgument, "codec rot-4-4: head_dim 96 is not one of"),
        (replace(how, tokens=31), InvalidArgument, "piece 0: 49152 bytes; a block of its shape has 47616"),
    ):
        for call in (engine.coder.store, engine.coder.load):
            with pytest.raises(error, match=text):
                call(pieces, wrong)
    for name, value, text in (
        ("slab_offset", 8, "piece 1: slab_offset 8 is no multiple of 16"),
        ("host_offset", ROOM - 100, "piece 1: .* of host 7, which has"),
        ("slab_offset", SLAB - 16, "piece 1: .* of slab 1, which has"),
    ):
        odd = pieces.copy()
        odd[name][1] = value
        with pytest.raises(InvalidArgument, match=text):
            engine.coder.store(odd, how)
    assert counts() == before
    assert os.pread(host, ROOM, 0) == image
    closed(engine, slab, host)


@on_fake_driver()
def test_without_kernels_codes_are_refused() -> None:
    """A GPU process without fatbins names them."""
    os.environ["TIERD_FATBINS_FOLDER"] = "/nonexistent"  # a checkout may have some
    blocks = Blocks(count=1)
    engine = Engine(0)
    with pytest.raises(Unsupported, match=r"codec rot-4-4: cuda:0 has no kernel for it \(kernels: no fatbins"):
        engine.coder.store(pieces_for(blocks), coding_of(blocks))
    closed(engine)


async def test_by_messages(driver: pytest.MonkeyPatch) -> None:
    """The daemon's end gives the codec and gets slice tables and errors; a refusal keeps its class."""
    driver.setenv("TIERD_FATBINS_FOLDER", str(build_fatbins()))
    blocks = Blocks("rot-8-8", count=2)
    pieces, how = pieces_for(blocks), coding_of(blocks)
    async with running() as (gpu, _):
        slab, host = await gpu.make(1, SLAB), memory(ROOM)
        await gpu.attach(HOST, host, ROOM)
        for piece, block in zip(pieces, blocks.values(), strict=True):
            os.pwrite(slab, block.tobytes(), int(piece["slab_offset"]))
        done = await gpu.store_coded(pieces, how)
        assert lists(done.tables) == sums_of(host, payloads_of(blocks, pieces), "host")
        assert done.errors.shape == (2, 2) and np.isfinite(done.errors).all() and (done.errors[:, 1] > 1).all()
        assert lists(await gpu.load_coded(pieces, how)) == lists(done.tables)
        with pytest.raises(Unsupported, match="codec rot-8-8: version 9"):
            await gpu.store_coded(pieces, replace(how, version=9))
    for fd in (slab, host):
        os.close(fd)
