"""The blocks of a prompt in a namespace: a file of token ids, hashed as the namespace's clients do.

Clients of the SDK name blocks by tierd's own chain of hashes. vLLM folds its own hashes into the
namespace. With `sha256_cbor` these follow from the tokens and from vLLM's seed. A connected
scheduler tells the seed. Tokens never leave this process.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd._proto import admin_pb2 as pb
from tierd.core.formats.block import fold_hashes, hash_tokens
from tierd.errors import InvalidArgument, NotFound, Unsupported

TOKENS_BYTES = 64 << 20
"""Longest token file."""
COMPUTED = "sha256_cbor"
"""The algorithm of vLLM whose hashes can be computed here."""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace of the daemon. text: its record. engine: the words of a connected engine that
    hashes for it; empty: none."""

    id: int
    is_current: bool
    text: dict[str, Any]
    engine: dict[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of its spec."""
        spec: dict[str, Any] = self.text["spec"]
        return spec

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return int(self.spec["tokens_per_block"])

    def hashes(self, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """The block hashes of a prompt, uint8 [blocks, 32]; of vLLM's without a short last one.
        Raises Unsupported."""
        digest, algorithm = bytes.fromhex(self.text["digest"]), self.engine.get("hash_algorithm", "")
        if not algorithm:
            return hash_tokens(tokens, digest=digest, tokens_per_block=self.size, with_tail=True)
        if algorithm != COMPUTED or not self.engine.get("hash_seed"):
            raise Unsupported(
                f"namespace {self.id}: {self.engine.get('engine')} names its blocks by {algorithm}, which cannot be "
                "computed here; explain a request's id or a block's hash"
            )
        piece = min(int(size) for size in self.engine["tokens_per_block"].split("/"))
        names = vllm_hashes(tokens, seed=self.engine["hash_seed"], size=piece)
        per_block = self.size // piece
        return fold_hashes(names[per_block - 1 :: per_block], digest=digest)


def vllm_hashes(tokens: Sequence[int], *, seed: str, size: int) -> list[bytes]:
    """vLLM's hashes by `sha256_cbor` of whole blocks of text, without adapter or salt."""
    parent, found = _sha256(_cbor(seed)), list[bytes]()
    for start in range(0, len(tokens) - size + 1, size):
        parent = _sha256(_cbor((parent, tuple(tokens[start : start + size]), None)))
        found.append(parent)
    return found


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _cbor(value: bytes | str | int | tuple[Any, ...] | None) -> bytes:
    """Canonical CBOR (RFC 8949, section 4.2)."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _head(major: int, number: int) -> bytes:
    """A type and a number in the fewest bytes."""
    if number < 24:
        return bytes([major << 5 | number])
    width = next(i for i in range(4) if number < 1 << (8 << i))
    return bytes([major << 5 | 24 + width]) + struct.pack(">" + "BHIQ"[width], number)


def tokens_of(path: Path) -> list[int]:
    """The token ids in a file. Raises InvalidArgument."""
    if path.stat().st_size > TOKENS_BYTES:
        raise InvalidArgument(f"{path}: above {TOKENS_BYTES >> 20} MiB; a file has one prompt's token ids")
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        found = json.loads(text) if text.startswith("[") else text.split()
        tokens = [int(token) for token in found]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path}: no list of token ids ({error}); write `[1, 2, 3]` or `1 2 3`") from None
    if not tokens:
        raise InvalidArgument(f"{path}: no token ids; write `[1, 2, 3]` or `1 2 3`")
    if not 0 <= min(tokens) <= max(tokens) < 1 << 32:
        raise InvalidArgument(f"{path}: {min(tokens)} to {max(tokens)} are no token ids; they fit into 32 bits")
    return tokens


def spaces_of(namespaces: Iterable[pb.NamespaceInfo], sessions: Iterable[pb.SessionInfo]) -> list[Space]:
    """All namespaces, each with the words of an engine that hashes for it."""
    engines: dict[int, dict[str, str]] = {}
    for session in sessions:
        if session.engine.get("hash_algorithm"):
            for number in session.namespaces:
                if session.engine.get("hash_seed") or number not in engines:
                    engines[number] = dict(session.engine)
    return [Space(row.id, row.current, json.loads(row.text), engines.get(row.id, {})) for row in namespaces]


def chosen(spaces: Sequence[Space], *, namespace: int | None, model: str) -> Space:
    """The namespace of a prompt. Raises InvalidArgument, NotFound."""
    fits = [
        one
        for one in spaces
        if (one.id == namespace if namespace is not None else one.is_current and model in ("", one.spec["model"]))
    ]
    if not fits:
        raise NotFound(f"namespace {namespace or model}: unknown; list them with `tierctl namespaces`")
    if len(fits) > 1:
        words = [(one.id, one.spec["model"], one.spec.get("adapter", ""), one.text["tenant"]) for one in fits[:8]]
        names = ", ".join(f"{number} ({', '.join(filter(None, parts))})" for number, *parts in words)
        raise InvalidArgument(
            f"namespace: {len(fits)} fit: {names}; choose one with --namespace, `tierctl namespaces` shows all"
        )
    return fits[0]
