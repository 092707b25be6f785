"""Request traces: JSON lines, gzip or plain, one request a line, as the serving world publishes them and as a daemon records them.

Purpose: a trace as values, each line checked; the block hashes and the bytes that stand for its block ids. Non-purpose: replaying, recording.
Invariants: a request's fields agree with one another, and time never goes back; the same id always gives the same hash and the same bytes.
A trace is held in columns: 8 bytes an access, where Python's numbers would take forty.

Fields beyond the published ones, which a recording has: tokens_per_block (else 512), block_bytes (of a full block), namespace (a number).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import click
import numpy as np
from numpy.typing import NDArray

from tierd.core.model import HASH_BYTES
from tierd.errors import InvalidArgument

TOKENS_PER_BLOCK = 512
"""Of a trace whose lines do not say."""
GZIP_MAGIC = b"\x1f\x8b"
BUFFER_BYTES = 1 << 20
LINE_LIMIT_BYTES = 64 << 20
"""Of a line: some millions of blocks."""
NUMBER_LIMIT = 1 << 32
"""Of tokens and bytes, as the daemon counts them."""
HEAD = 5
"""Numbers of a request beside its ids."""
STRIDE = 0x9E37_79B9_7F4A_7C15
"""Odd, so that the words of one block all differ."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. time_ms: arrival, from the start of the trace. blocks: ids, first to last; the last may be short.

    block_tokens: of a full block; block_bytes: its size where it was recorded, 0: not known. namespace: a number, in recordings of several.
    """

    time_ms: int
    tokens: int
    blocks: tuple[int, ...]
    block_tokens: int = TOKENS_PER_BLOCK
    block_bytes: int = 0
    namespace: int = 0


class Trace(Sequence[Request]):
    """The requests of a file, in columns. ids: of all requests, one after another; request i has those from starts[i] to starts[i + 1]."""

    def __init__(self) -> None:
        self.ids, self.starts = array("q"), array("q", [0])
        self._heads = array("q")

    def add(self, request: Request, ids: array[int]) -> None:
        """Appends a request, whose own blocks are not looked at, with these ids. Time does not go back: it stays."""
        time_ms = max(request.time_ms, self._heads[-HEAD] if self._heads else 0)
        self._heads.extend(
            (time_ms, request.tokens, request.block_tokens, request.block_bytes, request.namespace),
        )
        self.ids.extend(ids)
        self.starts.append(len(self.ids))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, at: int) -> Request: ...
    @overload
    def __getitem__(self, at: slice) -> list[Request]: ...

    def __getitem__(self, at: int | slice) -> Request | list[Request]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        time_ms, tokens, block_tokens, block_bytes, namespace = self._heads[i * HEAD : (i + 1) * HEAD]
        blocks = tuple(self.ids[self.starts[i] : self.starts[i + 1]])
        return Request(time_ms, tokens, blocks, block_tokens, block_bytes, namespace)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Request.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """The requests of a file, or the first so many. A last line that was cut off, as a daemon that is killed may leave it, is dropped
    with a word on stderr. Raises InvalidArgument naming the line."""
    trace, number = Trace(), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(lines_of(unpacked(file)), 1):
                if limit is not None and len(trace) >= limit:
                    return trace
                if line.strip():
                    trace.add(*parsed(line, where=f"trace {path.name}, line {number}"))
    except EOFError as cut:
        if not len(trace):
            raise InvalidArgument(f"trace {path}: cut off before its first line ended ({cut}); copy it again") from cut
        click.echo(f"trace {path.name}: cut off after line {number}; what follows is left out", err=True)
    except (OSError, zlib.error) as error:
        at = f"after line {number}" if number else "at its beginning"
        raise InvalidArgument(
            f"trace {path}: cannot be read {at} ({error}); give a whole file of JSON lines, gzip or plain"
        ) from error
    return trace


def unpacked(file: BinaryIO) -> BinaryIO:
    """The file's text, whether it is compressed or not."""
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER_BYTES) if magic == GZIP_MAGIC else file


def lines_of(text: BinaryIO) -> Iterator[bytes]:
    """Its lines. Raises EOFError for a last one that was cut off: it has no end and is no JSON; OSError for one that has none in sight."""
    while line := text.readline(LINE_LIMIT_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == LINE_LIMIT_BYTES:
                raise OSError(f"a line of more than {LINE_LIMIT_BYTES} bytes")
            check_whole(line)
        yield line


def check_whole(line: bytes) -> None:
    """Raises EOFError for what is the beginning of a line."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        raise EOFError("its last line has no end") from None


def parsed(line: bytes, *, where: str) -> tuple[Request, array[int]]:
    """The request of a line, without its blocks, and their ids. Raises InvalidArgument."""
    try:
        fields = json.loads(line)
        ids = array("q", fields["hash_ids"])
        return head_of(fields, ids), ids
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not a request ({error!r:.300}); compare it with line 1") from error


def head_of(fields: dict[str, Any], ids: array[int]) -> Request:
    """A request without its blocks. Raises ValueError, KeyError, TypeError or OverflowError for what is none."""
    request = Request(
        int(fields["timestamp"]),
        int(fields["input_length"]),
        (),
        int(fields.get("tokens_per_block", TOKENS_PER_BLOCK)),
        int(fields.get("block_bytes", 0)),
        int(fields.get("namespace", 0)),
    )
    check_numbers(request)
    blocks = -(-request.tokens // request.block_tokens)
    if blocks != len(ids):
        raise ValueError(f"{request.tokens} tokens need {blocks} hash_ids, {len(ids)} are listed")
    if min(ids) < 0:
        raise ValueError(f"hash_ids: {min(ids)} is below 0")
    return request


def check_numbers(request: Request) -> None:
    """Raises ValueError for a number that no request has."""
    for name, least in (("time_ms", 0), ("tokens", 1), ("block_tokens", 1), ("block_bytes", 0), ("namespace", 0)):
        value, limit = getattr(request, name), 1 << 62 if name == "time_ms" else NUMBER_LIMIT
        if not least <= value < limit:
            raise ValueError(f"{name}: {value} is outside {least} to {limit - 1}")


def hash_ids(ids: Sequence[int], *, digest: bytes) -> NDArray[np.uint8]:
    """The block hashes of trace ids in a namespace: uint8 [blocks, 32]. An id names its whole prefix, so no parent goes in."""
    raw = b"".join(hashlib.sha256(digest + int(i).to_bytes(8, "little")).digest() for i in ids)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, HASH_BYTES)


class Content:
    """Bytes of blocks as a function of their hashes: cheap to make, cheap to check, unlike in every word.

    block_bytes: of the longest block; any number of bytes, not only whole words.
    """

    def __init__(self, block_bytes: int) -> None:
        self._steps = np.arange(-(-block_bytes // 8), dtype=np.uint64) * np.uint64(STRIDE)
        self._words = np.empty_like(self._steps)

    def of(self, block_hash: NDArray[np.uint8], *, length: int) -> NDArray[np.uint8]:
        """The block's bytes: uint8 [length]. Valid until the next call."""
        key = np.frombuffer(block_hash.tobytes()[:8], dtype="<u8")[0]
        np.bitwise_xor(self._steps, key, out=self._words)
        return self._words.view(np.uint8)[:length]

    def matches(self, block_hash: NDArray[np.uint8], held: NDArray[np.uint8]) -> bool:
        """Whether so many bytes are what `of` gives."""
        return bool(np.array_equal(self.of(block_hash, length=len(held)), held))
