"""Request traces: JSON lines, gzip or plain, one request a line, as the serving world publishes them.

Purpose: a trace as values, each line checked; the block hashes and the bytes that stand for its block ids. Non-purpose: replaying.
Invariants: a request's fields agree with one another; the same id always gives the same hash and the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tierd.core.model import HASH_BYTES
from tierd.errors import InvalidArgument

TOKENS_PER_BLOCK = 512
"""Of every trace in this format."""
GZIP_MAGIC = b"\x1f\x8b"
STRIDE = 0x9E37_79B9_7F4A_7C15
"""Odd, so that the words of one block all differ."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. time_ms: arrival, from the start of the trace. blocks: ids, first to last; the last may be short."""

    time_ms: int
    tokens: int
    blocks: tuple[int, ...]

    @property
    def last_tokens(self) -> int:
        """Tokens in the last block."""
        return self.tokens - TOKENS_PER_BLOCK * (len(self.blocks) - 1)


def read_trace(path: Path, *, limit: int | None = None) -> list[Request]:
    """The requests of a file, or the first so many. Raises InvalidArgument naming the line."""
    try:
        with path.open("rb") as file:
            return list(parse_lines(unpacked(file), name=path.name, limit=limit))
    except (OSError, EOFError) as error:
        raise InvalidArgument(
            f"trace {path}: cannot be read ({error}); give a file of JSON lines, gzip or plain"
        ) from error


def unpacked(file: BinaryIO) -> BinaryIO:
    """The file's text, whether it is compressed or not."""
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if magic == GZIP_MAGIC else file


def parse_lines(lines: BinaryIO, *, name: str, limit: int | None) -> Iterator[Request]:
    """Requests of lines; blank lines are skipped. Raises InvalidArgument."""
    count = 0
    for number, line in enumerate(lines, 1):
        if limit is not None and count >= limit:
            return
        if line.strip():
            count += 1
            try:
                yield parse_request(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgument(
                    f"trace {name}, line {number}: not a request ({error!r}); compare it with line 1"
                ) from error


def parse_request(fields: dict[str, Any]) -> Request:
    """One request. Raises ValueError, KeyError or TypeError for what is none."""
    request = Request(int(fields["timestamp"]), int(fields["input_length"]), tuple(int(i) for i in fields["hash_ids"]))
    blocks = -(-request.tokens // TOKENS_PER_BLOCK)
    if request.tokens < 1 or blocks != len(request.blocks):
        raise ValueError(f"{request.tokens} tokens need {blocks} hash_ids, {len(request.blocks)} are listed")
    return request


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
