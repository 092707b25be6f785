"""A block's bytes where an engine keeps them: in pieces, one a layer or more, in the order of the block's own bytes.

Purpose: one copy between an engine's memory and a page. Non-purpose: knowing what a piece means. Invariants: the pieces of a block add up to its length;
a piece is a numpy array or a torch tensor of any strides, copied in the order of its own axes; a piece on a device is copied by torch, and has arrived when
the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import InvalidArgument

Bytes = NDArray[np.uint8]
Piece = Any
"""numpy array, or torch tensor; C order of its axes is the order of its bytes in the block."""
Pieces = Sequence[Piece]


def copy_in(pieces: Pieces, page: Bytes) -> None:
    """Engine to page. Raises InvalidArgument if the pieces do not add up to the page."""
    for piece, part in _matched(pieces, page):
        if isinstance(piece, np.ndarray):
            np.copyto(_shaped(part, piece), piece)
        else:
            _tensor(part, piece).copy_(piece)


def copy_out(page: Bytes, pieces: Pieces) -> None:
    """Page to engine. Raises InvalidArgument if the pieces do not add up to the page."""
    for piece, part in _matched(pieces, page):
        if isinstance(piece, np.ndarray):
            np.copyto(piece, _shaped(part, piece))
        else:
            piece.copy_(_tensor(part, piece))


def piece_bytes(piece: Piece) -> int:
    """Bytes of a piece."""
    return int(piece.nbytes)


def _matched(pieces: Pieces, page: Bytes) -> Iterator[tuple[Piece, Bytes]]:
    found = sum(piece.nbytes for piece in pieces)
    if found != len(page):
        raise InvalidArgument(
            f"block: {len(page)} bytes in tierd, {found} in the engine's {len(pieces)} pieces; the namespace's block_bytes is wrong"
        )
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        yield piece, page[start:end]


def _shaped(part: Bytes, like: Any) -> Any:
    """The bytes as an array of the piece's type and shape; a row of bytes, which most pieces are, as it is."""
    return part if like.ndim == 1 and like.dtype == np.uint8 else part.view(like.dtype).reshape(like.shape)


def _tensor(part: Bytes, like: Any) -> Any:
    """The bytes as a tensor of the piece's type and shape; torch is there, since the piece is."""
    import torch  # noqa: PLC0415

    return torch.from_numpy(part if part.flags.writeable else _lent(part)).view(like.dtype).view(like.shape)


def _lent(part: Bytes) -> Bytes:
    """A read-only page as an array that torch takes without a warning: it is only ever the source of a copy."""
    face: dict[str, Any] = {**part.__array_interface__, "data": (part.ctypes.data, False)}
    holder = type("_Lent", (), {"__array_interface__": face, "page": part})()
    return np.asarray(holder)
