"""The trace format: reading, refusal, and conversion to hashes and bytes."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.cli.trace import Content, hash_ids, read_trace
from tierd.errors import InvalidArgument
from tierd.simulator.sequences import Request

LINES = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 512, "output_length": 5, "hash_ids": [0], "session": 4},
]


def written(path: Path, *, packed: bool) -> Path:
    """Writes LINES to a file."""
    text = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_read_gzip_or_plain(tmp_path: Path, packed: bool) -> None:
    """The content decides the format, not the name; unknown fields are ignored; a limit stops early."""
    path = written(tmp_path / "trace", packed=packed)
    whole = [Request(0, 1000, array("q", [0, 1])), Request(3000, 512, array("q", [0]))]
    assert list(read_trace(path)) == whole
    assert list(read_trace(path, limit=1)) == whole[:1]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"timestamp":0}',
        b'{"timestamp":0,"input_length":9000,"hash_ids":[1]}',
        b'{"timestamp":0,"input_length":0,"hash_ids":[]}',
        b'{"timestamp":0,"input_length":1e400,"hash_ids":[1]}',
        b'{"timestamp":0,"input_length":NaN,"hash_ids":[1]}',
        b'{"timestamp":-1,"input_length":1,"hash_ids":[1]}',
        b'{"timestamp":0,"input_length":1,"hash_ids":[-1]}',
        b'{"timestamp":0,"input_length":1,"hash_ids":[1.5]}',
        b'{"timestamp":0,"input_length":1,"hash_ids":[9223372036854775808]}',
        b'{"timestamp":0,"input_length":1,"hash_ids":[1],"tokens_per_block":0}',
        b'{"timestamp":0,"input_length":1,"hash_ids":[1],"namespace":-1}',
    ],
    ids=lambda line: line[:70].decode("latin-1"),
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    """A line that is not a request raises InvalidArgument with its line number."""
    path = written(tmp_path / "trace", packed=False)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(InvalidArgument, match="line 3"):
        list(read_trace(path))


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_cut_off_is_dropped_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool
) -> None:
    """A truncated file yields its whole lines and a warning; a file without a whole line is refused."""
    path = written(tmp_path / "trace", packed=False)
    whole, lines = list(read_trace(path)), path.read_bytes().splitlines(keepends=True)
    parts = [gzip.compress(line, mtime=0) for line in lines] if packed else lines
    ends = {len(parts[0]), len(parts[0]) - (not packed)}  # a plain line may lack only its newline
    for end in range(2, len(parts[0] + parts[1]) - 1):
        path.write_bytes((parts[0] + parts[1])[:end])
        found, told = found_in(path), capsys.readouterr().err
        assert found in ([], whole[:1], whole)
        assert (found == []) == (end < min(ends)) or packed
        assert ("cut off after line" in told) == bool(found and end not in ends)


def found_in(path: Path) -> list[Request]:
    """The requests of a file, or none if the file is refused."""
    try:
        return list(read_trace(path))
    except InvalidArgument:
        return []


def test_a_last_line_needs_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line without a newline is read without a warning; appended gzip members are one trace."""
    path = written(tmp_path / "trace", packed=False)
    path.write_bytes(gzip.compress(path.read_bytes()) + gzip.compress(path.read_bytes()[:-1]))
    assert (len(list(read_trace(path))), capsys.readouterr().err) == (4, "")


@pytest.mark.parametrize("at", [0, 3, 20, 60, -6])
def test_a_damaged_archive_is_refused(tmp_path: Path, at: int) -> None:
    """A gzip file with a wrong byte raises InvalidArgument, never a traceback or an invented request."""
    path = written(tmp_path / "trace", packed=True)
    raw, whole = bytearray(path.read_bytes()), list(read_trace(path))
    raw[at] ^= 0x55
    path.write_bytes(raw)
    assert found_in(path) in ([], whole)  # whole: the byte belongs to a header field without effect


def test_no_line_is_read_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than any request is refused before it fills the memory."""
    monkeypatch.setattr("tierd.cli.trace.LINE_LIMIT_BYTES", 1000)
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(InvalidArgument, match="more than 1000 bytes"):
        list(read_trace(path))


def test_a_recording_says_how_large_its_blocks_are(tmp_path: Path) -> None:
    """Block tokens, block bytes and namespace come from the line; a time that would go back stays."""
    path = tmp_path / "trace"
    line = {"timestamp": 9, "input_length": 17, "hash_ids": [3, 4], "tokens_per_block": 16, "block_bytes": 4096}
    lines = [line | {"namespace": 1}, line | {"timestamp": 5}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    first, second = read_trace(path)
    assert first == Request(9, 17, array("q", [3, 4]), block_tokens=16, block_bytes=4096, namespace=1)
    assert (second.time_ms, second.namespace) == (9, 0)


def test_hashes_follow_id_and_namespace() -> None:
    """The same id gives the same hash in one namespace and another hash in another namespace."""
    here, there = hash_ids([7, 7, 8], digest=b"a" * 32), hash_ids([7], digest=b"b" * 32)
    assert (here[0] == here[1]).all() and (here[0] != here[2]).any() and (here[0] != there[0]).any()


@given(st.integers(1, 5000), st.integers(0, 4999))
def test_content_tells_blocks_and_places_apart(length: int, place: int) -> None:
    """A block's bytes match themselves, but not another block's, nor themselves with one changed byte."""
    content = Content(5000)
    one, two = hash_ids([1, 2], digest=bytes(32))
    held = content.of(one, length=length).copy()
    assert content.matches(one, held)
    assert length < 8 or not content.matches(two, held)
    held[place % length] ^= 1
    assert not content.matches(one, held)


def test_content_has_no_repeats() -> None:
    """No two words of a block are equal, so a test detects shifted bytes."""
    words = Content(1 << 16).of(hash_ids([3], digest=bytes(32))[0], length=1 << 16).view(np.uint64)
    assert len(np.unique(words)) == len(words)
