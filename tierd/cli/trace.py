"""Request traces: JSON lines, gzip or plain, one request a line, as published or recorded.

This module checks a trace's values, and makes block hashes and bytes for its block ids. A request's
fields agree with one another, and time never goes back. The same id always gives the same hash and
bytes. Arrays hold the ids: 8 bytes each, against forty for a Python number.

A recording has further fields: tokens_per_block (else 512), block_bytes (of a full block),
namespace (a number).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.model import HASH_BYTES
from tierd.errors import InvalidArgument
from tierd.simulator.sequences import TOKENS_PER_BLOCK, Request

GZIP_MAGIC = b"\x1f\x8b"
BUFFER_BYTES = 1 << 20
LINE_LIMIT_BYTES = 64 << 20
"""Longest line: some millions of blocks."""
NUMBER_LIMIT = 1 << 32
"""Limit of tokens and bytes, as in the daemon."""
STRIDE = 0x9E37_79B9_7F4A_7C15
"""Odd, so that the words of one block all differ."""


def read_trace(path: Path, *, limit: int | None = None) -> Iterator[Request]:
    """The requests of a file, or the first so many. A time that goes back is raised to the latest.

    A last line that was cut off, as by a killed daemon, is dropped with a note on stderr. Raises
    InvalidArgument, which names the line.
    """
    number = count = time_ms = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(lines_of(unpacked(file)), 1):
                if count == limit:
                    return
                if line.strip():
                    request = parsed(line, where=f"trace {path.name}, line {number}")
                    count, time_ms = count + 1, max(time_ms, request.time_ms)
                    yield replace(request, time_ms=time_ms)
    except EOFError as cut:
        if not count:
            raise InvalidArgument(f"trace {path}: cut off before its first line ended ({cut}); copy it again") from cut
        click.echo(f"trace {path.name}: cut off after line {number}; the rest is ignored", err=True)
    except (OSError, zlib.error) as error:
        at = f"after line {number}" if number else "at its beginning"
        raise InvalidArgument(
            f"trace {path}: cannot be read {at} ({error}); give a whole file of JSON lines, gzip or plain"
        ) from error


def unpacked(file: BinaryIO) -> BinaryIO:
    """The file's text, decompressed if it is gzip."""
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER_BYTES) if magic == GZIP_MAGIC else file


def lines_of(text: BinaryIO) -> Iterator[bytes]:
    """Its lines. Raises EOFError for a last line that is cut off, OSError for one that is too long."""
    while line := text.readline(LINE_LIMIT_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == LINE_LIMIT_BYTES:
                raise OSError(f"a line of more than {LINE_LIMIT_BYTES} bytes")
            check_whole(line)
        yield line


def check_whole(line: bytes) -> None:
    """Raises EOFError for an incomplete line."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        raise EOFError("its last line is incomplete") from None


def parsed(line: bytes, *, where: str) -> Request:
    """The request of a line. Raises InvalidArgument."""
    try:
        return request_of(json.loads(line))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not a request ({error!r:.300}); compare it with line 1") from error


def request_of(fields: dict[str, Any]) -> Request:
    """The request of a line's fields. Raises ValueError, KeyError, TypeError or OverflowError."""
    request = Request(
        int(fields["timestamp"]),
        int(fields["input_length"]),
        array("q", fields["hash_ids"]),
        int(fields.get("tokens_per_block", TOKENS_PER_BLOCK)),
        int(fields.get("block_bytes", 0)),
        int(fields.get("namespace", 0)),
    )
    check_numbers(request)
    blocks = -(-request.tokens // request.block_tokens)
    if blocks != len(request.blocks):
        raise ValueError(f"{request.tokens} tokens need {blocks} hash_ids, {len(request.blocks)} are listed")
    if min(request.blocks) < 0:
        raise ValueError(f"hash_ids: {min(request.blocks)} is below 0")
    return request


def check_numbers(request: Request) -> None:
    """Raises ValueError for a number outside its limits."""
    for name, least in (("time_ms", 0), ("tokens", 1), ("block_tokens", 1), ("block_bytes", 0), ("namespace", 0)):
        value, limit = getattr(request, name), 1 << 62 if name == "time_ms" else NUMBER_LIMIT
        if not least <= value < limit:
            raise ValueError(f"{name}: {value} is outside {least} to {limit - 1}")


def hash_ids(ids: Sequence[int], *, digest: bytes) -> NDArray[np.uint8]:
    """Block hashes of trace ids in a namespace: uint8 [blocks, 32]. An id stands for its whole
    prefix, so parents are not hashed."""
    raw = b"".join(hashlib.sha256(digest + int(i).to_bytes(8, "little")).digest() for i in ids)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, HASH_BYTES)


class Content:
    """Bytes of blocks as a function of their hashes: cheap to make and check, and no two words equal.

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
        """Whether the held bytes equal those of `of`."""
        return bool(np.array_equal(self.of(block_hash, length=len(held)), held))
