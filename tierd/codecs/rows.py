"""A block's values as rows: all values of a token over all layers, in groups, without RoPE and mean."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tierd.codecs import loops
from tierd.codecs.block import Context, room_for_raw
from tierd.codecs.rope import Frequencies, Turns, rotate, turns
from tierd.codecs.values import Bytes, Floats, KVShape, Raw, floats_of, rounded

_TURNS = struct.Struct("<5Q")


class Origin(NamedTuple):
    """Rows are without these. mean: float32 [groups, n]. position, frequencies: of RoPE. out: memory
    for the block, or None."""

    mean: Floats
    position: int
    frequencies: Frequencies
    out: Bytes | None = None


def grouped(values: Floats, width: int) -> Floats:
    """[layers, 2, tokens, heads, dim] -> [groups, tokens, width]."""
    tokens = values.shape[2]
    rows = values.transpose(2, 0, 1, 3, 4).reshape(tokens, -1, width)
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def rows_of(raw: Raw, shape: KVShape, origin: Origin) -> Floats:
    """float32 [groups, tokens, n] of a block, contiguous; scratch memory, until the next call."""
    if loops.library is None or shape.geometry.head_dim % loops.STEP:
        values = floats_of(raw, shape.geometry.dtype)
        values[:, 0] = rotate(values[:, 0], origin.position, origin.frequencies, undo=True)
        return grouped(values, origin.mean.shape[1]) - origin.mean[:, None]
    rows = empty_rows(shape, origin.mean.shape[1])
    head = packed(shape, origin, undo=True)
    loops.library.tierd_transform_rows(loops.described(raw, shape), head.data, loops.address_of(rows))
    return rows


def raw_of_rows(rows: Floats, shape: KVShape, origin: Origin) -> Raw:
    """The inverse. rows: contiguous; they become other values."""
    layers, _, tokens, heads, dim = shape.sizes
    if loops.library is None or dim % loops.STEP:
        rows += origin.mean[:, None]
        values = rows.transpose(1, 0, 2).reshape(tokens, layers, 2, heads, dim).transpose(1, 2, 0, 3, 4)
        whole = np.ascontiguousarray(values)
        whole[:, 0] = rotate(whole[:, 0], origin.position, origin.frequencies)
        return rounded(whole, shape.geometry.dtype)
    raw = room_for_raw(shape, Context(out=origin.out))
    head = packed(shape, origin, undo=False)
    loops.library.tierd_transform_values(loops.described(raw, shape), head.data, loops.address_of(rows))
    return raw


def empty_rows(shape: KVShape, width: int) -> Floats:
    """Room for the rows of a block; scratch memory, until the next call."""
    room: Floats = loops.scratch("rows", 4 * shape.values).view(np.float32)
    return room.reshape(-1, shape.tokens, width)


@lru_cache(maxsize=64)
def _turns(tokens: int, position: int, frequencies: bytes) -> Turns:
    """Of few positions: blocks begin at multiples of their length."""
    return turns(tokens, position, np.frombuffer(frequencies, np.float64))


class Packed(NamedTuple):
    """data: TierdTurns of codecs.cpp. arrays: what it points to."""

    data: bytes
    arrays: tuple[Floats, ...]


def packed(shape: KVShape, origin: Origin, *, undo: bool) -> Packed:
    """undo: the angles of keys as they were before RoPE."""
    cosine, sine = _turns(shape.tokens, origin.position, origin.frequencies.tobytes())
    arrays = (cosine, -sine if undo else sine, np.ascontiguousarray(origin.mean, np.float32))
    places = map(loops.address_of, arrays)
    return Packed(_TURNS.pack(*places, len(origin.frequencies), origin.mean.shape[1]), arrays)
