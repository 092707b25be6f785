"""The prefix of an encoded block: fewer bytes to read and decode, with a bound of its own.

    first bytes ─▶ prefix_bytes ─▶ so many bytes ─▶ decode_prefix ─▶ block, with a greater error

A layered block's prefix ends with the coarse part of its payload, and has a checksum of its own.
The prefix of any other block is the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tierd.codecs import block
from tierd.codecs.block import ANY, FRONT, FRONT_CHECKSUM, HEADER, MAGIC, Codec, Decoded, Wanted
from tierd.codecs.calibration import Calibration
from tierd.codecs.layered import COARSE, LAYERED
from tierd.codecs.values import Bytes
from tierd.errors import CorruptRecord

HEAD_BYTES = HEADER.itemsize + FRONT.itemsize
"""Bytes from the start that tell how long the prefix is."""


def prefix_bytes(head: Any) -> int:
    """Bytes that `decode_prefix` reads. head: the first HEAD_BYTES of the block, or more of it.

    These bytes are not verified yet: compare the result with the length of the block. Raises
    CorruptRecord for bytes that begin no block.
    """
    data = np.frombuffer(head, np.uint8)
    header = data[: HEADER.itemsize].view(HEADER) if len(data) >= HEADER.itemsize else None
    if header is None or header["magic"][0] != MAGIC:
        raise CorruptRecord(f"encoded block: {len(data)} bytes have no header; read another copy")
    if header["codec"][0] != LAYERED.number:
        return HEADER.itemsize + int(header["payload"][0])
    if len(data) < HEAD_BYTES:
        raise CorruptRecord(f"encoded block: {len(data)} bytes are less than {HEAD_BYTES}; read so many at least")
    return HEADER.itemsize + int(data[HEADER.itemsize : HEAD_BYTES].view(FRONT)["length"][0])


def decode_prefix(
    data: Any,
    codecs: Mapping[int, Codec],
    calibrations: Mapping[bytes, Calibration] | None = None,
    *,
    wanted: Wanted = ANY,
    out: Bytes | None = None,
) -> Decoded:
    """A block of its prefix, as `block.decode`, which names the errors too. data: `prefix_bytes` or
    more of the block. The error is that of the coarse part, and codec is COARSE's number."""
    if wanted.codec == LAYERED.number:
        wanted = wanted._replace(codec=COARSE.number)
    return block.decode(coarse_block(data), {**codecs, COARSE.number: COARSE}, calibrations, wanted=wanted, out=out)


def coarse_block(data: Any) -> Bytes:
    """The prefix of a layered block as a block of codec COARSE; other blocks as they are.

    Raises CorruptRecord for a damaged prefix, and for less than the prefix.
    """
    coded, length = np.frombuffer(data, np.uint8), prefix_bytes(data)
    head = coded[: HEADER.itemsize]
    if head.view(HEADER)["codec"][0] != LAYERED.number:
        return coded[:length]
    front, rest = (
        coded[HEADER.itemsize :][: FRONT.itemsize].view(FRONT)[0],
        coded[HEADER.itemsize + FRONT_CHECKSUM : length],
    )
    if length < HEAD_BYTES or front["checksum"] != block._checksum(head.tobytes(), rest):
        raise CorruptRecord("encoded block: the prefix's checksum does not match; read another copy")
    made = np.concatenate((head, coded[HEAD_BYTES:length]))
    header = made[: HEADER.itemsize].view(HEADER)
    header["codec"], header["payload"], header["error"] = COARSE.number, length - HEAD_BYTES, front["error"]
    header["checksum"] = block._checksum(header.tobytes(), made[HEADER.itemsize :])
    return made
