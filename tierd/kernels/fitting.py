"""Chooses how deep kernels buffer tiles in shared memory: the most that fits a thread block.

`decode_fit` chooses before a launch, as in cuda/src. Prefill has one depth. If no depth fits, they
refuse with an error that names the limit. All kernels fit the 99 KiB of a block of sm_86, 89 or
120.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.errors import InvalidArgument
from tierd.kernels.buffers import BYTES
from tierd.kernels.library import Library

TILE_TOKENS = 16
WIDE_DIM = 128
"""Larger head dims have half the warps in decode."""
RINGS = (3, 2)
"""Tiles of K and V that a warp of decode has: one in use, the others in flight. Deepest first."""
SHARE_BYTES = 32
"""An int for each warp of decode and two more, to find a block's share, and the launch's number."""
PADDING = 4
"""Floats after each output of a warp of decode, so that heads lie in other banks."""
ROTATED = "rot"
"""Before the bits of keys and values: rotated codes, such as rot84."""
SCALE_BYTES = 4
"""Of a token in a tile of rotated codes: a key's scale and a value's."""
WORK_BYTES, STAGED_TILES = 128, 4
"""Of a block of prefill: what it does, and its tiles of K and V in two stages."""


@dataclass(frozen=True, slots=True)
class Fit:
    """depth: of RINGS, 1 for prefill. shared_bytes: that a block takes."""

    depth: int
    shared_bytes: int


def decode_fit(library: Library, head_dim: int, group: int, kv_type: str) -> Fit:
    """group: query heads for each kv head; kv_type: of stored keys. Raises InvalidArgument."""
    warps = 2 if head_dim > WIDE_DIM else 4
    tile = _tile_bytes(head_dim, kv_type)
    joined = 4 * group * (head_dim + PADDING + 3)  # a warp's outputs and three sums of each head, for the others
    fits = [Fit(ring, warps * (ring * tile + joined) + SHARE_BYTES) for ring in RINGS]
    return _first(fits, library, f"{head_dim} of {kv_type} with {group} query heads for a kv head")


def prefill_rows(head_dim: int) -> int:
    """Query rows of a block of prefill: a row is a token and a head of the group."""
    return 64 if head_dim > WIDE_DIM else 128


def prefill_fit(library: Library, head_dim: int, kv_type: str) -> Fit:
    """As of decode. Raises InvalidArgument."""
    queries = prefill_rows(head_dim) * head_dim * BYTES["f16"]
    fits = [Fit(1, WORK_BYTES + queries + STAGED_TILES * _tile_bytes(head_dim, kv_type))]
    return _first(fits, library, f"{head_dim} of {kv_type}")


def rotated_tile_bytes(head_dim: int, key_bits: int, value_bits: int) -> int:
    """Of 16 tokens' codes and scales."""
    return TILE_TOKENS * ((key_bits + value_bits) * head_dim // 8 + SCALE_BYTES)


def _tile_bytes(head_dim: int, kv_type: str) -> int:
    if kv_type.startswith(ROTATED):
        return rotated_tile_bytes(head_dim, *map(int, kv_type.removeprefix(ROTATED)))
    return 2 * TILE_TOKENS * head_dim * BYTES[kv_type]


def _first(fits: list[Fit], library: Library, what: str) -> Fit:
    limit = library.block_shared_bytes
    found = next((fit for fit in fits if fit.shared_bytes <= limit), None)
    if found is None:
        raise InvalidArgument(
            f"q: head_dim {what} takes {fits[-1].shared_bytes} bytes of shared memory at least, a block of {library.device} has {limit}; "
            "give pages of e4m3, or a smaller head dim or group"
        )
    return found
