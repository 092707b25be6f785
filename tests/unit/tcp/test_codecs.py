"""Codecs of the wire: encoded bytes come back, and bad input gives nothing worse than a CorruptRecord."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lz4 import block

from tests.noise import bf16_noise
from tierd.errors import CorruptRecord, InvalidArgument, Unsupported
from tierd.tcp.chunks import CHUNK_BYTES
from tierd.tcp.codecs import WIRE_CODECS, open_codec, shortest

CODECS = sorted(WIRE_CODECS)
PLAIN = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda part, times: part * times, st.binary(max_size=9), st.integers(0, 500)),
    st.builds(bf16_noise, st.integers(0, 9), st.integers(0, 2000).map(lambda n: 2 * n)).map(bytes),
)


def _opened(name: str):
    codec = open_codec(name, whose="this test")
    assert codec is not None
    return codec


@pytest.mark.parametrize("name", CODECS)
@given(plain=PLAIN)
def test_there_and_back(name: str, plain: bytes) -> None:
    """Bytes of any length come back unchanged, also none and odd lengths."""
    codec = _opened(name)
    assert codec.decode(codec.encode(plain), length=len(plain)) == plain
    assert codec.decode(memoryview(codec.encode(memoryview(plain))), length=len(plain)) == plain


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("plain", [bytes(CHUNK_BYTES), bf16_noise(1, CHUNK_BYTES).tobytes(), bytes(CHUNK_BYTES - 1)])
def test_whole_chunks(name: str, plain: bytes) -> None:
    """The largest payload of a chunk comes back, and a cache's typical bytes become shorter."""
    data, plain_length = shortest(_opened(name), plain)
    assert len(data) < 0.9 * len(plain) == 0.9 * plain_length
    assert _opened(name).decode(data, length=plain_length) == plain


@pytest.mark.parametrize("name", CODECS)
def test_what_does_not_become_shorter_stays_as_it_is(name: str) -> None:
    """Random bytes, and none at all, travel plain."""
    for length in (0, 1, 2, 4096, CHUNK_BYTES - 1):
        plain = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8).tobytes()
        assert shortest(_opened(name), plain) == (plain, 0)


def test_format_of_lz4() -> None:
    """The format of the proto file: the even part's length, the even part (here an LZ4 block) and
    the odd part (here plain)."""
    plain = bytes(byte for i in range(20) for byte in (0, i))
    kept = bytes.fromhex("0a000000" + "1a00010050" + "0000000000") + bytes(range(20))
    assert _opened("lz4").decode(kept, length=40) == plain
    made = _opened("lz4").encode(plain)
    even = int.from_bytes(made[:4], "little")
    assert (block.decompress(made[4 : 4 + even], uncompressed_size=20), made[4 + even :]) == (
        bytes(20),
        bytes(range(20)),
    )


@pytest.mark.parametrize("name", CODECS)
@given(plain=PLAIN, data=st.data())
def test_damaged(name: str, plain: bytes, data: st.DataObject) -> None:
    """Damaged or made-up data and false lengths give the due number of bytes or a CorruptRecord."""
    codec = _opened(name)
    raw = bytearray(codec.encode(plain) if data.draw(st.booleans()) else data.draw(st.binary(max_size=200)))
    for at in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=3)) if raw else ():
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=4))
    length = data.draw(st.one_of(st.just(len(plain)), st.integers(0, CHUNK_BYTES + 2)))
    with contextlib.suppress(CorruptRecord):
        assert len(codec.decode(bytes(raw), length=length)) == length


def _lz4_of(even: bytes, odd: bytes) -> bytes:
    return len(even).to_bytes(4, "little") + even + odd


BOMB = block.compress(bytes(64 << 20), store_size=False)
"""256 KiB that expand to 64 MiB."""
SHORT = block.compress(bytes(100), store_size=False)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", 2),
        (b"\1", 2),
        (_lz4_of(BOMB, BOMB), CHUNK_BYTES),
        (_lz4_of(BOMB, BOMB), (1 << 32) - 1),
        (_lz4_of(SHORT, SHORT), CHUNK_BYTES),
        (_lz4_of(SHORT, SHORT), 198),
        (_lz4_of(bytes(100), bytes(100)), 198),
        (_lz4_of(SHORT, SHORT)[:-1], 200),
        (_lz4_of(SHORT, SHORT) + b"\0", 200),
        (b"\xff\xff\xff\xff" + SHORT + SHORT, 200),
        (bytes(CHUNK_BYTES + 4), CHUNK_BYTES),
    ],
    ids=range(11),
)
def test_bounded(data: bytes, length: int) -> None:
    """Output beyond a chunk or of another length is CorruptRecord. The decoder never allocates more
    than one chunk and its planes."""
    codec = _opened("lz4")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord, match="chunk"):
            codec.decode(data, length=length)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * CHUNK_BYTES


def test_unknown_name() -> None:
    """An unknown name is refused by name, cut if long, with the known names; an empty name means no codec."""
    with pytest.raises(InvalidArgument, match="'zip' is unknown to the daemon; use 'lz4'"):
        open_codec("zip", whose="the daemon")
    with pytest.raises(InvalidArgument) as long:
        open_codec("x" * 100_000, whose="the daemon")
    assert len(str(long.value)) < 200
    assert open_codec("", whose="the daemon") is None


@pytest.mark.parametrize("name", CODECS)
def test_without_its_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without the package, the error names the remedy and the process that needs it."""
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(Unsupported, match=rf"that the daemon does not have .* pip install 'tierd\[{name}\]'"):
        open_codec(name, whose="the daemon")
