"""Pages of rotated codes (rot-8-8, rot-8-4, rot-4-4): encoded, decoded and attended to in place.

`encode_pages` and `decode_pages` give the bytes of `tierd.codecs`, whose FORMAT.md has the layout.
`PagedDecode` takes `CodedPages`. A tail of 16-bit pages is a second call, and `merge_parts` joins
both. It checks arguments, fills in parameters and launches, and reads nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tierd.errors import InvalidArgument
from tierd.kernels import params
from tierd.kernels.buffers import Array, Buffer
from tierd.kernels.fitting import ROTATED, TILE_TOKENS, rotated_tile_bytes
from tierd.kernels.library import Library

BITS = {"rot-8-8": (8, 8), "rot-8-4": (8, 4), "rot-4-4": (4, 4)}
"""Bits of a key's and of a value's code, by codec."""
ROTATED_DIMS = (64, 128, 256)
NARROW_GROUP = 8
"""The most query heads per kv head of decode's faster kernels."""
WIDE_DIMS = (64, 128)
"""The head dims of coded pages with kernels for more of them."""
ROW_PADDING, CODE_PADDING = 32, 16
"""Bytes of shared memory behind a row of values, and of its codes, as in rot_pages.cu."""
ROTATE_BLOCKS = 132
"""Enough to keep a link to the host busy."""


class Bits(NamedTuple):
    """Of a code. kind: the codec in names of kernels."""

    key: int
    value: int
    kind: str


class Strides(NamedTuple):
    """Bytes from one layer, one of keys and values, token and kv head of a block to the next."""

    layer: int
    kind: int
    token: int
    head: int


@dataclass(frozen=True, slots=True)
class CodedPages:
    """Codes of one layer in a pool.

    tiles: u8 [pages, kv_heads, page_tokens / 16, `tile_bytes`], contiguous but for pages and heads.
    """

    tiles: Array
    codec: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        """As in KvPages: keys and values have one address."""
        return (self.tiles, self.tiles, None, None)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Blocks and their codec. A block is [layers, 2, tokens, kv_heads, head_dim] (NHD), or has kv
    heads outside of tokens (HND). dtype: bf16 or f16."""

    codec: str
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    is_hnd: bool = False

    @property
    def plain_bytes(self) -> int:
        """Of one block."""
        return 2 * self.layers * self.kv_heads * self.tokens * self.head_dim * 2

    @property
    def tiles(self) -> int:
        """Of its payload."""
        return self.layers * self.kv_heads * -(-self.tokens // TILE_TOKENS)

    @property
    def coded_bytes(self) -> int:
        """Of its payload. Raises InvalidArgument."""
        return self.tiles * tile_bytes(self.codec, self.head_dim)

    def strides(self) -> Strides:
        """In bytes."""
        row = 2 * self.head_dim
        kind = row * self.tokens * self.kv_heads
        within = (row, row * self.tokens) if self.is_hnd else (row * self.kv_heads, row)
        return Strides(2 * kind, kind, *within)


def bits_of(codec: str) -> Bits:
    """Raises InvalidArgument for a codec that kernels do not have."""
    if codec not in BITS:
        raise InvalidArgument(f"codec: no kernel has {codec[:32]!r}; use one of {', '.join(BITS)}")
    key, value = BITS[codec]
    return Bits(key, value, f"{ROTATED}{key}{value}")


def tile_bytes(codec: str, head_dim: int) -> int:
    """Bytes of 16 tokens of one kv head. Raises InvalidArgument."""
    bits = bits_of(codec)
    if head_dim not in ROTATED_DIMS:
        raise InvalidArgument(f"codec {codec}: head_dim {head_dim} is not one of {ROTATED_DIMS}; use 16-bit pages")
    return rotated_tile_bytes(head_dim, bits.key, bits.value)


def coded_pool(pages: CodedPages, heads: tuple[int, int], group: int, *, device: str) -> params.Pool:
    """heads: kv heads and head_dim. Raises InvalidArgument, naming the field that does not fit."""
    size = tile_bytes(pages.codec, heads[1])
    if group > NARROW_GROUP and heads[1] not in WIDE_DIMS:
        raise InvalidArgument(
            f"q: {group} query heads for a kv head of {heads[1]} channels; kernels of {pages.codec} "
            f"take {NARROW_GROUP}, decode the pages first"
        )
    tiles = Buffer.of("pages.tiles", pages.tiles).checked(
        (None, heads[0], None, size), "u8", device=device, dense_from=2
    )
    if tiles.shape[2] < 1:
        raise InvalidArgument("pages.tiles: pages of no tiles; give pages of 16 tokens or more")
    tiles.aligned()
    strides = (*tiles.strides[:1], size // TILE_TOKENS, tiles.strides[1])
    return params.Pool(tiles.address, tiles.address, *strides, TILE_TOKENS * tiles.shape[2], tiles.shape[0])


def encode_pages(library: Library, shape: BlockShape, *, plain: Array, coded: Array, found: Array) -> None:
    """Writes the payload of each block. Raises InvalidArgument.

    plain, coded: u64 [n], addresses of blocks and of payloads, multiples of 16. found: f32 [n, 2],
    zeroed: the square of a row's largest error, and the largest magnitude of a value. If either is
    not finite, the payload is useless: keep the block as it is.
    """
    count = Buffer.of("plain", plain).checked((None,), "u64", device=library.device, dense_from=0).shape[0]
    place = Buffer.of("found", found).checked((count, 2), "f32", device=library.device, dense_from=0).address
    _launch(library, "rotate", shape, (plain, coded, place))


def decode_pages(library: Library, shape: BlockShape, *, coded: Array, plain: Array) -> None:
    """Writes each block from its payload, rounded to the block's type. As `encode_pages`."""
    _launch(library, "unrotate", shape, (plain, coded, None))


def _launch(library: Library, name: str, shape: BlockShape, arrays: tuple[Array, Array, int | None]) -> None:
    size, bits = tile_bytes(shape.codec, shape.head_dim), bits_of(shape.codec)
    if shape.dtype not in ("bf16", "f16") or min(shape.layers, shape.kv_heads, shape.tokens) < 1:
        raise InvalidArgument(f"shape: no kernel has {shape}; give bf16 or f16, and sizes of 1 or more")
    plain, coded, found = arrays
    to = Buffer.of("plain", plain).checked((None,), "u64", device=library.device, dense_from=0)
    of = Buffer.of("coded", coded).checked(to.shape, "u64", device=library.device, dense_from=0)
    sizes = (to.shape[0], shape.layers, shape.kv_heads, shape.tokens)
    given = params.Rotate(to.address, of.address, found, shape.strides(), *sizes, bits.key, bits.value)
    rows = 2 * TILE_TOKENS * (2 * shape.head_dim + ROW_PADDING + shape.head_dim + CODE_PADDING)
    grid = (min(ROTATE_BLOCKS, to.shape[0] * shape.tiles), 1, 1)
    library.launch(f"{name}_{shape.dtype}_{shape.head_dim}", grid, given, shared_bytes=rows + size)
