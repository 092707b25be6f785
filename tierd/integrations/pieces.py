"""Copies a block between its page and an engine's memory, which holds it in pieces.

The pieces are one or more per layer, in the order of the block's bytes, and add up to its length. A
piece is a numpy array or torch tensor of any strides, copied in the order of its axes. If it is on
a device, torch copies it, and it has arrived when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.client.blocks.buffers import address_of, flat
from tierd.client.blocks.copying import BLOCK, Sums, are_slices, blocks_of, sum_and_copy
from tierd.core.formats.model import StructArray
from tierd.errors import InvalidArgument

Bytes = NDArray[np.uint8]
Piece = Any
"""numpy array, or torch tensor; C order of its axes is the order of its bytes in the block."""
Pieces = Sequence[Piece]
Row = tuple[int, int, int, int]
"""source, target, length, layers: of BLOCK (client/blocks/copying.py)."""


def copy_all_in(sources: Sequence[Pieces], pages: Sequence[Bytes], layers: Sequence[int]) -> Sums:
    """Copies engine memory to pages, block by block. Returns all slices' xxh3-64 sums, u64
    little-endian.

    `layers` has one entry a block. The same pass sums the bytes that it copies. It reads the pieces
    directly if each is contiguous host memory and holds whole slices. Otherwise each block is first
    joined in memory that stays in the processor's caches. Raises InvalidArgument as copy_in does.
    """
    blocks = [*zip(sources, pages, layers, strict=True)]
    rows = [_rows(*block) for block in blocks]
    if all(rows):
        return sum_and_copy(np.array([*chain.from_iterable(rows)], BLOCK))
    joined = np.empty(max(map(len, pages)), np.uint8)
    return np.concatenate([_copy_joined(*block, joined) for block in blocks])


def copy_in(pieces: Pieces, page: Bytes) -> None:
    """Engine to page. Raises InvalidArgument if the pieces do not add up to the page."""
    for piece, part in matched(pieces, page):
        if isinstance(piece, np.ndarray):
            np.copyto(_shaped(part, piece), piece)
        else:
            _tensor(part, piece).copy_(piece)


def copy_out(page: Bytes, pieces: Pieces, *, is_awaited: bool = True) -> None:
    """Page to engine. Raises InvalidArgument if the pieces do not add up to the page.

    is_awaited: a device's bytes have arrived on return. Otherwise they arrive at this place of the
    current stream.
    """
    for piece, part in matched(pieces, page):
        if isinstance(piece, np.ndarray):
            np.copyto(piece, _shaped(part, piece))
        else:
            piece.copy_(_tensor(part, piece), non_blocking=not is_awaited)


def rows_out(blocks: Sequence[tuple[Bytes, Pieces]]) -> StructArray | None:
    """BLOCK [pieces], for `sum_and_copy`: from pages to their pieces. None unless all pieces are
    contiguous host memory and each block has equally many.

    One call then copies all without the interpreter's lock. Many short copies would keep that from
    the engine's thread.
    """
    counts = {len(pieces) for _, pieces in blocks}
    flat_pieces = [piece for _, pieces in blocks for piece in pieces]
    if len(counts) != 1 or not all(isinstance(piece, np.ndarray) for piece in flat_pieces):
        return None
    rows = np.zeros((len(blocks), counts.pop()), BLOCK)
    lengths = rows["length"] = np.reshape([piece.nbytes for piece in flat_pieces], rows.shape)
    if lengths.sum(axis=1).tolist() != [len(page) for page, _ in blocks]:
        return None
    try:
        rows["target"] = np.reshape([address_of(piece, writable=True) for piece in flat_pieces], rows.shape)
    except ValueError:
        return None
    starts = np.array([page.__array_interface__["data"][0] for page, _ in blocks], np.uint64)
    rows["source"] = starts[:, None] + (np.cumsum(lengths, axis=1) - lengths).astype(np.uint64)
    return rows.reshape(-1)


def are_whole_slices(pieces: Pieces, layers: int) -> bool:
    """Whether a block in these pieces has the sums of its page: each is contiguous host memory and
    holds whole slices. layers: of the block."""
    if not all(isinstance(piece, np.ndarray) and piece.flags.c_contiguous for piece in pieces):
        return False
    sizes = tuple(map(piece_bytes, pieces))
    return are_slices(sizes, sum(sizes), layers)


def matched(pieces: Pieces, page: Bytes) -> Iterator[tuple[Piece, Bytes]]:
    """Each piece with its part of the page. Raises InvalidArgument if they do not add up to the page."""
    found = sum(piece.nbytes for piece in pieces)
    if found != len(page):
        raise InvalidArgument(
            f"block: {len(page)} bytes in tierd, {found} in the engine's {len(pieces)} pieces; the namespace's block_bytes is wrong"
        )
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        yield piece, page[start:end]


def piece_bytes(piece: Piece) -> int:
    """Bytes of a piece."""
    return int(piece.nbytes)


def _copy_joined(pieces: Pieces, page: Bytes, layers: int, joined: Bytes) -> Sums:
    """Copies one block after joining it in `joined`, which has room for it."""
    copy_in(pieces, joined[: len(page)])
    return sum_and_copy(blocks_of([address_of(joined)], [address_of(page)], [len(page)], layers))


def _rows(pieces: Pieces, page: Bytes, layers: int) -> list[Row]:
    """One row a piece. None unless every piece is contiguous host memory that holds whole slices."""
    lengths = tuple(map(piece_bytes, pieces))
    if not are_slices(lengths, len(page), layers):
        return []
    try:
        at = [address_of(flat(piece)) for piece in pieces]
    except InvalidArgument:
        return []
    targets = accumulate(lengths[:-1], initial=address_of(page))
    return [(source, target, length, 0) for source, target, length in zip(at, targets, lengths, strict=True)]


def _shaped(part: Bytes, like: Any) -> Any:
    """The bytes as an array of the piece's type and shape; a row of bytes, the usual piece, unchanged."""
    return part if like.ndim == 1 and like.dtype == np.uint8 else part.view(like.dtype).reshape(like.shape)


def _tensor(part: Bytes, like: Any) -> Any:
    """The bytes as a tensor of the piece's type and shape; torch is there, since the piece is a tensor."""
    import torch  # noqa: PLC0415

    return torch.from_numpy(part if part.flags.writeable else _lent(part)).view(like.dtype).view(like.shape)


def _lent(part: Bytes) -> Bytes:
    """A read-only page as an array that torch accepts without a warning. It is only the source of a copy."""
    face: dict[str, Any] = {**part.__array_interface__, "data": (part.ctypes.data, False)}
    holder = type("_Lent", (), {"__array_interface__": face, "page": part})()
    return np.asarray(holder)
