"""An encoded block: a header of 64 bytes, then the codec's payload. FORMAT.md has the offsets.

    block bytes ─▶ encode ─▶ header | payload        header | payload ─▶ decode ─▶ block bytes

A block with a value that is not finite is kept as it is, under codec 0: no lossy code can hold it.
It also keeps its own bytes if the codec's payload would be no shorter. The header names everything
that decoding needs, and its checksum covers the payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from tierd.checksum import record_checksum
from tierd.codecs import loops
from tierd.codecs.calibration import Calibration
from tierd.codecs.values import DTYPES, INFINITY, LAYOUTS, ROUNDING, Bytes, KVShape, Raw, bytes_of, floats_of, raw_of
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord, InvalidArgument, Unsupported

MAGIC, VERSION = 0x56_4B_44_54, 1  # "TDKV"
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "<u2"),
        ("codec_version", "<u2"),
        ("dtype", "u1"),
        ("layout", "u1"),
        ("layers", "<u4"),
        ("kv_heads", "<u4"),
        ("head_dim", "<u4"),
        ("tokens", "<u4"),
        ("payload", "<u4"),
        ("error", "<f4"),
        ("calibration", "V16"),
        ("position", "<u4"),
        ("checksum", "<u8"),
    ]
)
FRONT = np.dtype([("checksum", "<u8"), ("length", "<u4"), ("error", "<f4")])
"""At the start of a payload with a prefix, and part of the prefix. Its checksum covers the header and
the rest of the prefix."""
FRONT_CHECKSUM = 8
"""Bytes of the checksum."""
IDENTITY = 0
POSITION_MAX = (1 << 32) - 1
_FIELDS = HEADER.names or ()
_PACKED = struct.Struct("<I3H2B5If16sIQ")
"""HEADER, read and written at once."""


class Context(NamedTuple):
    """Beside the values, a codec may need these.

    position: of the block's first token in its sequence. Codecs that undo RoPE need it. out: memory
    that the result may take, through `room` and `room_for_raw`; None: new memory.
    """

    position: int = 0
    calibration: Calibration | None = None
    out: Bytes | None = None


NO_CONTEXT = Context()


class Prefix(NamedTuple):
    """The part of a payload that can be decoded alone. length: its bytes, FRONT included. error: as
    the payload's."""

    length: int
    error: float


class Payload(NamedTuple):
    """error: the largest error of a value before it is rounded to the block's dtype; 0: exact.

    whole: data with room for a header before it, if `room` made it. prefix: data then begins with
    room for FRONT.
    """

    data: Bytes
    error: float
    whole: Bytes | None = None
    prefix: Prefix | None = None


class Room(NamedTuple):
    """whole: room for a header, then data."""

    whole: Bytes
    data: Bytes


def room(length: int, context: Context) -> Room:
    """Memory for a payload of so many bytes. It spares the copy that puts a header before it."""
    size, out = HEADER.itemsize + length, context.out
    whole = np.empty(size, np.uint8) if out is None or len(out) < size else out[:size]
    return Room(whole, whole[HEADER.itemsize :])


def room_for_raw(shape: KVShape, context: Context) -> Raw:
    """Memory for a block's values, in the order of its layout."""
    return raw_of(np.empty(shape.block_bytes, np.uint8) if context.out is None else context.out, shape)


class Lengths(NamedTuple):
    """Bytes of a payload, known from the shape before any memory is taken."""

    least: int
    most: int


class Codec(Protocol):
    """One way to encode. The values that `encode` takes are finite, unless the codec is exact."""

    @property
    def name(self) -> str:
        """For settings and people."""

    @property
    def number(self) -> int:
        """In stored blocks."""

    @property
    def version(self) -> int:
        """Of the payload's format; older ones can be decoded too."""

    @property
    def is_exact(self) -> bool:
        """Whether decoded blocks equal the originals bit by bit, whatever the values."""

    @property
    def is_calibrated(self) -> bool:
        """Whether encode and decode need a calibration."""

    def check(self, shape: KVShape) -> None:
        """Raises Unsupported if blocks of this shape cannot be encoded."""

    def lengths(self, shape: KVShape) -> Lengths:
        """Of any payload for this shape."""

    def expected_bytes(self, shape: KVShape) -> int:
        """Bytes that hold the payload of nearly every block; `lengths` has the limit."""

    def encode(self, raw: Raw, shape: KVShape, context: Context) -> Payload:
        """raw may be a view with any strides; the last axis is contiguous. An error that is not
        finite says that the values cannot be encoded."""

    def decode(self, payload: Bytes, shape: KVShape, context: Context) -> Raw:
        """The values of a payload within `lengths`. Raises CorruptRecord for an impossible one."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """block: its bytes. error: of a value at most, absolute. codec: number that the block has.
    shape: from its header."""

    block: Bytes
    error: float
    codec: int
    shape: KVShape


class Wanted(NamedTuple):
    """Shape and codec that a block must have; codec 0 is always right. None: any."""

    shape: KVShape | None = None
    codec: int | None = None


ANY = Wanted()


def encode(codec: Codec, block: Any, shape: KVShape, context: Context = NO_CONTEXT, out: Bytes | None = None) -> Bytes:
    """Header and payload. block: contiguous bytes. Raises InvalidArgument, Unsupported.

    out: memory for a header and a whole block, apart from block. The result is a view of it.
    """
    codec.check(shape)
    if out is not None and len(out) < HEADER.itemsize + shape.block_bytes:
        raise InvalidArgument(
            f"codec {codec.name}: out has {len(out)} bytes; give {HEADER.itemsize + shape.block_bytes}, for a header "
            "and a whole block"
        )
    context = Context(context.position, context.calibration, out)
    if codec.is_calibrated:
        check_calibration(context.calibration, shape, codec.name)
    if not 0 <= context.position <= POSITION_MAX:
        raise InvalidArgument(
            f"codec {codec.name}: position {context.position} is outside 0 to {POSITION_MAX}; store the block as it is"
        )
    raw = raw_of(block, shape)
    dtype = shape.geometry.dtype
    largest = 0 if codec.is_exact else loops.largest(np.frombuffer(block, np.uint16))
    if largest >= INFINITY[dtype]:
        return _identity(raw, shape, out)
    with np.errstate(over="ignore", invalid="ignore"):
        payload = codec.encode(raw, shape, context)
    if not math.isfinite(payload.error) or len(payload.data) >= shape.block_bytes:
        return _identity(raw, shape, out)
    if codec.is_exact:
        return _framed(codec, shape, payload, context)
    top = float(floats_of(np.array([largest], np.uint16), dtype)[0])
    payload = payload._replace(error=_rounded_error(payload.error, top, dtype))
    if payload.prefix:
        error = _rounded_error(payload.prefix.error, top, dtype)
        payload = payload._replace(prefix=payload.prefix._replace(error=error))
    return _framed(codec, shape, payload, context)


def _rounded_error(error: float, top: float, dtype: str) -> float:
    """The error after values are rounded to dtype. top: the largest value."""
    relative, absolute = ROUNDING[dtype]
    bound = np.float32(error * (1 + 1e-5) + max((top + error) * relative, absolute))
    return float(np.nextafter(bound, np.float32(np.inf)))


def decode(
    data: Any,
    codecs: Mapping[int, Codec],
    calibrations: Mapping[bytes, Calibration] | None = None,
    *,
    wanted: Wanted = ANY,
    out: Bytes | None = None,
) -> Decoded:
    """A block again. calibrations: by hash. wanted: is compared before any work.

    out: memory for the block, of its length and apart from data. It has no valid block if decode
    raises.

    Raises CorruptRecord for damaged data or another block. Raises Unsupported for an unknown codec,
    version or calibration. Raises InvalidArgument for an out of another length.
    """
    coded = np.frombuffer(data, np.uint8)
    if len(coded) < HEADER.itemsize:
        raise CorruptRecord(
            f"encoded block: {len(coded)} bytes are no header, which has {HEADER.itemsize}; read another copy"
        )
    head, payload = coded[: HEADER.itemsize].tobytes(), coded[HEADER.itemsize :]
    header = dict(zip(_FIELDS, _PACKED.unpack(head), strict=True))
    if header["magic"] != MAGIC or header["checksum"] != _checksum(head, payload):
        raise CorruptRecord("encoded block: the header's checksum does not match; read another copy")
    number, version = header["codec"], header["codec_version"]
    coder = codecs.get(number)
    known = 1 if number == IDENTITY else coder.version if coder else 0
    if header["version"] != VERSION or not 0 < version <= known:
        raise Unsupported(
            f"encoded block: format {header['version']}, codec {number} in version {version} is unknown here; upgrade "
            "tierd"
        )
    found = _shape_of(_Said(*(header[field] for field in _Said._fields)))
    shape, codec = wanted
    if shape not in (None, found) or (codec not in (None, number) and number != IDENTITY):
        raise CorruptRecord(
            f"encoded block: it has codec {number} and {found.text}, wanted are codec {codec} and "
            f"{shape.text if shape else 'any shape'}; compute the block again"
        )
    error = header["error"]
    if not 0 <= error < math.inf or (error and (coder is None or coder.is_exact)):
        raise CorruptRecord(f"encoded block: error {error} is impossible for codec {number}; read another copy")
    if coder is not None:
        coder.check(found)
    least, most = coder.lengths(found) if coder else (found.block_bytes, found.block_bytes)
    if len(payload) != header["payload"] or not least <= len(payload) <= most:
        raise CorruptRecord(
            f"encoded block: the payload has {len(payload)} bytes, its shape takes {least} to {most}; read another copy"
        )
    if out is not None and len(out) != found.block_bytes:
        raise InvalidArgument(f"encoded block: out has {len(out)} bytes; give {found.block_bytes}, as the block has")
    if coder is None:
        if out is not None:
            out[:] = payload
        return Decoded(payload if out is None else out, 0.0, IDENTITY, found)
    calibration = None
    if coder.is_calibrated:
        digest = header["calibration"]
        calibration = check_calibration((calibrations or {}).get(digest), found, coder.name, digest.hex())
    raw = coder.decode(payload, found, Context(header["position"], calibration, out))
    if out is None:
        return Decoded(bytes_of(raw, found), error, number, found)
    if loops.address_of(raw) != loops.address_of(out):
        raw_of(out, found)[:] = raw
    return Decoded(out, error, number, found)


def check_calibration(calibration: Calibration | None, shape: KVShape, name: str, wanted: str = "") -> Calibration:
    """The calibration. Raises Unsupported unless the calibration is of this shape."""
    if calibration is None:
        raise Unsupported(
            f"codec {name}: calibration {wanted or 'of the namespace'} is not here; make it with `tierctl calibrate`, "
            "or read another copy"
        )
    g, own = shape.geometry, calibration.geometry
    if (g.layers, g.kv_heads, g.head_dim) != (own.layers, own.kv_heads, own.head_dim):
        raise Unsupported(
            f"codec {name}: calibration {calibration.hash.hex()} is for layers, heads, head_dim "
            f"{own.layers}, {own.kv_heads}, {own.head_dim}, the block has {g.layers}, {g.kv_heads}, {g.head_dim}; "
            "make one for this model with `tierctl calibrate`"
        )
    return calibration


def _identity(raw: Raw, shape: KVShape, out: Bytes | None = None) -> Bytes:
    return _framed(None, shape, Payload(bytes_of(raw, shape), 0.0), Context(out=out))


def _framed(codec: Codec | None, shape: KVShape, payload: Payload, context: Context) -> Bytes:
    """Header and payload."""
    g, data = shape.geometry, payload.data
    number, version = (codec.number, codec.version) if codec else (IDENTITY, 1)
    calibration = context.calibration.hash if codec and codec.is_calibrated and context.calibration else b""
    fields = (
        *(MAGIC, VERSION, number, version, DTYPES.index(g.dtype), LAYOUTS.index(g.layout)),
        *(g.layers, g.kv_heads, g.head_dim, shape.tokens, len(data), payload.error, calibration, context.position),
    )
    blank = _PACKED.pack(*fields, 0)
    if payload.prefix:
        front, rest = data[: FRONT.itemsize].view(FRONT), data[FRONT_CHECKSUM : payload.prefix.length]
        front["length"], front["error"] = payload.prefix
        front["checksum"] = _checksum(blank, rest)
    head = _PACKED.pack(*fields, _checksum(blank, data))
    whole = room(len(data), context).whole if payload.whole is None else payload.whole
    if payload.whole is None:
        whole[HEADER.itemsize :] = data
    whole[: HEADER.itemsize] = np.frombuffer(head, np.uint8)
    return whole


def _checksum(header: bytes, payload: Bytes) -> int:
    """Over the header without the checksum, chained with the payload's."""
    return record_checksum(struct.pack("<2Q", record_checksum(header[:-8]), record_checksum(payload)))


class _Said(NamedTuple):
    """Fields of a header."""

    dtype: int
    layout: int
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int


@lru_cache
def _shape_of(said: _Said) -> KVShape:
    """Raises CorruptRecord for an impossible shape."""
    if said.dtype >= len(DTYPES) or said.layout >= len(LAYOUTS):
        raise CorruptRecord(f"encoded block: dtype {said.dtype}, layout {said.layout} do not exist; read another copy")
    dtype, layout = DTYPES[said.dtype], LAYOUTS[said.layout]
    try:
        return KVShape(KVGeometry(said.layers, said.kv_heads, said.head_dim, dtype, layout), said.tokens)
    except InvalidArgument as error:
        raise CorruptRecord(f"encoded block: its header is impossible ({error}); read another copy") from None


def exact(block: Any, shape: KVShape) -> Bytes:
    """The block under codec 0: a header and its own bytes. Raises InvalidArgument."""
    return _identity(raw_of(block, shape), shape)
