"""Identity and geometry of a block: its namespace, its hash in a chain, its size, its slices.

Shared by daemon and SDK. A block is named by (namespace, block hash). The hash covers every token
before the block's end: a prefix of equal hashes is a prefix of equal tokens. Everything that
changes the bytes of KV is in the namespace's digest or its rank. A namespace has one id per rank,
`id + rank`; the digest, and so the hashes, are the same for all ranks.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.core.formats.layout import SLICE_WORDS_MAX
from tierd.core.formats.model import HASH_BYTES, PAGE_ALIGN_BYTES, ROOT, SLICE_MAX_BYTES
from tierd.errors import InvalidArgument

U4_MAX = (1 << 32) - 1
TEXT_LIMIT = 4096
"""Most characters of each text of a namespace, which every store keeps; as of a path."""
CLASS_STEPS = 16
"""Size classes in each doubling: at most 1/16 of a page is unused."""
CODEC = re.compile(r"([a-z0-9][a-z0-9-]{0,63}(@[0-9a-f]{32})?)?")
"""A codec in a namespace: its name and, if it is calibrated, the calibration's hash."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Precisions of KV, bytes per value."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape behind a block's bytes, for codecs and kernels; zeros mean opaque.

    Bytes of a block of t tokens are layer-major, per layer K then V. Each of the two has t *
    kv_heads * head_dim elements of dtype. `layout` names their order ("NHD": token, head, channel;
    "HND": head, token, channel). Codecs take "bfloat16" and "float16"; blocks of other dtypes stay
    as they are.
    """

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    layout: str = "NHD"


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that decides whether two blocks of equal tokens hold equal KV. The daemon adds
    tenant and epoch.

    block_bytes: length of a full block of one rank. group: attention group of a hybrid model.
    salt: separates requests that are equal otherwise and must not share.

    codec: how engines encode the blocks that they store, "" for not at all, such as "rot-4-4" or
    "NAME@HASH" with the calibration's hash. Blocks then have different lengths, and block_bytes is
    the greatest. The daemon stores these blocks as they come.
    """

    model: str
    tokens_per_block: int
    block_bytes: int
    weights_digest: str = ""
    adapter: str = ""
    group: str = ""
    salt: str = ""
    rank_count: int = 1
    geometry: KVGeometry = KVGeometry()
    codec: str = ""

    def checked(self) -> NamespaceSpec:
        """The spec itself. Raises InvalidArgument for an impossible one."""
        for name, value, top in (
            ("tokens_per_block", self.tokens_per_block, 1 << 20),
            ("block_bytes", self.block_bytes, 1 << 31),
            ("rank_count", self.rank_count, 4096),
        ):
            whole(f"namespace.{name}", value, top, least=1, remedy="set it from the model's configuration")
        for name in ("layers", "kv_heads", "head_dim"):
            whole(
                f"namespace.geometry.{name}", getattr(self.geometry, name), U4_MAX, remedy="correct it, or leave it out"
            )
        for name, text in self._texts().items():
            if not isinstance(text, str) or text != text.encode(errors="ignore").decode():
                raise InvalidArgument(f"namespace.{name}: {text!r} is no text in UTF-8; give a name or a digest")
        if not self.model:
            raise InvalidArgument("namespace.model: empty; name the model")
        if not CODEC.fullmatch(self.codec):
            raise InvalidArgument(
                f"namespace.codec: {self.codec!r:.100} is no codec; give NAME, or NAME@HASH with the 32 hex digits of "
                "a calibration's hash"
            )
        return self

    def fields(self) -> dict[str, Any]:
        """Every field by name, as digests and records have them. Without a codec its field is
        missing: namespaces older than codecs keep their digest."""
        named = asdict(self)
        return named if self.codec else {name: value for name, value in named.items() if name != "codec"}

    def _texts(self) -> dict[str, str]:
        texts = {name: getattr(self, name) for name in ("model", "weights_digest", "adapter", "group", "salt", "codec")}
        return texts | {"dtype": self.geometry.dtype, "layout": self.geometry.layout}

    def check_texts(self) -> None:
        """Checks the lengths of a new spec's texts, not of stored ones. Raises InvalidArgument."""
        for name, text in self._texts().items():
            if len(text) > TEXT_LIMIT:
                raise InvalidArgument(
                    f"namespace.{name}: {len(text)} characters, the limit is {TEXT_LIMIT}; give a name or a digest"
                )


@dataclass(frozen=True, slots=True)
class Namespace:
    """A registered namespace. id: of rank 0; ranks follow it. digest: 32 bytes, the start of every
    chain of hashes."""

    id: int
    tenant: str
    domain: int
    epoch: int
    digest: bytes
    spec: NamespaceSpec

    @property
    def ids(self) -> range:
        """The ids of all ranks."""
        return range(self.id, self.id + self.spec.rank_count)


def namespace_digest(spec: NamespaceSpec, *, tenant: str, epoch: int) -> bytes:
    """SHA-256 over the canonical JSON of the spec's fields, tenant and epoch."""
    text = json.dumps({"tenant": tenant, "epoch": epoch, "spec": spec.fields()}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def bumped(namespace: Namespace, *, namespace_id: int) -> Namespace:
    """The namespace in its next epoch, under a new id. Older blocks cannot be named any more."""
    epoch = namespace.epoch + 1
    digest = namespace_digest(namespace.spec, tenant=namespace.tenant, epoch=epoch)
    return replace(namespace, id=namespace_id, epoch=epoch, digest=digest)


def hash_block(parent: bytes, tokens: NDArray[np.uint32], digest: bytes) -> bytes:
    """H(namespace digest, parent hash, number of tokens, tokens), SHA-256, 32 bytes."""
    data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    return hashlib.sha256(b"".join((digest, parent, len(data).to_bytes(8, "little"), data))).digest()


def hash_tokens(
    tokens: Sequence[int] | NDArray[np.integer],
    *,
    digest: bytes,
    tokens_per_block: int,
    parent: bytes = ROOT,
    with_tail: bool = False,
) -> NDArray[np.uint8]:
    """The chain of block hashes of a sequence: uint8 [blocks, 32]. with_tail: a short last block
    too."""
    array = token_array(tokens)
    if len(parent) != HASH_BYTES:
        raise InvalidArgument(f"parent: {len(parent)} bytes instead of {HASH_BYTES}; pass the hash of the block before")
    hashes = bytearray()
    for start, stop in block_spans(len(array), tokens_per_block, with_tail=with_tail):
        parent = hash_block(parent, array[start:stop], digest)
        hashes += parent
    return np.frombuffer(bytes(hashes), dtype=np.uint8).reshape(-1, HASH_BYTES)


def token_array(tokens: Any) -> NDArray[np.uint32]:
    """Tokens as u4 [n], ready to hash. Raises InvalidArgument unless they are one sequence of whole
    numbers from 0 to 2^32 - 1."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"tokens: {error}; pass one sequence of token ids") from error
    if array.ndim != 1:
        raise InvalidArgument(f"tokens: {array.ndim} dimensions instead of 1; pass one sequence")
    if len(array) and array.dtype.kind not in "iu":
        raise InvalidArgument(f"tokens: {array.dtype}, such as {array[0]!r}; pass whole numbers below 2^32")
    if len(array) and array.dtype != np.uint32 and not 0 <= int(array.min()) <= int(array.max()) < 1 << 32:
        raise InvalidArgument(f"tokens: {array.min()} to {array.max()} are outside 0 to 2^32 - 1; pass token ids")
    return array.astype("<u4", copy=False)


def whole(thing: str, value: Any, most: int, *, least: int = 0, remedy: str = "give one") -> int:
    """The value as an int. Raises InvalidArgument unless it is a whole number within the bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise InvalidArgument(f"{thing}: {value!r} is no integer from {least} to {most}; {remedy}")
    return number


def text(thing: str, value: Any) -> str:
    """The value, if it is text. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{thing}: {value!r:.80} is no text; pass a str")
    return value


def fold_hashes(hashes: Sequence[bytes], *, digest: bytes) -> NDArray[np.uint8]:
    """An engine's own block hashes, of any length, bound to a namespace: uint8 [blocks, 32]."""
    for h in hashes:
        if not isinstance(h, bytes | bytearray | memoryview):
            raise InvalidArgument(f"hashes: {h!r:.80} is no bytes; pass an engine's block hashes")
    folded = b"".join(hashlib.sha256(digest + h).digest() for h in hashes)
    return np.frombuffer(folded, dtype=np.uint8).reshape(-1, HASH_BYTES)


def block_spans(tokens: int, tokens_per_block: int, *, with_tail: bool = False) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of a sequence of so many tokens."""
    full = tokens - tokens % tokens_per_block
    for start in range(0, full, tokens_per_block):
        yield start, start + tokens_per_block
    if with_tail and full < tokens:
        yield full, tokens


def size_class(length: int) -> int:
    """The page size for a block: a multiple of 4 KiB, at most 1/16 above the least that fits."""
    units = max(1, -(-length // PAGE_ALIGN_BYTES))
    step = 1 << max(0, (units - 1).bit_length() - CLASS_STEPS.bit_length())
    return -(-units // step) * step * PAGE_ALIGN_BYTES


def slice_lengths(length: int, layers: int) -> list[int]:
    """Lengths of a block's slices in bytes, in order, as `slice_cut` says."""
    cut = slice_cut(length, layers)
    return ([cut.piece] * (cut.pieces - 1) + [cut.last]) * cut.layers


class Cut(NamedTuple):
    """Division of a block into slices. Each of `layers` layers has `pieces` slices of `piece`
    bytes; its last one has `last`."""

    piece: int
    pieces: int
    last: int
    layers: int


def slice_cut(length: int, layers: int) -> Cut:
    """Each slice is a layer of the block, or an even piece of one of at most 256 KiB.

    A block counts as one layer in three cases. It has none (opaque); its length is no multiple of
    them; or their slices would not fit the page's slice table. Layers that are too thin or too many
    do not fit (`tierd.core.formats.layout.slice_words`). Only blocks above 120 MiB have longer
    slices.
    """
    if length <= 0:
        return Cut(0, 1, 0, 0)
    layer = length // layers if layers > 0 and length % layers == 0 else length
    if layer < PAGE_ALIGN_BYTES or -(-layer // SLICE_MAX_BYTES) * (length // layer) > SLICE_WORDS_MAX:
        layer = length
    pieces = min(-(-layer // SLICE_MAX_BYTES), SLICE_WORDS_MAX)
    piece = -(-layer // pieces)
    return Cut(piece, pieces, layer - piece * (pieces - 1), length // layer)
