"""The trace format: read, refused, and turned into hashes and bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.cli.trace import Content, Request, hash_ids, read_trace
from tierd.errors import InvalidArgument

LINES = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 512, "output_length": 5, "hash_ids": [0], "session": 4},
]


def written(path: Path, *, packed: bool) -> Path:
    """The lines in a file."""
    text = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_gzip_or_plain(tmp_path: Path, packed: bool) -> None:
    """The content decides, not the name; unknown fields are ignored; a limit stops early."""
    path = written(tmp_path / "trace", packed=packed)
    assert read_trace(path) == [Request(0, 1000, (0, 1)), Request(3000, 512, (0,))]
    assert read_trace(path, limit=1)[0].last_tokens == 488


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"timestamp":0,"input_length":9000,"hash_ids":[1]}', b"\xff", b'{"timestamp":0}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    """A line that is no request raises InvalidArgument with its number."""
    path = written(tmp_path / "trace", packed=False)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(InvalidArgument, match="line 3"):
        read_trace(path)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    """A truncated gzip file raises InvalidArgument, not a traceback."""
    path = written(tmp_path / "trace", packed=True)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(path)


def test_hashes_follow_id_and_namespace() -> None:
    """The same id gives the same hash in one namespace and another in another."""
    here, there = hash_ids([7, 7, 8], digest=b"a" * 32), hash_ids([7], digest=b"b" * 32)
    assert (here[0] == here[1]).all() and (here[0] != here[2]).any() and (here[0] != there[0]).any()


@given(st.integers(1, 5000), st.integers(0, 4999))
def test_content_tells_blocks_and_places_apart(length: int, place: int) -> None:
    """A block's bytes match themselves, and neither another block's nor themselves with one byte changed."""
    content = Content(5000)
    one, two = hash_ids([1, 2], digest=bytes(32))
    held = content.of(one, length=length).copy()
    assert content.matches(one, held)
    assert length < 8 or not content.matches(two, held)
    held[place % length] ^= 1
    assert not content.matches(one, held)


def test_content_has_no_repeats() -> None:
    """No two words of a block are equal, so shifted bytes are found."""
    words = Content(1 << 16).of(hash_ids([3], digest=bytes(32))[0], length=1 << 16).view(np.uint64)
    assert len(np.unique(words)) == len(words)
